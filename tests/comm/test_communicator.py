"""The communicator: exact sums on every path, and failure that reaches every rank."""

import ctypes
import gc
import os
import random
import re
import signal
import time

import pytest
import torch

from spec_kernels.comm import Communicator
from spec_kernels.comm.communicator import _host, shared_memory_reason
from spec_kernels.comm.launch import RankError, RankGroup, launch
from spec_kernels.comm.policy import Policy, choose_policy
from spec_kernels.ops.hidden_capture import hidden_capture
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, LOSSY
from spec_kernels.ops.pcie_allreduce.reference import lossy_sum, ordered_sum
from spec_kernels.testing.compare import assert_same_bits, poisoned

# Each forces one path of the sum, whatever this machine would choose.
POLICIES = {
    "spinning": Policy(spin_iterations=50, num_workers=8, block_bytes=1 << 20),
    "one worker": Policy(spin_iterations=0, num_workers=1, block_bytes=192),
    "blocks": Policy(spin_iterations=0, num_workers=4, block_bytes=192),
    "one core to spare": Policy(spin_iterations=500, num_workers=2, block_bytes=4096, num_spare=1),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAPACITY = 4096
TIMEOUT = 60

pytestmark = pytest.mark.skipif(
    shared_memory_reason() is not None, reason=f"no shared memory: {shared_memory_reason()}"
)


def run(fn, world_size, *args, **options):
    return launch(fn, world_size, *args, timeout=TIMEOUT, **options)


def revealing(num, dtype, seed=0):
    """``[8, num]``: large terms that cancel between ranks, small ones that only one order keeps."""
    g = torch.Generator().manual_seed(1000 * seed + 17 * num)
    big = torch.randint(0, 3, (8, num), generator=g) * torch.tensor(2.0**12)
    sign = torch.tensor([1, -1, 1, -1, -1, 1, 1, -1])[:, None]
    return (big * sign + torch.randn((8, num), generator=g)).to(dtype)


def outcome(comm, call):
    """The error of ``call``, as text; the next call must say the same."""
    errors = []
    for function in (call, comm.barrier):
        with pytest.raises(RuntimeError) as caught:
            function()
        errors.append(str(caught.value))
    first, later = (re.sub(r", in pcie_\w+", "", text).split(": ", 2)[2] for text in errors)
    assert first == later, "the first error stays the error"
    return errors[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8])
def test_case_33_34_any_size_alignment_and_world(world_size, policy):
    """Sizes 0 to several slots, any address, the same bits everywhere."""

    def worker(comm):
        digests = []
        for dtype in DTYPES:
            item = torch.empty(0, dtype=dtype).element_size()
            slot = CAPACITY // item
            for num in (0, 1, 2, 15, 16, 17, 100, 1023, slot - 1, slot, slot + 1, 3 * slot + 5):
                parts = list(revealing(num, dtype)[:world_size])
                expected = ordered_sum(parts)
                for offset in (0, 1):
                    x = torch.cat([torch.zeros(offset, dtype=dtype), parts[comm.rank]])[offset:]
                    out = torch.full((num + 3,), 7, dtype=dtype)
                    got = comm.all_reduce(x, out[offset : offset + num])
                    assert torch.equal(got, expected), (dtype, num, offset)
                    assert (out[:offset] == 7).all() and (out[offset + num :] == 7).all()
                    assert torch.equal(x, parts[comm.rank])
                    assert torch.equal(comm.all_reduce(x, x), expected)
                    digests.append(hash(tuple(x.float().tolist())))
        return digests

    digests = run(worker, world_size, policy=POLICIES[policy], capacity=CAPACITY)
    assert all(d == digests[0] for d in digests)


def test_sums_reveal_the_order():
    """The inputs above would catch any other order; so the tests above do test something."""
    parts = list(revealing(1023, torch.float32))
    expected = ordered_sum(parts)
    assert not torch.equal(expected, torch.stack(parts).sum(0))
    assert not torch.equal(expected, ordered_sum(parts[1:] + parts[:1]))
    left = parts[0]
    for p in parts[1:]:
        left = left + p
    assert not torch.equal(expected, left)


def test_case_34_large_cancellation():
    def worker(comm):
        x = torch.tensor([1e8, 1.0, -1e8, 1.0, 1e8, -1e8, 3.0, 1.0])[comm.rank].expand(33)
        return comm.all_reduce(x.contiguous()).tolist()

    expected = ordered_sum(list(torch.tensor([1e8, 1.0, -1e8, 1.0, 1e8, -1e8, 3.0, 1.0])))
    assert run(worker, 8) == [[expected.item()] * 33] * 8


