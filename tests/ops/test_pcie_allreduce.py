"""The collectives as ops: contract, memory safety, compilation, and the order of the sum."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import spec_kernels
from spec_kernels import _library
from spec_kernels.comm import Communicator
from spec_kernels.comm.communicator import _host, shared_memory_reason
from spec_kernels.comm.launch import launch
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, LOSSY
from spec_kernels.ops.pcie_allreduce.reference import lossy_sum, ordered_sum
from spec_kernels.testing.compare import assert_same_bits, poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_shared_memory = pytest.mark.skipif(
    shared_memory_reason() is not None, reason=f"no shared memory: {shared_memory_reason()}"
)
ops = torch.ops.spec_kernels


def empty_workspace():
    return torch.empty(0, dtype=torch.uint8)


def segment(world_size=2, capacity=4096):
    """A bound segment of rank 0, and the tensor over it."""
    group = Communicator.create_group(world_size, capacity=capacity)
    group._segment.bind(0)
    return group._segment, torch.frombuffer(group._segment, dtype=torch.uint8)


@pytest.mark.parametrize("num", range(1, 9))
def test_order_of_the_sum(num):
    parts = [
        torch.randn(257, generator=torch.Generator().manual_seed(r)) * 10**r for r in range(num)
    ]
    r = parts
    expected = {
        1: lambda: r[0],
        2: lambda: r[0] + r[1],
        3: lambda: (r[0] + r[1]) + r[2],
        4: lambda: (r[0] + r[1]) + (r[2] + r[3]),
        5: lambda: ((r[0] + r[1]) + (r[2] + r[3])) + r[4],
        6: lambda: ((r[0] + r[1]) + (r[2] + r[3])) + (r[4] + r[5]),
        7: lambda: ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + r[6]),
        8: lambda: ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7])),
    }[num]()
    assert torch.equal(ordered_sum(parts), expected)


def test_one_rounding():
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (1.0, 2**-9, 2**-9, 2**-9)]
    assert ordered_sum(parts).item() == 1 + 2**-7
    assert sum(parts[1:], parts[0]).item() == 1.0  # what bfloat16 accumulation would give


def normed(name, dtype, num_rows=5, hidden=40):
    """Arguments of the fused op on one rank, by name, and what hidden_capture makes of them."""
    g = torch.Generator().manual_seed(7)
    x, residual = (torch.randn(num_rows, hidden, generator=g).to(dtype) for _ in range(2))
    weight = (1 + 0.2 * torch.randn(hidden, generator=g)).to(dtype)
    capture = poisoned(num_rows + 1, 3, hidden, dtype=dtype)
    stream, kept = residual.clone(), capture.clone()
    want = spec_kernels.hidden_capture(x, stream, weight, 1e-5, capture=kept, slot=2, backend=name)
    return (x, residual, weight, 1e-5), capture, (want, stream, kept)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("algorithm", ["auto", "two_shot", 5])
def test_norm_of_one_rank_is_hidden_capture(backend, dtype, algorithm):
    args, capture, (want, stream, kept) = normed(backend, dtype)
    options = {"capture": capture, "slot": 2, "backend": backend, "algorithm": algorithm}
    got = spec_kernels.pcie_allreduce_norm(*args, empty_workspace(), 0, 1, **options)
    for mine, right in ((got, want), (args[1], stream), (capture, kept)):
        assert_same_bits(mine, right)
    args, capture, _ = normed(backend, dtype)
    out = args[0]  # in place
    assert spec_kernels.pcie_allreduce_norm(*args, empty_workspace(), 0, 1, out=out) is out
    assert_same_bits(out, want)


@pytest.mark.parametrize("num", range(2, 9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_lossy_sums_err_as_little_as_their_formats_allow(num, dtype):
    """Against float64: each element within the roundings that its own group and format imply."""
    g = torch.Generator().manual_seed(num)
    scale = 10.0 ** torch.randint(-4, 3, (3, 2, 1), generator=g)  # a group's own
    parts = [(torch.randn(3, 2, 128, generator=g) * scale).to(dtype) for _ in range(num)]
    exact = sum(p.double() for p in parts)
    last = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal * 2**-7
    for name, algorithm in ALGORITHMS.items():
        if algorithm not in LOSSY or (name == "hierarchical_bf16" and num not in (4, 6, 8)):
            continue
        got = lossy_sum([p.flatten(1) for p in parts], algorithm).view(3, 2, 128).double()
        error = (got - exact).abs()
        if name == "hierarchical_bf16":
            allowed = 2.0**-8 * sum(p.double().abs() for p in parts)
        else:
            # Half a step: of fp8's three mantissa bits or its smallest subnormal; of int8's range.
            def step(x, int8=name == "two_shot_int8"):
                amax = x.abs().amax(-1, keepdim=True)
                return amax / 254 if int8 else torch.maximum(x.abs() / 16, amax / 448 * 2**-10)

            allowed = sum(step(p.double()) for p in parts)
            allowed = allowed + step(exact.abs() + allowed)
        assert (error <= 1.001 * allowed + last).all(), name
        assert (error > last).any(), f"{name} loses nothing: not the lossy sum"


@pytest.mark.parametrize("algorithm", sorted(LOSSY - {5}))
def test_coded_groups_stand_alone(algorithm):
    """A group's bits depend on the group; one bad value spoils the group and no other."""
    g = torch.Generator().manual_seed(3)
    parts = [torch.randn(4, 256, generator=g) for _ in range(3)]
    whole = lossy_sum(parts, algorithm)
    assert_same_bits(lossy_sum([p[2:3, 128:] for p in parts], algorithm), whole[2:3, 128:])
    for bad in (float("inf"), float("nan")):
        parts[1][1, 5] = bad
        spoiled = lossy_sum(parts, algorithm)
        assert spoiled[1, :128].isnan().all()
        spoiled[1, :128] = whole[1, :128]
        assert_same_bits(spoiled, whole)
    zeros = [torch.zeros(1, 128), -torch.zeros(1, 128)]
    assert (lossy_sum(zeros, algorithm) == 0).all()
    tiny = [torch.full((1, 128), 1e-44)] * 2
    assert lossy_sum(tiny, algorithm).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 0, 4)])
