"""The CUDA collectives on the emulated machine: ranks are devices that nothing ever joins.

All calls of a test are enqueued for every rank before any runs, so ranks drift as far apart as the
protocol lets them; results are looked at when all is done, and then every slot must hold the
sentinel again. ``SPEC_KERNELS_ALLREDUCE_CALLS`` makes the random sequences longer.
"""

import ctypes
import itertools
import os
import random

import pytest
import torch
from cuda_on_host import host_build

from spec_kernels.ops.pcie_allreduce.reference import lossy_sum, ordered_sum

pytestmark = pytest.mark.skipif(
    host_build.missing() is not None, reason=f"no CUDA sources on the host: {host_build.missing()}"
)

NUM_CALLS = int(os.environ.get("SPEC_KERNELS_ALLREDUCE_CALLS", "16"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {1: "one_shot", 2: "two_shot", 3: "hierarchical", 4: "hierarchical_pull"}
MAX_STEPS = max(NUM_CALLS, 32) << 19  # several times what the longest sequence takes
RESIDENT = 64  # blocks of a launch: all of a grid, as the protocol asks of a device


@pytest.fixture(params=["cuda_on_host"])
def machine(request):
    m = host_build.load()
    seed(m, 2)
    yield m
    m.configure(host_build.schedule())
    m.set_clock(1)


@pytest.fixture
def make_group(machine):
    from cuda_on_host.groups import Group

    groups = []

    def make(world_size, **options):
        groups.append(Group(machine, world_size, **options))
        return groups[-1]

    yield make
    for group in groups:
        for device in group.devices:
            machine.slow(device, 1)
        group.close()


def seed(machine, number, max_steps=0):
    """Schedule ``number``, another one for each that ``make sanitize`` asks for."""
    machine.configure(number + 100 * host_build.schedule(), RESIDENT, max_steps)


def table(num_blocks, algorithm=1):
    return ((1 << 40, algorithm, num_blocks),)


def same_bits(a, b):
    width = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(width), b.view(width))


def assert_sums(xs, outs):
    """Every rank has ordered_sum's value, and all of them the same bits."""
    want = ordered_sum(xs)
    for out in outs:
        assert torch.allclose(out, want, rtol=0, atol=0, equal_nan=True), (out, want)
        assert torch.equal(torch.signbit(out) | out.isnan(), torch.signbit(want) | want.isnan())
        assert same_bits(out, outs[0])


def integers(rng, numel, dtype):
    return torch.tensor([rng.randrange(-16, 17) for _ in range(numel)], dtype=dtype)


def revealing(rng, numel, dtype):
    """Values whose fp32 sum depends on the order in which they are added."""
    scale = [1.0, 2.0**-9, 2.0**13, -(2.0**13), 2.0**14, 3.0]
    return torch.tensor([rng.choice(scale) * rng.uniform(0.5, 2) for _ in range(numel)]).to(dtype)


def extreme(rng, numel, dtype):
    """NaN of every sign, infinities, -0, and words that equal the sentinel."""
    values = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.0]
    x = torch.tensor([rng.choice(values) for _ in range(numel)]).to(dtype)
    bits = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
    for i in range(numel):
        if rng.random() < 0.3:
            bits[i] = -1
    return x


PAYLOADS = (integers, revealing, extreme)


def place(x, offset):
    """``x`` that many elements into memory of its own, which may end right after it."""
    store = torch.zeros(x.numel() + offset, dtype=x.dtype)
    store[offset:] = x
    return store[offset:]


class Sequence:
    """Random calls of one group, enqueued for all ranks, and what must come out of them."""

    def __init__(self, group, number, algorithms, sizes):
        self.group = group
        self.rng = random.Random(number)
        self.algorithms = algorithms
        self.sizes = sizes
        self.checks = []

    def add(self):
        kind = self.rng.random()
        if kind < 0.8:
            self.sum()
        elif kind < 0.9:
            self.gather()
        elif kind < 0.97:
            self.broadcast()
        else:
            for rank in range(self.group.world_size):
                self.group.barrier(rank)

    def sum(self):
        rng, group = self.rng, self.group
        numel, dtype, make = rng.choice(self.sizes), rng.choice(DTYPES), rng.choice(PAYLOADS)
        algorithm = rng.choice(self.algorithms)
        xs = [make(rng, numel, dtype) for _ in range(group.world_size)]
        outs = []
        for rank, x in enumerate(xs):
            mine = place(x, rng.choice((0, 0, 1, 3)))
            out = mine if rng.random() < 0.3 else place(torch.full_like(x, 7), rng.choice((0, 1)))
            outs.append(group.all_reduce(rank, mine, out, algorithm))
        self.checks.append(lambda: assert_sums(xs, outs))

    def gather(self):
        rng, group = self.rng, self.group
        numel = rng.choice(self.sizes)
        xs = [
            torch.tensor([rng.choice((0, 1, 127, 255)) for _ in range(numel)], dtype=torch.uint8)
            for _ in range(group.world_size)
        ]
        outs = [group.all_gather(rank, place(x, rng.choice((0, 1)))) for rank, x in enumerate(xs)]

        def check():
            for out in outs:
                assert torch.equal(out, torch.stack(xs))

        self.checks.append(check)

    def broadcast(self):
        rng, group = self.rng, self.group
        src = rng.randrange(group.world_size)
        numel = rng.choice(self.sizes)
        xs = [
            torch.tensor([rng.choice((0, 1, -1)) for _ in range(numel)])
            for _ in range(group.world_size)
        ]
        want = xs[src].clone()
        for rank, x in enumerate(xs):
            group.broadcast(rank, x, src)

        def check():
            for x in xs:
                assert torch.equal(x, want)

        self.checks.append(check)

    def finish(self):
        self.group.synchronize()
        for check in self.checks:
            check()
        self.group.assert_at_rest()