def test_case_35_fp32_accumulation_one_rounding():
    def worker(comm):
        x = torch.tensor([1.0, 2**-9, 2**-9, 2**-9])[comm.rank].expand(20)
        return [comm.all_reduce(x.to(d).contiguous())[7].item() for d in (torch.bfloat16,)]

    assert run(worker, 4) == [[1 + 2**-7]] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_special_values(policy):
    inf, nan = float("inf"), float("nan")
    rows = [
        [-0.0, inf, inf, nan, 0.0, 3e38],
        [-0.0, 1.0, -inf, 1.0, -0.0, 3e38],
        [-0.0, 0.0, 0.0, 0.0, -0.0, 0],
    ]

    def worker(comm):
        return [comm.all_reduce(torch.tensor(rows[comm.rank]).to(d)).float() for d in DTYPES[:2]]

    for results in run(worker, 3, policy=POLICIES[policy]):
        for r in results:
            assert r[0] == 0 and torch.signbit(r[0]), "-0 was lost"
            assert r[1] == inf and r[2].isnan() and r[3].isnan()
            assert r[4] == 0 and not torch.signbit(r[4])
            assert r[5] == inf


def normed(comm, sums, num_rows, hidden, dtype, algorithm=0, gap=0):
    """Both ways to add, norm and capture ``sums`` ([8, rows * hidden]); asserts that they agree."""
    g = torch.Generator().manual_seed(num_rows + hidden)
    residual = torch.randn(num_rows, hidden, generator=g).to(dtype)
    weight = (1 + 0.2 * torch.randn(hidden, generator=g)).to(dtype)
    x = sums[comm.rank].view(num_rows, hidden).clone()
    capture = poisoned(num_rows + 1, 2, hidden, dtype=dtype)
    stream, kept = residual.clone(), capture.clone()
    added = comm.all_reduce(x, algorithm=algorithm)
    want = hidden_capture(added, stream, weight, 1e-5, capture=kept, slot=1)

    # Strided where it may be: what lies between the rows must stay as it is.
    room = poisoned(2, num_rows, hidden + gap, dtype=dtype)
    mine, out = room[0, :, :hidden], room[1, :, :hidden]
    mine.copy_(residual)
    got = comm.all_reduce_norm(
        x, mine, weight, 1e-5, capture=capture, slot=1, out=out, algorithm=algorithm
    )
    assert got is out
    for ours, right in ((got, want), (mine, stream), (capture, kept)):
        assert_same_bits(ours, right)
    assert room[:, :, hidden:].isnan().all()
    mine.copy_(residual)
    assert_same_bits(comm.all_reduce_norm(x, mine, weight, 1e-5, out=x, algorithm=algorithm), want)
    assert_same_bits(mine, stream)
    return stream


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_case_23_fused_equals_separate_and_captures_the_whole_sum(world_size, policy):
    """Rows smaller and larger than a slot (4 KiB), several rows a step and one that ends early."""

    def worker(comm):
        streams = []
        for dtype in DTYPES[:2]:
            for num_rows, hidden in (
                (0, 8),
                (3, 0),
                (1, 1),
                (3, 40),
                (7, 700),
                (9, 1024),
                (2, 3001),
            ):
                sums = revealing(num_rows * hidden, dtype)
                streams.append(normed(comm, sums, num_rows, hidden, dtype, gap=3))
                parts = [p.view(num_rows, hidden) for p in sums[: comm.world_size]]
                g = torch.Generator().manual_seed(num_rows + hidden)
                residual = torch.randn(num_rows, hidden, generator=g).to(dtype)
                whole = (residual.float() + ordered_sum(parts).float()).to(dtype)
                assert_same_bits(streams[-1], whole)
        return streams

    results = run(worker, world_size, policy=POLICIES[policy], capacity=CAPACITY)
    for streams in results[1:]:
        for a, b in zip(streams, results[0], strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("policy", ["spinning", "blocks"])
@pytest.mark.parametrize("world_size", [2, 6, 8])
def test_lossy_sums_are_their_definition_on_every_rank(world_size, policy):
    def worker(comm):
        for dtype in DTYPES:
            for shape in ((0, 128), (3, 128), (5, 640), (1, 4096)):
                num = shape[0] * shape[1]
                parts = list(revealing(num, dtype)[: comm.world_size].view(comm.world_size, *shape))
                for algorithm in sorted(LOSSY):
                    if algorithm == 5 and comm.world_size == 2:
                        with pytest.raises(ValueError, match="hierarchical_bf16"):
                            comm.all_reduce(parts[comm.rank], algorithm=algorithm)
                        continue
                    got = comm.all_reduce(parts[comm.rank], algorithm=algorithm)
                    assert_same_bits(got, lossy_sum(parts, algorithm))
                    if dtype != torch.float16:
                        normed(comm, torch.stack(parts), *shape, dtype, algorithm)

    run(worker, world_size, policy=POLICIES[policy], capacity=CAPACITY)


def test_algorithms_by_name():
    def worker(comm):
        x = torch.full((2, 128), 1.0 + comm.rank)
        with pytest.raises(ValueError, match="algorithm: expected one of auto, one_shot"):
            comm.all_reduce(x, algorithm="three_shot")
        return {name: comm.all_reduce(x, algorithm=name)[0, 0].item() for name in ALGORITHMS}

    assert run(worker, 4) == [dict.fromkeys(ALGORITHMS, 10.0)] * 4


def test_gather_broadcast_barrier():
    dtypes = (torch.uint8, torch.bool, torch.int64, torch.float64, torch.bfloat16, torch.complex64)

    def worker(comm):
        world = comm.world_size
        for dtype in dtypes:
            for num in (0, 1, 7, 5000):
                parts = [(torch.arange(num) * (r + 3) % 251).to(dtype) for r in range(world)]
                mine = torch.cat([parts[comm.rank][:0], parts[comm.rank]])
                assert torch.equal(comm.all_gather(mine), torch.stack(parts))
                for src in range(world):
                    x = parts[comm.rank].clone()
                    assert comm.broadcast(x, src) is x and torch.equal(x, parts[src])
        block = torch.full((2, 3), comm.rank)
        out = torch.empty((world, 2, 3), dtype=torch.int64)
        assert comm.all_gather(block, out) is out
        comm.barrier()
        return out[:, 0, 0].tolist()

    for world in (2, 5):
        assert run(worker, world, capacity=CAPACITY) == [list(range(world))] * world


def random_calls(comm, seed, num_calls, slow_rank):
    """Calls drawn alike on all ranks; one rank is late by more than a call, time and again."""
    draw = random.Random(seed)
    late = random.Random(comm.rank)
    world = comm.world_size
    for i in range(num_calls):
        kind = draw.choice(("sum", "sum", "sum", "norm", "gather", "broadcast", "barrier"))
        num = draw.choice((0, 1, 5, 64, 700, 2048, 2049, 5000))
        dtype = draw.choice(DTYPES)
        src = draw.randrange(world)
        if comm.rank == slow_rank and late.random() < 0.15:
            time.sleep(late.choice((0.0005, 0.004)))
        parts = list(revealing(num, dtype, i)[:world])
        if kind == "sum":
            assert torch.equal(comm.all_reduce(parts[comm.rank]), ordered_sum(parts)), (i, num)
        elif kind == "norm":
            hidden = draw.choice((1, 5, 300, 2500))
            total = revealing(2 * hidden, torch.float32, i)
            normed(comm, total, 2, hidden, torch.float32, draw.choice((0, 1, 2)))
        elif kind == "gather":
            assert torch.equal(comm.all_gather(parts[comm.rank]), torch.stack(parts)), (i, num)
        elif kind == "broadcast":
            assert torch.equal(comm.broadcast(parts[comm.rank].clone(), src), parts[src]), (i, num)
        else:
            comm.barrier()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size,slow_rank", [(2, 0), (3, 2), (8, 5)])
def test_case_30_31_random_sequences_with_a_late_rank(world_size, slow_rank, policy):
    run(random_calls, world_size, 11, 120, slow_rank, policy=POLICIES[policy], capacity=CAPACITY)


def wind_forward(group, step):
    """Puts a group that has not started at ``step``, as if it had run for hours."""
    words = torch.frombuffer(group._segment, dtype=torch.int32)
    at = {name: offset // 4 for name, offset in _host.OFFSETS.items()}
    values = {"arrivals": step * group.world_size, "progress": 2 * step}
    values |= {f"step/{r}": step for r in range(group.world_size)}
    values |= {f"arrived/{r}": step for r in range(group.world_size)}
    for name, value in values.items():
        name, _, rank = name.partition("/")
        word = at[name] + int(rank or 0) * at["next_rank"]
        words[word] = (value + (1 << 31)) % (1 << 32) - (1 << 31)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step", [(1 << 31) - 20, (1 << 32) - 20, (1 << 32) // 3 - 20])
def test_counters_wrap_unnoticed(step, policy):
    group = Communicator.create_group(3, capacity=CAPACITY, policy=POLICIES[policy])
    wind_forward(group, step)

    def worker(outer, group):
        comm = group.bind(outer.rank)
        for _ in range(20):
            x = torch.full((1500,), float(comm.rank))
            assert (comm.all_reduce(x) == 3).all()
            assert comm.all_gather(x)[:, -1].tolist() == [0, 1, 2]

    run(worker, 3, group)


def fused(comm, num_rows, hidden):
    x = torch.ones(num_rows, hidden)
    return comm.all_reduce_norm(x, x.clone(), torch.ones(hidden), 1e-5)


# What a rank does when another fails it: a short sum, one of several steps, the fused ones.
CALLS = {
    "sum": ("pcie_allreduce", lambda comm: comm.all_reduce(torch.ones(100))),
    "steps": ("pcie_allreduce", lambda comm: comm.all_reduce(torch.ones(9000))),
    "norm": ("pcie_allreduce_norm", lambda comm: fused(comm, 1, 64)),
    "norm of long rows": ("pcie_allreduce_norm", lambda comm: fused(comm, 2, 5000)),
}


def forever(comm, name):
    def call():
        while True:
            CALLS[name][1](comm)

    return outcome(comm, call)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_case_36_killed_rank_is_named_at_once(sig, name):
    with RankGroup(forever, 4, (name,), timeout_ms=60_000, capacity=CAPACITY) as ranks:
        time.sleep(0.3)
        killed = time.monotonic()
        os.kill(ranks.pids[2], sig)
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
        assert time.monotonic() - killed < 30  # not the timeout
    assert outcomes[2].signal == sig
    for rank in (0, 1, 3):
        text = outcomes[rank].value
        assert f"{CALLS[name][0]}: rank {rank} of 4: rank 2 died (epoch " in text
        assert "phase" in text


@pytest.mark.parametrize("seed", range(6))
def test_case_36_killed_at_any_moment(seed):
    """Calls of every kind, a rank killed by itself in the middle of them: all others name it."""

    def worker(comm, victim):
        draw = random.Random(seed)

        def calls():
            for i in range(100_000):
                if comm.rank == victim and i == 20 + seed:
                    os.kill(os.getpid(), signal.SIGKILL)
                CALLS[draw.choice(list(CALLS))][1](comm)
                draw.choice((comm.barrier, lambda: comm.all_gather(torch.ones(3000))))()

        return outcome(comm, calls)

    victim = seed % 3
    policy = list(POLICIES.values())[seed % len(POLICIES)]
    with RankGroup(worker, 3, (victim,), capacity=CAPACITY, policy=policy) as ranks:
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
    for rank, o in enumerate(outcomes):
        assert o.signal == signal.SIGKILL if rank == victim else f"rank {victim} died" in o.value


@pytest.mark.parametrize("name", ["sum", "norm"])
@pytest.mark.parametrize("policy", ["spinning", "blocks"])
def test_case_36_stopped_rank_is_named_after_the_timeout(policy, name):
    with RankGroup(forever, 3, (name,), timeout_ms=1000, policy=POLICIES[policy]) as ranks:
        time.sleep(0.3)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] still run"):
            ranks.wait(2.5, stop_on_failure=False)
        os.kill(ranks.pids[1], signal.SIGCONT)
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
    for o in outcomes:
        text = o.value
        assert "rank 1 did not" in text and "epoch" in text and "phase" in text, text
        assert "ms" in text


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 3, 0, 2)])
def test_ranks_start_in_any_order(order):
    """Each binds long after the one before it, and calls at once."""

    def config(rank):
        time.sleep(0.3 * order.index(rank))

    def worker(comm):
        return comm.all_reduce(torch.full((700,), 1.0 + comm.rank))[-1].item(), fused(comm, 2, 3)

    total = sum(range(1, len(order) + 1))
    for summed, normed in run(worker, len(order), config=config):
        assert summed == total and normed.allclose(torch.ones(2, 3), atol=1e-4)