def test_one_rank_copies(backend, dtype, shape):
    x = torch.randn(shape).to(dtype)
    w = empty_workspace()
    y = spec_kernels.pcie_allreduce(x, w, 0, 1, backend=backend)
    assert torch.equal(x, y) and (x.numel() == 0 or y.data_ptr() != x.data_ptr())
    assert spec_kernels.pcie_allreduce(x, w, 0, 1, out=x, backend=backend) is x
    gathered = spec_kernels.pcie_all_gather(x, w, 0, 1, backend=backend)
    assert gathered.shape == (1, *shape) and torch.equal(gathered[0], x)
    assert spec_kernels.pcie_broadcast(x, 0, w, 0, 1, backend=backend) is x
    spec_kernels.pcie_barrier(w, 0, 1, backend=backend)


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        x, w = torch.empty(4, 8), torch.empty(0, dtype=torch.uint8)
        assert spec_kernels.pcie_allreduce(x, w, 0, 1).shape == (4, 8)
        assert spec_kernels.pcie_all_gather(x, w, 2, 8).shape == (8, 4, 8)
        assert spec_kernels.pcie_allreduce_norm(x, x + 1, x[0], 1e-5, w, 0, 8).shape == (4, 8)


def test_opcheck():
    x, w = torch.randn(5, 3), empty_workspace()
    torch.library.opcheck(ops.pcie_allreduce.default, (x, torch.empty_like(x), w, 0, 1, 1000, 0))
    args, capture, _ = normed("reference", torch.float32)
    group = (w, 0, 1, 1000, 0)
    norm = ops.pcie_allreduce_norm.default
    torch.library.opcheck(norm, (*args, torch.empty_like(args[0]), capture, 1, *group))
    torch.library.opcheck(norm, (*args, torch.empty_like(args[0]), None, 0, *group))
    torch.library.opcheck(ops.pcie_all_gather.default, (x, x.new_empty(1, 5, 3), w, 0, 1, 1000))
    torch.library.opcheck(ops.pcie_broadcast.default, (x, 0, w, 0, 1, 1000))
    torch.library.opcheck(ops.pcie_barrier.default, (w, 0, 1, 1000))


def test_compiles_fullgraph():
    comm = Communicator.single()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x):
        y = comm.all_reduce(x * 2)
        comm.barrier()
        residual = torch.zeros_like(x)
        comm.all_reduce_norm(x, residual, x[0], 1e-5, algorithm="one_shot")
        return comm.all_gather(comm.broadcast(y + 1)), residual

    x = torch.randn(4, 8)
    gathered, residual = f(x)
    assert torch.equal(gathered, (x * 2 + 1)[None]) and torch.equal(residual, x)


def norm(x, residual, w, out=None, capture=None, slot=0, algorithm=0):
    out = torch.empty_like(residual) if out is None else out
    weight = residual.new_ones(residual.shape[-1])
    group = (w, 0, 2, 9, algorithm)
    ops.pcie_allreduce_norm(x, residual, weight, 1e-5, out, capture, slot, *group)