ISLANDS = {4: 2, 6: 2, 8: 4}
SHAPES = [(w, 1 + w % 3, ISLANDS.get(w, 0)) for w in range(2, 9)] + [(8, 3, 2)]


@pytest.mark.parametrize("slowed", [False, True], ids=["even", "one_slow"])
@pytest.mark.parametrize("world_size,num_blocks,island_size", SHAPES)
def test_case_30_random_sequences_stay_exact(
    machine, make_group, world_size, num_blocks, island_size, slowed
):
    """Sizes, dtypes, algorithms, alignments; with one rank that lags as far as it can."""
    seed(machine, 2 * world_size + slowed + 2, MAX_STEPS)
    group = make_group(
        world_size,
        one_shot_bytes=4096,
        two_shot_bytes=6144,
        island_size=island_size,
        table=((256, 1, 1), (3000, 2, num_blocks), (1 << 40, 1, num_blocks)),
    )
    if slowed:
        machine.slow(group.devices[world_size // 2], 24)
    algorithms = (0, 1, 2, 3, 4) if island_size else (0, 1, 2)
    sizes = (1, 2, 5, 9, 64, 127, 700, 1000, 1025, 2100, 3500)
    sequence = Sequence(group, world_size, algorithms, sizes)
    for _ in range(NUM_CALLS):
        sequence.add()
    sequence.finish()


@pytest.mark.parametrize("order", [0, 1])
def test_random_sequences_under_the_orders_that_are_not_random(machine, make_group, order):
    machine.configure(order, RESIDENT)
    group = make_group(8, island_size=2, table=table(3))
    sequence = Sequence(group, order, (1, 2, 3, 4), (1, 300, 2500))
    for _ in range(NUM_CALLS):
        sequence.add()
    sequence.finish()


@pytest.mark.parametrize("algorithm", NAMES)
def test_case_31_back_to_back_calls_leave_nothing_stale(machine, make_group, algorithm):
    """The same slots again and again, one rank lagging: what a wrong clear would show first."""
    seed(machine, 3, MAX_STEPS)
    group = make_group(4, island_size=2, table=table(2))
    machine.slow(group.devices[1], 12)
    sequence = Sequence(group, algorithm, (algorithm,), (600,))
    for _ in range(2 * NUM_CALLS):
        sequence.sum()
    sequence.finish()


@pytest.mark.parametrize("algorithm", NAMES)
def test_tiles_change_hands_between_calls(machine, make_group, algorithm):
    """A tile that block 1 takes in one call is block 0's in the next: one epoch for all blocks."""
    seed(machine, 7, MAX_STEPS)
    group = make_group(
        4,
        one_shot_bytes=12 << 10,
        two_shot_bytes=12 << 10,
        island_size=2,
        table=((4800, 1, 2), (1 << 40, 1, 1)),
    )
    machine.slow(group.devices[0], 12)
    sequence = Sequence(group, algorithm, (algorithm,), (1100, 2600))
    for _ in range(NUM_CALLS):
        sequence.sum()
    sequence.finish()


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("numel", [*range(1, 20), 257, 1023, 1024, 1025])
def test_case_33_any_size_and_alignment(machine, make_group, numel, algorithm):
    rng = random.Random(numel)
    group = make_group(6, island_size=2, table=table(2))
    done = []
    for offset in (0, 1, 5):
        for dtype in DTYPES:
            xs = [integers(rng, numel, dtype) for _ in range(6)]
            stores = [torch.full((numel + 16,), 9, dtype=dtype) for _ in xs]
            outs = [store[8 + offset % 3 :][:numel] for store in stores]
            for rank, x in enumerate(xs):
                group.all_reduce(rank, place(x, offset), outs[rank], algorithm)
            done.append((xs, outs, stores, 8 + offset % 3))
    group.synchronize()
    for xs, outs, stores, begin in done:
        assert_sums(xs, outs)
        for store in stores:
            assert bool((store[:begin] == 9).all() and (store[begin + numel :] == 9).all())
    group.assert_at_rest()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8])
def test_case_34_the_same_bits_from_every_algorithm(machine, make_group, world_size):
    group = make_group(world_size, island_size=ISLANDS.get(world_size, 0), table=table(2))
    rng = random.Random(world_size)
    for dtype in DTYPES:
        xs = [revealing(rng, 500, dtype) for _ in range(world_size)]
        results = []
        for algorithm in (1, 2, 3, 4) if world_size in ISLANDS else (1, 2):
            results += [group.all_reduce(r, x, algorithm=algorithm) for r, x in enumerate(xs)]
        group.synchronize()
        assert_sums(xs, results)
        if world_size > 2 and dtype == torch.float32:
            rotated = ordered_sum(xs[1:] + xs[:1])
            assert not torch.equal(rotated, results[0]), "the payload does not tell orders apart"


@pytest.mark.parametrize("algorithm", NAMES)
def test_case_35_sums_are_rounded_once(machine, make_group, algorithm):
    """256 and seven halves: in bf16, whose unit is 2 there, each half alone would be lost."""
    group = make_group(8, island_size=4, table=table(1))
    xs = [torch.full((40,), 256.0 if r == 0 else 0.5, dtype=torch.bfloat16) for r in range(8)]
    outs = [group.all_reduce(r, x, algorithm=algorithm) for r, x in enumerate(xs)]
    group.synchronize()
    for out in outs:
        assert out.tolist() == [260.0] * 40


@pytest.mark.parametrize("algorithm", NAMES)
def test_words_that_equal_the_sentinel_arrive_as_nan(machine, make_group, algorithm):
    seed(machine, 2, max_steps=1 << 22)
    machine.set_clock(100)
    group = make_group(4, island_size=2, table=table(1))
    for dtype in DTYPES:
        width = torch.int32 if dtype == torch.float32 else torch.int16
        xs = [torch.ones(600, dtype=dtype) for _ in range(4)]
        xs[2].view(width)[:300] = -1
        outs = [
            group.all_reduce(r, x, algorithm=algorithm, timeout_ms=20) for r, x in enumerate(xs)
        ]
        group.synchronize()
        assert group.check(0) is None
        for out in outs:
            assert bool(out[:300].isnan().all()) and bool((out[300:] == 4).all())