def test_rank_that_never_binds_is_named():
    def worker(comm):
        raise AssertionError("bound without rank 1")

    def config(rank):
        if rank == 1:
            time.sleep(3)

    with RankGroup(worker, 3, config=config, timeout_ms=1500) as ranks:
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
    for o in outcomes:
        assert "rank 1 did not arrive" in o.error


def test_rank_that_left_is_named():
    def worker(comm):
        if comm.rank == 1:
            comm.close()
            with pytest.raises(RuntimeError, match="closed"):
                comm.barrier()
            return None
        return outcome(comm, lambda: comm.all_reduce(torch.ones(3)))

    results = run(worker, 3)
    assert all("rank 1 left the group" in results[r] for r in (0, 2))


def test_leaving_after_the_last_call_disturbs_nobody():
    def worker(comm):
        for _ in range(20):
            comm.all_reduce(torch.ones(3))
        comm.close()

    for _ in range(3):
        run(worker, 6)


def test_abort_reaches_ranks_that_wait_and_that_come_later():
    def worker(comm):
        if comm.rank == 0:
            time.sleep(0.2)
            comm.abort("no more tokens")
        if comm.rank == 2:
            time.sleep(0.5)
        return outcome(comm, comm.barrier)

    for text in run(worker, 3, timeout_ms=30_000):
        assert text.endswith("aborted by rank 0: no more tokens")