BAD_CALLS = {
    "world size 0": (lambda x, w: ops.pcie_allreduce(x, x, w, 0, 0, 1000, 0), "world_size"),
    "world size 9": (lambda x, w: ops.pcie_allreduce(x, x, w, 0, 9, 1000, 0), "world_size"),
    "rank = world size": (lambda x, w: ops.pcie_allreduce(x, x, w, 2, 2, 1000, 0), "rank"),
    "rank -1": (lambda x, w: ops.pcie_barrier(w, -1, 2, 1000), "rank"),
    "timeout 0": (lambda x, w: ops.pcie_barrier(w, 0, 2, 0), "timeout_ms"),
    "integers": (lambda x, w: ops.pcie_allreduce(x.int(), x.int(), w, 0, 2, 9, 0), "input"),
    "other dtype of out": (lambda x, w: ops.pcie_allreduce(x, x.half(), w, 0, 2, 9, 0), "out"),
    "short out": (lambda x, w: ops.pcie_allreduce(x, x[1:], w, 0, 2, 9, 0), "out"),
    "overlap": (lambda x, w: ops.pcie_allreduce(x[1:], x[:-1], w, 0, 2, 9, 0), "out"),
    "strided": (lambda x, w: ops.pcie_allreduce(x.t(), x.t(), w, 0, 2, 9, 0), "input"),
    "algorithm": (lambda x, w: ops.pcie_allreduce(x, x, w, 0, 2, 9, 8), "algorithm"),
    "row without whole groups": (
        lambda x, w: ops.pcie_allreduce(x, x, w, 0, 2, 9, 6),
        "multiple of 128",
    ),
    "no islands": (lambda x, w: ops.pcie_allreduce(x, x, w, 0, 2, 9, 5), "4, 6 or 8"),
    "norm of a vector": (lambda x, w: norm(x[0], x[0].clone(), w), "residual"),
    "norm of halves": (lambda x, w: norm(x.half(), x.half(), w), "residual"),
    "norm of strided rows": (lambda x, w: norm(x.t(), x.clone(), w), "input"),
    "norm into the residual": (lambda x, w: norm(x, y := x.clone(), w, out=y), "out"),
    "norm of other rows": (lambda x, w: norm(x[1:], x.clone(), w), "input"),
    "norm into the workspace": (
        lambda x, w: norm(x, w[-64:].view(torch.float32).view(4, 4), w),
        "residual: expected memory apart from workspace",
    ),
    "slot beyond": (lambda x, w: norm(x, x.clone(), w, capture=x.clone()[:, None], slot=1), "slot"),
    "gather short": (lambda x, w: ops.pcie_all_gather(x, x.clone(), w, 0, 2, 9), "out"),
    "gather in place": (lambda x, w: ops.pcie_all_gather(x[:2], x, w, 0, 2, 9), "out"),
    "source": (lambda x, w: ops.pcie_broadcast(x, 2, w, 0, 2, 9), "src"),
    "workspace as input": (
        lambda x, w: ops.pcie_broadcast(w[:64], 0, w, 0, 2, 9),
        "tensor: expected memory apart",
    ),
    "empty workspace": (lambda x, w: ops.pcie_barrier(w[:0], 0, 2, 9), "workspace"),
    "short workspace": (lambda x, w: ops.pcie_barrier(w[:64], 0, 2, 9), "workspace"),
    "truncated workspace": (lambda x, w: ops.pcie_barrier(w[:-4096], 0, 2, 9), "workspace"),
    "shifted workspace": (lambda x, w: ops.pcie_barrier(w[4096:], 0, 2, 9), "workspace"),
    "unaligned workspace": (lambda x, w: ops.pcie_barrier(w[8:], 0, 2, 9), "workspace"),
    "floats as workspace": (
        lambda x, w: ops.pcie_barrier(w.view(torch.float32), 0, 2, 9),
        "uint8|Byte",
    ),
    "zeros as workspace": (
        lambda x, w: ops.pcie_barrier(torch.zeros_like(w), 0, 2, 9),
        "workspace",
    ),
    "copy of the workspace": (lambda x, w: ops.pcie_barrier(page_copy(w), 0, 2, 9), "a copy"),
    "other world size": (lambda x, w: ops.pcie_barrier(w, 0, 3, 9), "world_size"),
    "rank that is not bound here": (lambda x, w: ops.pcie_barrier(w, 1, 2, 9), "rank 1"),
}


def page_copy(w):
    """The same bytes at a page-aligned address, as a compiler's copy of an argument might be."""
    room = torch.empty(w.numel() + 4096, dtype=torch.uint8)
    shift = -room.data_ptr() % 4096
    room = room[shift : shift + w.numel()]
    return room.copy_(w)


@needs_shared_memory
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_leave_memory_alone(name):
    call, words = BAD_CALLS[name]
    owner, w = segment()
    before = w.clone()
    x = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=words):
        call(x, w)
    assert torch.equal(w, before) and torch.equal(x, torch.ones(4, 4))
    owner.leave()