def test_minus_zero_stays(machine, make_group):
    group = make_group(3, table=table(1))
    xs = [torch.full((9,), -0.0) for _ in range(3)]
    outs = [group.all_reduce(r, x, algorithm=2) for r, x in enumerate(xs)]
    group.synchronize()
    assert all(bool(torch.signbit(out).all()) for out in outs)


@pytest.mark.parametrize("algorithm", NAMES)
def test_messages_beyond_the_capacity_take_several_launches(machine, make_group, algorithm):
    group = make_group(4, one_shot_bytes=2048, two_shot_bytes=2048, island_size=2, table=table(2))
    rng = random.Random(0)
    xs = [revealing(rng, 2500, torch.bfloat16) for _ in range(4)]
    before = machine.num_launches()
    outs = [group.all_reduce(r, x, algorithm=algorithm) for r, x in enumerate(xs)]
    group.synchronize()
    assert machine.num_launches() - before == 4 * 3
    assert_sums(xs, outs)


def test_nothing_is_launched_for_nothing(machine, make_group):
    group = make_group(2)
    before = machine.num_launches()
    group.all_reduce(0, torch.empty(0))
    for num_rows, hidden in ((0, 7), (3, 0)):
        x, residual, out = (torch.empty(num_rows, hidden) for _ in range(3))
        group.all_reduce_norm(0, x, residual, torch.empty(hidden), out)
    group.all_gather(0, torch.empty(0))
    group.broadcast(0, torch.empty(0), 1)
    assert machine.num_launches() == before
    xs = [torch.ones(3), torch.ones(3)]
    outs = [group.all_reduce(r, x) for r, x in enumerate(xs)]
    group.synchronize()
    assert outs[1].tolist() == [2.0] * 3, "the ranks are still in step"


def test_a_group_of_one_copies(machine):
    ops = getattr(torch.ops, host_build.NAMESPACE)
    nothing = torch.empty(0, dtype=torch.uint8)
    for offset in (0, 1):
        x = place(torch.randn(5000), offset)
        out = torch.full_like(x, torch.nan)
        ops.pcie_allreduce.default(x, out, nothing, 0, 1, 1000, 0)
        assert torch.equal(x, out)
        gathered = torch.full((1, 5000), torch.nan)
        ops.pcie_all_gather.default(x, gathered, nothing, 0, 1, 1000)
        assert torch.equal(gathered[0], x)
        ops.pcie_broadcast.default(x, 0, nothing, 0, 1, 1000)
        ops.pcie_barrier.default(nothing, 0, 1, 1000)


# Lossy forms

LOSSY = {5: "hierarchical_bf16", 6: "two_shot_fp8", 7: "two_shot_int8"}


def wide_range(rng, numel, dtype):
    """Groups of 128 from the smallest to the largest magnitudes, some all zeros, some with NaN."""
    x = torch.tensor([rng.gauss(0, 1) for _ in range(numel)])
    for begin in range(0, numel, 128):
        group = x[begin : begin + 128]
        kind = rng.randrange(8)
        group *= 10.0 ** rng.randrange(-6, 5)
        if kind == 0:
            group.zero_()
        elif kind == 1:
            group[rng.randrange(128)] = rng.choice((float("nan"), float("inf"), -float("inf")))
        elif kind == 2:
            group.fill_(1e-42 if dtype == torch.float32 else -0.0)
        elif kind == 3:
            group.fill_(group[0])  # int8: all +-127
    return x.to(dtype)


def assert_lossy(xs, outs, algorithm):
    want = lossy_sum(xs, algorithm)
    for out in outs:
        assert torch.allclose(out, want, rtol=0, atol=0, equal_nan=True), (out, want)
        assert same_bits(out, outs[0])