def test_exception_in_a_with_block_aborts_the_group():
    def worker(comm):
        if comm.rank == 1:
            with pytest.raises(KeyError), comm:
                raise KeyError("layer 7")
            return None
        return outcome(comm, comm.barrier)

    results = run(worker, 3)
    assert all("aborted by rank 1: KeyError: 'layer 7'" in results[r] for r in (0, 2))


MISMATCHES = {
    "size": (
        lambda c: c.all_reduce(torch.ones(10 + c.rank)),
        ("pcie_allreduce of 10 float32", "pcie_allreduce of 11 float32"),
    ),
    "size across slots": (
        lambda c: c.all_reduce(torch.ones(3000 * (1 + c.rank))),
        ("3000 float32", "6000 float32"),
    ),
    "dtype": (
        lambda c: c.all_reduce(torch.ones(4, dtype=(torch.bfloat16, torch.float16)[c.rank])),
        ("4 bfloat16", "4 float16"),
    ),
    "algorithm": (
        lambda c: c.all_reduce(torch.ones(4), algorithm=c.rank),
        ("pcie_allreduce of 4 float32", "of 4 float32 by algorithm 1"),
    ),
    "lossy algorithm": (
        lambda c: c.all_reduce(
            torch.ones(128), algorithm=("two_shot_fp8", "two_shot_int8")[c.rank]
        ),
        ("by algorithm 6", "by algorithm 7"),
    ),
    "fused or not": (
        lambda c: fused(c, 2, 2) if c.rank else c.all_reduce(torch.ones(2, 2)),
        ("rank 0 calls pcie_allreduce of 4", "rank 1 calls pcie_allreduce_norm of 4 float32 in"),
    ),
    "rows": (
        lambda c: fused(c, *((6, 2), (2, 6))[c.rank]),
        ("pcie_allreduce_norm of 12 float32 in rows of 2", "of 12 float32 in rows of 6"),
    ),
    "op": (
        lambda c: c.barrier() if c.rank else c.all_gather(torch.ones(2)),
        ("pcie_all_gather of 2 float32", "rank 1 calls pcie_barrier"),
    ),
    "source": (lambda c: c.broadcast(torch.ones(2), c.rank), ("from rank 0", "from rank 1")),
}