@needs_shared_memory
@pytest.mark.parametrize("offset", [0, 8, 12, 16, 24, 32])
def test_damaged_header_is_refused(offset):
    owner, w = segment()
    w[offset] ^= 1
    with pytest.raises(RuntimeError, match="spec_kernels::pcie_barrier: workspace: expected"):
        ops.pcie_barrier(w, 0, 2, 10)
    owner.leave()


@pytest.mark.parametrize(
    "call",
    [
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2, dtype=torch.int32), w, 0, 1),
        lambda w: spec_kernels.pcie_allreduce([1.0], w, 0, 1),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2, 3).t(), w, 0, 1),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), w, 0, 1, out=torch.ones(3)),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), w, 1, 1),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), w, 0, 16),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), None, 0, 1),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), w, 0, 1, backend="triton"),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), w, 0, 1, timeout_ms=-1),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), w, 0, 1, algorithm="three_shot"),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), w, 0, 1, algorithm=-1),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(2), w, 0, 3, algorithm=5),
        lambda w: spec_kernels.pcie_allreduce(torch.ones(4, 129), w, 0, 1, algorithm=7),
        lambda w: spec_kernels.pcie_allreduce_norm(*[torch.ones(2)] * 3, 1e-5, w, 0, 1),
        lambda w: spec_kernels.pcie_allreduce_norm(
            torch.ones(2, 3), torch.ones(2, 4), torch.ones(4), 1e-5, w, 0, 1
        ),
        lambda w: spec_kernels.pcie_all_gather(torch.ones(2), w, 0, 1, out=torch.ones(2)),
        lambda w: spec_kernels.pcie_broadcast(torch.ones(2), 1, w, 0, 1),
        lambda w: spec_kernels.pcie_barrier(w.float(), 0, 1),
        lambda w: spec_kernels.pcie_barrier(w, 0, 2, backend="reference"),
    ],
)
def test_api_raises_value_error(call):
    with pytest.raises(ValueError, match="^spec_kernels::pcie_"):
        call(empty_workspace())


@needs_shared_memory
def test_second_thread_is_refused():
    owner, w = segment()
    errors = []

    def wait_for_rank_1():
        try:
            ops.pcie_barrier(w, 0, 2, 2000)
        except RuntimeError as error:
            errors.append(str(error))

    first = threading.Thread(target=wait_for_rank_1)
    first.start()
    arrived = w.view(torch.int32)[_host.OFFSETS["arrived"] // 4]
    while not arrived and first.is_alive():
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="workspace: expected one call at a time"):
        ops.pcie_barrier(w, 0, 2, 1)
    first.join()
    # The refused call disturbed neither the waiting one nor its reason to fail.
    assert len(errors) == 1 and "rank 1 did not arrive" in errors[0]
    owner.leave()


def every_16_bit_value(comm):
    """-0 added to each of 65536 values changes none; sums round to even, overflow, go subnormal."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    minus_zero = torch.full_like(bits, -32768)  # in both 16-bit formats
    for dtype in (torch.float16, torch.bfloat16):
        every = bits.view(dtype)
        got = comm.all_reduce(every if comm.rank == 0 else minus_zero.view(dtype))
        assert torch.equal(got.isnan(), every.isnan())
        real = ~every.isnan()
        assert torch.equal(got[real].view(torch.int16), bits[real]), dtype
        a = torch.rand(60000, generator=torch.Generator().manual_seed(9)).mul(2).sub(1)
        wide = (a * torch.logspace(-8, 4.9, 60000)).to(dtype)
        parts = [wide, wide.flip(0), wide.roll(1)]
        expected = ordered_sum(parts)
        if dtype == torch.float16:
            assert expected.isinf().any() and (expected.abs() < 6e-5).any()
        assert torch.equal(comm.all_reduce(parts[comm.rank]), expected), dtype
        # The one-byte forms go through every code; some groups hold what no code stands for.
        for values in (parts, [p.nan_to_num(0, 1, 1) for p in (every[: 60 * 128], every[-7680:])]):
            values = [v[: 60 * 128].view(60, 128) for v in (*values, values[0])[:3]]
            for algorithm in (6, 7):
                got = comm.all_reduce(values[comm.rank].contiguous(), algorithm=algorithm)
                assert_same_bits(got, lossy_sum(values, algorithm))
    return _library.cpu_isa()


@needs_shared_memory
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_every_16_bit_value(isa):
    if isa == _library.cpu_isa():
        assert launch(every_16_bit_value, 3, timeout=60) == [isa] * 3
        return
    if "SPEC_KERNELS_CPU_ISA" in os.environ or isa == "avx512" or _library.cpu_isa() == "plain":
        pytest.skip(f"this CPU, or SPEC_KERNELS_CPU_ISA, has no {isa}")
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "SPEC_KERNELS_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa] * 3


if __name__ == "__main__":  # the choice of instruction set is made once in a process
    print(*launch(every_16_bit_value, 3, timeout=60))