@pytest.mark.parametrize("algorithm", LOSSY)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8])
def test_lossy_sums_are_as_defined(machine, make_group, world_size, algorithm):
    seed(machine, world_size, MAX_STEPS)
    island_size = ISLANDS.get(world_size, 0)
    group = make_group(world_size, island_size=island_size, table=table(2))
    rng = random.Random(world_size)
    if algorithm == 5 and not island_size:
        with pytest.raises(RuntimeError, match="algorithm: .*islands"):
            group.all_reduce(0, torch.ones(128), algorithm=algorithm)
        return
    machine.slow(group.devices[world_size // 2], 8)
    done = []
    for i, numel in enumerate((128, 1024, 3072, 640, 2176, 1152)):
        xs = [wide_range(rng, numel, DTYPES[i % 3]) for _ in range(world_size)]
        outs = [
            group.all_reduce(r, place(x, rng.choice((0, 1))), algorithm=algorithm)
            for r, x in enumerate(xs)
        ]
        done.append((xs, outs))
    group.synchronize()
    for xs, outs in done:
        assert_lossy(xs, outs, algorithm)
    group.assert_at_rest()


@pytest.mark.parametrize("algorithm", LOSSY)
def test_lossy_and_exact_calls_take_turns(machine, make_group, algorithm):
    seed(machine, 6, MAX_STEPS)
    group = make_group(4, island_size=2, table=table(2))
    machine.slow(group.devices[2], 12)
    sequence = Sequence(group, algorithm, (1, 2, 3, 4), (1, 300, 1500))
    for i in range(NUM_CALLS // 2):
        sequence.add()
        dtype = DTYPES[i % 3]
        xs = [wide_range(sequence.rng, 128 * (1 + i % 9), dtype) for _ in range(4)]
        outs = [group.all_reduce(r, x, algorithm=algorithm) for r, x in enumerate(xs)]
        sequence.checks.append(lambda xs=xs, outs=outs: assert_lossy(xs, outs, algorithm))
    sequence.finish()


def test_lossy_shapes_are_checked(machine, make_group):
    group = make_group(8, island_size=2)
    with pytest.raises(RuntimeError, match="algorithm: .*islands of 4"):
        group.all_reduce(0, torch.ones(128), algorithm=5)
    with pytest.raises(RuntimeError, match="input: .*multiple of 128"):
        group.all_reduce(0, torch.ones(100), algorithm=6)


@pytest.mark.parametrize("algorithm", LOSSY)
def test_case_36_lossy_calls_end_too(machine, make_group, algorithm):
    seed(machine, 2, max_steps=1 << 24)
    machine.set_clock(100)
    group = make_group(4, island_size=2, table=table(2))
    xs = [torch.ones(1024) for _ in range(4)]
    for _ in (0, 1):
        for rank, x in enumerate(xs):
            group.all_reduce(rank, x, algorithm=algorithm)
    group.synchronize()
    outs = [group.all_reduce(r, xs[r], algorithm=algorithm, timeout_ms=60) for r in (0, 1, 3)]
    group.synchronize()
    assert all(bool(out.isnan().all()) for out in outs)
    texts = [group.check(r) for r in (0, 1, 3)]
    assert any("rank 2 did not arrive" in t and LOSSY[algorithm] in t for t in texts)


# The fused form


def strided(num_rows, hidden, gap, dtype):
    """Rows with ``gap`` elements between them that nobody may touch."""
    store = torch.full((num_rows, hidden + gap), 9, dtype=dtype)
    return store, store[:, :hidden]


class FusedCall:
    """One fused call of all ranks, and the two ops that it must equal bit for bit."""

    def __init__(self, group, rng, num_rows, hidden, dtype, algorithm, **options):
        g = torch.Generator().manual_seed(rng.randrange(1 << 30))
        self.group = group
        self.algorithm = algorithm
        self.xs = [
            revealing(rng, num_rows * hidden, dtype).view(num_rows, hidden)
            for _ in range(group.world_size)
        ]
        self.start = torch.randn(num_rows, hidden, generator=g).to(dtype) * 100
        self.weight = (1 + 0.2 * torch.randn(hidden, generator=g)).to(dtype)
        self.ranks = []
        gap = rng.choice((0, 3, 8))
        in_place = rng.random() < 0.3
        for rank, x in enumerate(self.xs):
            mine = place(x.flatten(), rng.choice((0, 1))).view(num_rows, hidden)
            residual_store, residual = strided(num_rows, hidden, gap, dtype)
            residual.copy_(self.start)
            out_store, out = strided(num_rows, hidden, rng.choice((0, 5)), dtype)
            out = mine if in_place else out
            capture = torch.full((num_rows + 1, 3, hidden), 9, dtype=dtype)
            self.ranks.append((residual_store, residual, out_store, out, capture))
            group.all_reduce_norm(
                rank, mine, residual, self.weight, out, capture, 1, algorithm, **options
            )

    def check(self):
        ops = self.group.ops
        want, stream = torch.empty_like(self.start), self.start.clone()
        capture = torch.full_like(self.ranks[0][-1], 9)
        lossy = self.algorithm in LOSSY
        total = lossy_sum(self.xs, self.algorithm) if lossy else ordered_sum(self.xs)
        ops.hidden_capture.default(total, stream, self.weight, 1e-5, want, capture, 1)
        for residual_store, residual, out_store, out, captured in self.ranks:
            assert same_bits(residual.contiguous(), stream)
            assert same_bits(captured, capture)
            assert same_bits(out.contiguous(), want)
            hidden = residual.shape[1]
            assert bool((residual_store[:, hidden:] == 9).all())
            assert bool((out_store[:, hidden:] == 9).all())


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("hidden", [1, 7, 64, 1000, 2056])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
def test_case_23_fused_is_the_two_ops(machine, make_group, dtype, hidden, algorithm):
    group = make_group(
        4, island_size=2, one_shot_bytes=40 << 10, two_shot_bytes=40 << 10, table=table(3)
    )
    rng = random.Random(hidden)
    before = machine.num_launches()
    calls = [FusedCall(group, rng, n, hidden, dtype, algorithm) for n in (1, 3, 2)]
    assert machine.num_launches() - before == 3 * 4, "one launch for each rank's call"
    group.synchronize()
    for call in calls:
        call.check()
    group.assert_at_rest()


@pytest.mark.parametrize("algorithm", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
def test_fused_lossy_sums_are_the_two_ops(machine, make_group, dtype, algorithm):
    group = make_group(4, island_size=2, table=table(3))
    calls = [FusedCall(group, random.Random(n), n, 640, dtype, algorithm) for n in (1, 2)]
    group.synchronize()
    for call in calls:
        call.check()
    group.assert_at_rest()


@pytest.mark.parametrize("algorithm", NAMES)
def test_the_input_of_the_fused_form_may_be_the_residual(machine, make_group, algorithm):
    group = make_group(4, island_size=2, table=table(2))
    rng = random.Random(1)
    xs = [revealing(rng, 3 * 700, torch.float32).view(3, 700) for _ in range(4)]
    starts, outs, weight = (
        [x.clone() for x in xs],
        [torch.full_like(x, 9) for x in xs],
        torch.ones(700),
    )
    for rank, x in enumerate(xs):
        group.all_reduce_norm(rank, x, x, weight, outs[rank], algorithm=algorithm)
    group.synchronize()
    total, want = ordered_sum(starts), torch.empty(3, 700)
    for x, start, out in zip(xs, starts, outs, strict=True):
        group.ops.hidden_capture.default(total, start, weight, 1e-5, want, None, 0)
        assert same_bits(x, start) and same_bits(out, want)


@pytest.mark.parametrize("slowed", [None, 0, 5])
def test_case_30_fused_calls_among_others(machine, make_group, slowed):
    """What corrupted hidden states elsewhere: fused calls back to back, among sums, one rank a call
    behind."""
    seed(machine, 9, MAX_STEPS)
    group = make_group(
        6, island_size=2, one_shot_bytes=8 << 10, two_shot_bytes=8 << 10, table=table(3)
    )
    if slowed is not None:
        machine.slow(group.devices[slowed], 12)
    sequence = Sequence(group, 1, (1, 2, 3, 4), (1, 300, 1500))
    rng = random.Random(0)
    for i in range(NUM_CALLS // 2):
        sequence.add()
        algorithm, hidden = rng.choice((1, 2, 3, 4)), rng.choice((40, 700, 1300))
        call = FusedCall(group, rng, 1 + i % 3, hidden, DTYPES[i % 2], algorithm)
        sequence.checks.append(call.check)
    sequence.finish()


def test_case_32_fused_replays(machine, make_group):
    seed(machine, 5, MAX_STEPS)
    group = make_group(2, table=table(2))
    x = [torch.ones(2, 600), torch.ones(2, 600)]
    residuals = [torch.zeros(2, 600) for _ in x]
    outs = [torch.full((2, 600), 9.0) for _ in x]
    with machine.record() as graph:
        for rank in (0, 1):
            group.all_reduce_norm(rank, x[rank], residuals[rank], torch.ones(600), outs[rank])
    for _ in range(5):
        machine.replay(graph)
    group.synchronize()
    for residual, out in zip(residuals, outs, strict=True):
        assert bool((residual == 10).all()) and bool((out - 1).abs().max() < 1e-6)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_rows_bits_depend_on_the_row_alone(machine, make_group, num_blocks):
    group = make_group(3, one_shot_bytes=32 << 10, table=table(num_blocks))
    rng = random.Random(0)
    xs = [revealing(rng, 5 * 1100, torch.bfloat16).view(5, 1100) for _ in range(3)]
    residual, weight = torch.randn(5, 1100).bfloat16(), torch.ones(1100).bfloat16()

    def run(rows, algorithm):
        outs = []
        for rank, x in enumerate(xs):
            outs.append(torch.full_like(x[rows], 9))
            args = x[rows].contiguous(), residual[rows].clone(), weight, outs[-1]
            group.all_reduce_norm(rank, *args, algorithm=algorithm)
        group.synchronize()
        return outs[0]

    whole = run(slice(0, 5), 1)
    for row in range(5):
        assert same_bits(run(slice(row, row + 1), 1 + row % 2)[0], whole[row])


def test_rows_beyond_the_capacity_take_several_launches(machine, make_group):
    group = make_group(2, one_shot_bytes=4096, two_shot_bytes=4096, table=table(2))
    before = machine.num_launches()
    call = FusedCall(group, random.Random(0), 5, 700, torch.float32, 2)
    assert machine.num_launches() - before == 2 * 5
    group.synchronize()
    call.check()
    with pytest.raises(RuntimeError, match="input: expected rows of at most 4096 bytes"):
        FusedCall(group, random.Random(0), 1, 1025, torch.float32, 1)


@pytest.mark.parametrize("algorithm", NAMES)
def test_case_36_fused_rows_are_poisoned(machine, make_group, algorithm):
    seed(machine, 2, max_steps=1 << 24)
    machine.set_clock(100)
    group = make_group(4, island_size=2, one_shot_bytes=8 << 10, table=table(3))
    rng = random.Random(0)
    FusedCall(group, rng, 2, 700, torch.float32, algorithm)
    FusedCall(group, rng, 2, 700, torch.float32, algorithm)
    group.synchronize()
    tensors = []
    for rank in (0, 1, 2):
        tensors.append([torch.ones(2, 700) for _ in range(3)] + [torch.ones(2, 1, 700)])
        x, residual, out, capture = tensors[-1]
        group.all_reduce_norm(
            rank, x, residual, torch.ones(700), out, capture, algorithm=algorithm, timeout_ms=20
        )
    group.synchronize()
    for _, *written in tensors:
        assert all(bool(t.isnan().all()) for t in written)
    assert any("rank 3 did not arrive" in group.check(r) for r in (0, 1, 2))


def test_a_fused_group_of_one_is_hidden_capture(machine):
    ops = getattr(torch.ops, host_build.NAMESPACE)
    x, residual, weight = torch.randn(2, 50), torch.randn(2, 50), torch.randn(50)
    want, stream, out, other = (torch.empty_like(x), residual.clone()) * 2
    ops.hidden_capture.default(x, stream, weight, 1e-5, want, None, 0)
    nothing = torch.empty(0, dtype=torch.uint8)
    ops.pcie_allreduce_norm.default(x, other, weight, 1e-5, out, None, 0, nothing, 0, 1, 1000, 0)
    assert same_bits(out, want) and same_bits(other, stream)


# Graphs


@pytest.mark.parametrize("algorithm", NAMES)
def test_case_32_replays_are_eager_calls(machine, make_group, algorithm):
    """In place, a sum over four ranks multiplies by four; graphs of two sizes and eager calls take
    turns, and nothing waits in between."""
    seed(machine, 5, MAX_STEPS)
    group = make_group(4, island_size=2, table=((600, 1, 1), (1 << 40, 1, 3)))
    machine.slow(group.devices[3], 16)
    rng = random.Random(0)
    graphs, tensors = [], []
    for numel in (90, 1700):
        xs = [integers(rng, numel, torch.float32) for _ in range(4)]
        tensors.append((xs, ordered_sum(xs)))
        with machine.record() as graph:
            for rank, x in enumerate(xs):
                group.all_reduce(rank, x, x, algorithm)
        graphs.append(graph)
    eager = [torch.ones(333) for _ in range(4)]
    order = [0, 1, 1, 0, 1, 0, 0, 0, 1]
    for which in order:
        machine.replay(graphs[which])
        for rank, x in enumerate(eager):
            group.all_reduce(rank, x, x, 3 - algorithm % 2)
    group.synchronize()
    for which, (xs, first) in enumerate(tensors):
        want = first * 4.0 ** (order.count(which) - 1)
        for x in xs:
            assert torch.equal(x, want)
    for x in eager:
        assert torch.equal(x, torch.full((333,), 4.0 ** len(order)))
    group.assert_at_rest()


def test_case_32_the_epoch_counts_replays(machine, make_group):
    group = make_group(2)
    xs = [torch.ones(4), torch.ones(4)]
    with machine.record() as graph:
        for rank, x in enumerate(xs):
            group.all_reduce(rank, x, x)
    for _ in range(3):
        machine.replay(graph)
    group.synchronize()
    assert [int(slab.view(torch.int32)[0]) for slab in group.slabs] == [2, 2]  # the first is 0


def set_epoch(group, finished, flags):
    """As if so many calls had been made, of which those with flags ended long ago."""
    for slab in group.slabs:
        words = slab.view(torch.uint32)
        words[0] = finished % (1 << 32)
        words[128 : 128 + 64 * 8] = flags % (1 << 32)  # Control::flags


@pytest.mark.parametrize("ago", [1, 100, (1 << 31) + 1, (1 << 32) - 2])
def test_case_30_a_flag_of_long_ago_says_nothing(machine, make_group, ago):
    """Where flags are rare, the epoch can go round before the next one is raised."""
    seed(machine, 3)
    group = make_group(3, table=table(2))
    set_epoch(group, 1000, 1001 - ago)
    machine.slow(group.devices[1], 100)
    xs = [torch.full((900,), 1.0 + r) for r in range(3)]
    outs = [group.all_gather(r, x) for r, x in enumerate(xs)]
    group.synchronize()
    for out in outs:
        assert torch.equal(out, torch.stack(xs))


@pytest.mark.parametrize("algorithm", NAMES)
def test_case_30_the_epoch_wraps(machine, make_group, algorithm):
    seed(machine, 5)
    group = make_group(4, island_size=2, table=table(2))
    set_epoch(group, (1 << 32) - 4, (1 << 32) - 5)
    xs = [torch.full((700,), 2.0**r) for r in range(4)]
    outs = []
    for _ in range(6):
        outs += [group.all_reduce(r, x, algorithm=algorithm) for r, x in enumerate(xs)]
        gathered = [group.all_gather(r, x) for r, x in enumerate(xs)]
    group.synchronize()
    assert all(bool((out == 15).all()) for out in outs)
    assert all(torch.equal(out, torch.stack(xs)) for out in gathered)
    group.assert_at_rest()


@pytest.mark.parametrize("finished", [(1 << 31) - 1, (1 << 32) - 4, (1 << 32) - 3])
@pytest.mark.parametrize("call", ["all_gather", "broadcast", "barrier", "hierarchical_pull"])
def test_flags_that_were_never_raised_say_nothing(machine, make_group, call, finished):
    seed(machine, 2, max_steps=1 << 24)
    machine.set_clock(1000)
    group = make_group(4, island_size=2, table=table(2))
    set_epoch(group, finished, -1)
    for rank in (0, 1):
        x = torch.full((500,), 2.0**rank)
        if call == "all_gather":
            group.all_gather(rank, x, timeout_ms=1)
        elif call == "broadcast":
            group.broadcast(rank, x, 2, timeout_ms=1)
        elif call == "barrier":
            group.barrier(rank, timeout_ms=1)
        else:
            group.all_reduce(rank, x, algorithm=4, timeout_ms=1)
    group.synchronize()
    messages = [group.check(rank) for rank in (0, 1)]
    assert any("phase flag" in m for m in messages), messages


def test_epochs_start_anew(machine, make_group):
    """Everything goes on across the end of the epochs, under graphs too."""
    seed(machine, 4, MAX_STEPS)
    group = make_group(
        4, island_size=2, one_shot_bytes=8 << 10, two_shot_bytes=8 << 10, table=table(3)
    )
    machine.slow(group.devices[2], 12)
    set_epoch(group, (1 << 32) - 1 - NUM_CALLS, -1)
    xs = [torch.ones(700) for _ in range(4)]
    with machine.record() as graph:
        for rank, x in enumerate(xs):
            group.all_reduce(rank, x, x, 4)
    sequence, rng = Sequence(group, 11, (1, 2, 3, 4), (1, 300, 1500)), random.Random(0)
    for i in range(NUM_CALLS):
        sequence.add()
        call = FusedCall(group, rng, 2, 900, DTYPES[i % 2], rng.choice((1, 2, 3, 4)))
        sequence.checks.append(call.check)
        if i % 8 == 0:
            machine.replay(graph)
    sequence.finish()
    assert all(bool((x == 4.0 ** -(-NUM_CALLS // 8)).all()) for x in xs)
    assert all(int(slab.view(torch.uint32)[0]) < 8 * NUM_CALLS for slab in group.slabs)


# Failures


@pytest.mark.parametrize(
    "algorithm,phase", [(1, "push"), (2, "scatter"), (3, "scatter"), (4, "scatter")]
)
def test_case_36_a_missing_rank_ends_the_call(machine, make_group, algorithm, phase):
    seed(machine, 2, max_steps=1 << 24)
    machine.set_clock(100)
    group = make_group(4, island_size=2, table=table(2))
    xs = [torch.ones(1000) for _ in range(4)]
    # Two sound calls, so that both halves of everything hold what a wrong result could be made of.
    first = [group.all_reduce(r, x, algorithm=algorithm) for _ in (0, 1) for r, x in enumerate(xs)]
    group.synchronize()
    outs = [group.all_reduce(r, xs[r], algorithm=algorithm, timeout_ms=120) for r in (0, 1, 3)]
    group.synchronize()
    for out in first:
        assert bool((out == 4).all())
    for out in outs:
        assert bool(out.isnan().all()), "a result without the missing rank's part"
    messages = [group.check(r) for r in (0, 1, 3)]
    assert all(messages) and group.check(2) is None
    late = [m for m in messages if "did not arrive" in m]
    assert late and all("epoch 2" in m and NAMES[algorithm] in m for m in late)
    # Nobody blames a rank that itself waits.
    assert all("rank 2 did not arrive" in m and f"phase {phase}" in m for m in late)
    for rank in (0, 1, 3):
        with pytest.raises(RuntimeError, match=f"rank {rank} of 4: .*(did not arrive|gave up)"):
            group.all_reduce(rank, xs[rank], algorithm=algorithm)
    # Too late, the missing one is told as well, and believes nothing that stands in its slots.
    out = group.all_reduce(2, xs[2], algorithm=algorithm)
    group.synchronize()
    assert bool(out.isnan().all())
    assert "gave up (epoch 2)" in group.check(2)


def test_case_36_launches_behind_a_failed_one_are_poisoned_at_once(machine, make_group):
    seed(machine, 2, max_steps=1 << 24)
    machine.set_clock(100)
    group = make_group(2, table=table(1))
    x = torch.ones(100)
    outs = [group.all_reduce(0, x, algorithm=1 + i % 2, timeout_ms=2) for i in range(20)]
    before = machine.steps()
    group.synchronize()
    # The first waits 2 ms of 100 ns a step; the others may not wait again.
    assert machine.steps() - before < 3 * 20_000 + 20 * 1500
    assert all(bool(out.isnan().all()) for out in outs)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_case_36_a_late_rank_gives_nobody_a_wrong_result(machine, make_group, late):
    """It comes while the others give up: each element is the sum, or poison."""
    seed(machine, 4 + late, max_steps=1 << 25)
    machine.set_clock(100)
    group = make_group(3, table=table(2))
    machine.slow(group.devices[late], 1000)
    xs = [torch.full((1200,), 2.0**r) for r in range(3)]
    outs = []
    for i in range(6):
        for rank, x in enumerate(xs):
            outs.append(group.all_reduce(rank, x, algorithm=1 + i % 2, timeout_ms=1))
    group.synchronize()
    for out in outs:
        assert bool(((out == 7) | out.isnan()).all())


@pytest.mark.parametrize("call", ["all_gather", "broadcast", "barrier"])
def test_case_36_flags_are_waited_for_no_longer_than_data(machine, make_group, call):
    seed(machine, 2, max_steps=1 << 24)
    machine.set_clock(100)
    group = make_group(3, table=table(2))
    x = torch.ones(900)
    args = {"all_gather": (x,), "broadcast": (x, 2), "barrier": ()}[call]
    outs = [getattr(group, call)(rank, *args, timeout_ms=1) for rank in (0, 1)]
    group.synchronize()
    assert any("rank 2 did not arrive" in group.check(r) for r in (0, 1))
    assert any("phase flag" in group.check(r) for r in (0, 1))
    for out in outs:
        assert out is None or bool(out.isnan().all())


def test_case_37_ranks_that_disagree_on_the_size_end(machine, make_group):
    """Who has what it wants may go on; nobody waits for ever, and nobody's next call is wrong."""
    seed(machine, 2, max_steps=1 << 24)
    machine.set_clock(100)
    group = make_group(2, table=table(1))
    group.all_reduce(0, torch.ones(64), timeout_ms=1)
    group.all_reduce(1, torch.ones(512), timeout_ms=1)
    later = [group.all_reduce(r, torch.ones(512), timeout_ms=1) for r in (0, 1)]
    group.synchronize()
    assert group.check(0) and "rank 0 did not arrive" in group.check(1)
    assert all(bool(out.isnan().all()) for out in later)


@pytest.mark.parametrize("one,others", list(itertools.permutations(NAMES, 2)))
def test_case_37_ranks_that_disagree_on_the_algorithm_end(machine, make_group, one, others):
    """Each element is the sum or poison, every rank is told, and no later call is believed."""
    seed(machine, 2, max_steps=1 << 25)
    machine.set_clock(1000)
    group = make_group(4, island_size=2, table=table(2))
    xs = [torch.full((700,), 2.0**r) for r in range(4)]
    for algorithm in NAMES:  # all regions have been in use
        for rank, x in enumerate(xs):
            group.all_reduce(rank, x, algorithm=algorithm)
    group.synchronize()
    options = [dict(algorithm=one if r == 3 else others, timeout_ms=1) for r in range(4)]
    outs = [group.all_reduce(r, x, **options[r]) for r, x in enumerate(xs)]
    later = [group.all_reduce(r, x, timeout_ms=1) for r, x in enumerate(xs)]
    group.synchronize()
    assert all(bool(((out == 15) | out.isnan()).all()) for out in outs)
    assert all(bool(out.isnan().all()) for out in later)
    assert all(group.check(r) for r in range(4))


def test_two_groups_take_turns_on_one_stream(machine, make_group):
    seed(machine, 5, MAX_STEPS)
    groups = [make_group(3, table=table(2)), make_group(3, table=table(1))]
    own = groups[1].streams
    groups[1].streams = groups[0].streams
    machine.slow(groups[0].devices[1], 12)
    sequences = [Sequence(group, k, (1, 2), (1, 300, 1500)) for k, group in enumerate(groups)]
    rng = random.Random(4)
    for _ in range(NUM_CALLS):
        rng.choice(sequences).add()
    for sequence in sequences:
        sequence.finish()
    groups[1].streams = own


def test_case_40_a_second_stream_is_refused(machine, make_group):
    group = make_group(2)
    xs = [torch.ones(8), torch.ones(8)]
    own = group.streams[0]
    group.all_reduce(0, xs[0])
    other = machine.create_stream(group.devices[0])
    group.streams[0] = other
    with pytest.raises(RuntimeError, match="workspace: expected calls on stream .*, got stream"):
        group.all_reduce(0, xs[0])
    with machine.record():
        group.all_reduce(0, xs[0])
    group.all_reduce(1, xs[1])
    group.synchronize()
    group.use_stream(0, other)
    outs = [group.all_reduce(r, x) for r, x in enumerate(xs)]
    group.synchronize()
    assert all(bool((out == 2).all()) for out in outs)
    machine.destroy_stream(own)


# Errors


def all_reduce_with(group, workspace, rank=0, world_size=2, algorithm=0, numel=8):
    x = torch.ones(numel)
    return group.ops.pcie_allreduce.default(
        x, torch.empty_like(x), workspace, rank, world_size, 1000, algorithm
    )


BAD_CALLS = {
    "unattached": (lambda g: all_reduce_with(g, g.slabs[0].clone()), "workspace: .*attached"),
    "inside a slab": (lambda g: all_reduce_with(g, g.slabs[0][256:]), "workspace: .*attached"),
    "part of a slab": (lambda g: all_reduce_with(g, g.slabs[0][:-256]), "workspace: .* bytes"),
    "other rank": (lambda g: all_reduce_with(g, g.slabs[0], rank=1), "rank: expected 0, got 1"),
    "other world": (lambda g: all_reduce_with(g, g.slabs[0], world_size=3), "world_size: .*2"),
    "no islands": (lambda g: all_reduce_with(g, g.slabs[0], algorithm=3), "algorithm: .*islands"),
    "unknown": (lambda g: all_reduce_with(g, g.slabs[0], algorithm=8), "algorithm: expected"),
    "negative": (lambda g: all_reduce_with(g, g.slabs[0], algorithm=-1), "algorithm: expected"),
    "input in slab": (
        lambda g: g.ops.pcie_broadcast.default(g.slabs[0][:64], 0, g.slabs[0], 0, 2, 1000),
        "tensor: .*apart",
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_calls_are_refused(machine, make_group, what):
    call, message = BAD_CALLS[what]
    group = make_group(2)
    before = machine.num_launches()
    with pytest.raises(RuntimeError, match=f"spec_kernels::pcie_\\w+: {message}"):
        call(group)
    assert machine.num_launches() == before


BAD_ATTACHMENTS = {
    "version": dict(version=99),
    "world_size": dict(world_size=1),
    "rank": dict(rank=2),
    "island_size": dict(island_size=2),
    "one_shot_bytes": dict(one_shot_bytes=0),
    "two_shot_bytes": dict(two_shot_bytes=1 << 31),
    "status": dict(status_device=None),
    "num_entries": dict(num_entries=0),
}


@pytest.mark.parametrize("field", BAD_ATTACHMENTS)
def test_bad_attachments_are_refused(machine, make_group, field):
    group = make_group(2)
    a = group.attached[0]
    for name, value in BAD_ATTACHMENTS[field].items():
        setattr(a, name, value)
    with pytest.raises(ValueError, match=f"pcie_attach: {field}: expected"):
        group.attach(0)


@pytest.mark.parametrize(
    "address,message",
    [(lambda a: a + 16, "a multiple of 256"), (lambda a: 0, "null"), (None, "that of rank 0")],
)
def test_slabs_must_be_aligned_and_apart(machine, make_group, address, message):
    group = make_group(2)
    a = group.attached[0]
    a.slabs[1] = a.slabs[0] if address is None else address(a.slabs[1])
    with pytest.raises(ValueError, match=rf"slabs\[1\]: expected .*{message}"):
        group.attach(0)


@pytest.mark.parametrize(
    "entries,message",
    [
        ([(10, 0, 1)], "algorithm: expected 1 to 4"),
        ([(10, 3, 1)], "algorithm: expected 1 or 2 without islands"),
        ([(10, 1, 65)], "num_blocks: expected 1 to 64"),
        ([(10, 1, 1), (10, 2, 1)], "max_bytes: expected more"),
    ],
)
def test_tables_must_be_sound(machine, make_group, entries, message):
    group = make_group(2)
    a = group.attached[0]
    a.num_entries = len(entries)
    for i, entry in enumerate(entries):
        a.table[i].max_bytes, a.table[i].algorithm, a.table[i].num_blocks = entry
    with pytest.raises(ValueError, match=message):
        group.attach(0)


def test_a_slab_is_attached_once(machine, make_group):
    group = make_group(2)
    with pytest.raises(ValueError, match="attached yet"):
        group.attach(0)
    slab = ctypes.c_void_p(group.slabs[0].data_ptr())
    assert group.library.spec_kernels_pcie_detach(slab) is None
    assert b"attached" in group.library.spec_kernels_pcie_detach(slab)
    assert b"attached" in group.library.spec_kernels_pcie_use_stream(slab, None)
    group.attach(0)


@pytest.mark.parametrize("numel,algorithm", [(10, 1), (100, 2), (500, 4), (5000, 3)])
def test_auto_takes_what_the_table_says(machine, make_group, numel, algorithm):
    seed(machine, 2, max_steps=1 << 24)
    machine.set_clock(1000)
    entries = ((40, 1, 1), (400, 2, 1), (2000, 4, 2), (2100, 3, 3))
    group = make_group(4, island_size=2, table=entries)
    for rank in (0, 1, 2):
        group.all_reduce(rank, torch.ones(numel), timeout_ms=1)
    group.synchronize()
    assert any(f"algorithm {NAMES[algorithm]}," in group.check(r) for r in (0, 1, 2))