@pytest.mark.parametrize("policy", ["spinning", "blocks"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_case_37_calls_that_differ_raise_on_all_ranks(name, policy):
    call, words = MISMATCHES[name]

    def worker(comm):
        with pytest.raises(RuntimeError) as caught:
            call(comm)
        return str(caught.value)

    for text in run(worker, 2, policy=POLICIES[policy], capacity=CAPACITY):
        assert "ranks disagree" in text and all(w in text for w in words), text


def test_case_37_configuration_digest():
    def worker(comm):
        raise AssertionError("ranks that disagree must not start")

    def config(rank):
        return {"hidden": 7168, "layers": 61 - (rank == 2), **({"extra": 1} if rank == 1 else {})}

    with RankGroup(worker, 3, config=config) as ranks:
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
    for o in outcomes:
        assert "config.layers: rank 0 has 61, rank 2 has 60" in o.error
        assert "config.extra: rank 0 has nothing, rank 1 has 1" in o.error
        assert "hidden" not in o.error

    with pytest.raises(RankError, match="config: rank 0 has [0-9a-f]{64}, rank 1 has"):
        run(worker, 2, config=lambda rank: b"weights %d" % rank)


def open_segments():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += [fd] * ("spec-kernels" in os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass  # the listing's own descriptor
    return found


def test_case_38_nothing_named_nothing_left():
    """Two groups at once, one rank killed: no names anywhere, memory goes with its owners."""
    gc.collect()  # groups that failed tests before this one left in tracebacks
    segments = len(open_segments())

    def worker(comm, other):
        with other.bind(comm.world_size - 1 - comm.rank) as second:
            a = second.all_reduce(torch.ones(3000))
            b = comm.all_reduce(torch.full((5,), 2.0))
            with open("/proc/self/maps") as maps:
                lines = [line for line in maps if "spec-kernels" in line]
            # Mapped, and without a name in any file system.
            assert len(lines) == 2 + segments and all(
                "memfd:spec-kernels (deleted)" in x for x in lines
            )
            if comm.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return a[0].item(), b[0].item()

    other = Communicator.create_group(3)
    with RankGroup(worker, 3, (other,)) as ranks:
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
    assert outcomes[0].signal == signal.SIGKILL
    assert [o.value for o in outcomes[1:]] == [(3.0, 6.0)] * 2
    del ranks, other
    gc.collect()
    assert len(open_segments()) == segments


def test_two_groups_interleaved():
    """Calls of two groups in turns, ranks numbered otherwise; when one fails, the other goes on."""
    num_calls = 60
    second = Communicator.create_group(3, capacity=2 * CAPACITY)

    def worker(comm, second):
        world, draw = comm.world_size, random.Random(5)
        with second.bind((comm.rank + 1) % world) as other:
            for i in range(num_calls):
                for c in draw.sample((comm, other), 2):
                    num = draw.choice((1, 64, 900, 3000))
                    parts = list(revealing(num, torch.bfloat16, i)[:world])
                    assert torch.equal(c.all_reduce(parts[c.rank]), ordered_sum(parts))
                    normed(c, revealing(2 * 33, torch.float32, i), 2, 33, torch.float32)
            if other.rank == 1:
                other.abort("this one only")
            with pytest.raises(RuntimeError, match="aborted by rank 1: this one only"):
                other.barrier()
            return comm.all_reduce(torch.ones(5)).tolist()

    assert run(worker, 3, second, capacity=CAPACITY) == [[3.0] * 5] * 3


def in_another_shm(fn, options):
    """``fn()`` in a process that has a /dev/shm of its own; an OSError's text if it may not."""

    def worker(comm):
        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, private = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
        for failed in (
            lambda: libc.unshare(new_namespace),
            lambda: libc.mount(b"none", b"/", None, private, None),
            lambda: libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options),
        ):
            if failed():
                return os.strerror(ctypes.get_errno())
        return fn()

    return run(worker, 1)[0]


@pytest.mark.parametrize("options", [b"size=64m", b"size=4k,nr_inodes=1"])
def test_case_38_the_size_of_dev_shm_does_not_matter(options):
    """A segment of 80 MiB where /dev/shm has 64, or not room for one file."""

    def worker(comm):
        x = torch.full((5 << 20,), 1.0 + comm.rank)  # 20 MiB, more than a slot
        return comm.transport, comm.all_reduce(x).unique().tolist()

    def ranks():
        size = os.statvfs("/dev/shm")
        assert size.f_blocks * size.f_frsize <= 64 << 20
        return launch(worker, 2, capacity=16 << 20, timeout=TIMEOUT)

    outcome = in_another_shm(ranks, options)
    if isinstance(outcome, str):
        pytest.skip(f"cannot mount another /dev/shm: {outcome}")
    assert outcome == [("shared memory", [3.0])] * 2


def test_case_38_lack_of_memory_is_an_error_at_the_start():
    with pytest.raises(OSError, match="cannot allocate .* of shared memory"):
        Communicator.create_group(8, capacity=1 << 40)


def test_bind_refuses_taken_and_foreign_ranks():
    group = Communicator.create_group(2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="expected 0 <= rank < 2"):
            group.bind(rank)
    group._segment.bind(1)
    with pytest.raises(ValueError, match="rank 1 already"):
        group._segment.bind(0)
    group._segment.leave()
    with pytest.raises(ValueError, match="rank 1 is taken"):
        group._segment.bind(1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"world_size": 0},
        {"world_size": 9},
        {"capacity": 0},
        {"timeout_ms": 0},
        {"transport": "nccl"},
    ],
)
def test_create_group_refuses(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Communicator.create_group(**{"world_size": 2, **arguments})


def test_single():
    with Communicator.single() as comm:
        x = torch.randn(3)
        assert (comm.rank, comm.world_size, comm.transport) == (0, 1, "single")
        assert torch.equal(comm.all_reduce(x), x) and comm.all_reduce(x, x) is x
        assert comm.all_gather(x).shape == (1, 3)
        assert comm.broadcast(x) is x
        comm.barrier()
    with pytest.raises(RuntimeError, match="closed"):
        comm.barrier()


def test_bad_arguments_raise_value_error_and_leave_the_group_well():
    def worker(comm):
        for bad in (torch.ones(4, 4).t(), torch.ones(3, dtype=torch.int32)):
            with pytest.raises(ValueError, match="spec_kernels::pcie_allreduce: input: expected"):
                comm.all_reduce(bad)
        with pytest.raises(ValueError, match="out"):
            comm.all_reduce(torch.ones(3), torch.ones(4))
        with pytest.raises(ValueError, match="src"):
            comm.broadcast(torch.ones(3), 2)
        return comm.all_reduce(torch.ones(3)).tolist()

    assert run(worker, 2) == [[2.0] * 3] * 2


def test_compiled_graph_uses_the_segment_itself():
    """Functionalisation copies what an op mutates; the compiler must undo it for the workspace."""

    def worker(comm):
        # No pattern matching and no arithmetic of its own: this is about our ops, and is quick.
        @torch.compile(fullgraph=True, options={"pattern_matcher": False})
        def layer(x):
            y = comm.all_reduce(comm.all_reduce(x))
            comm.barrier()
            return comm.all_gather(comm.broadcast(y, 1))

        return [layer(torch.full((3, 5), comm.rank + i))[1, 0, 0].item() for i in (0.0, 1.0)]

    import torch._inductor.compile_fx  # noqa: F401 - once here, not in each rank

    assert run(worker, 2) == [[2.0, 6.0]] * 2


@pytest.mark.parametrize("seed", range(8))
def test_garbage_in_the_control_lines_hangs_nobody(seed):
    """A peer that writes wild: calls end within the timeout, with an error or a result."""
    group = Communicator.create_group(2, capacity=CAPACITY, timeout_ms=300)

    def worker(outer, group):
        comm = group.bind(outer.rank)
        rng = random.Random(seed)
        outer.barrier()
        if comm.rank == 0:
            words = torch.frombuffer(group._segment, dtype=torch.int32)
            for _ in range(rng.choice((1, 8, 200))):
                words[rng.randrange(128 // 4, 4096 // 4)] = rng.randrange(-(1 << 31), 1 << 31)
        outer.barrier()
        for call in (comm.all_reduce, comm.all_gather, comm.broadcast):
            try:
                call(torch.ones(3000))
            except (RuntimeError, ValueError) as error:
                assert str(error).startswith(("pcie_", "spec_kernels::pcie_"))
        comm.abort("done")
        comm.close()

    run(worker, 2, group)


def test_copied_workspace_is_refused():
    """A backend that leaves the copies in place gets an error: peers would hear nothing."""

    def worker(comm):
        compiled = torch.compile(comm.all_reduce, fullgraph=True, backend="aot_eager")
        with pytest.raises((RuntimeError, ValueError), match="workspace: expected"):
            compiled(torch.ones(3))

    import torch._dynamo  # noqa: F401 - once here, not in each rank

    run(worker, 2)


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("cores", [1, 2, 8, 64])
def test_policy(world_size, cores):
    policy = choose_policy(world_size, cores)
    assert 1 <= policy.num_workers <= world_size
    assert policy.block_bytes >= 4096
    # One core: no rank ever takes it from another that is still at work.
    assert policy.num_spare == min(cores, 8) - 1
