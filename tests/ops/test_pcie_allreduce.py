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
from spec_kernels.ops.pcie_allreduce.reference import ordered_sum

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


def test_opcheck():
    x, w = torch.randn(5, 3), empty_workspace()
    torch.library.opcheck(ops.pcie_allreduce.default, (x, torch.empty_like(x), w, 0, 1, 1000, 0))
    torch.library.opcheck(ops.pcie_all_gather.default, (x, x.new_empty(1, 5, 3), w, 0, 1, 1000))
    torch.library.opcheck(ops.pcie_broadcast.default, (x, 0, w, 0, 1, 1000))
    torch.library.opcheck(ops.pcie_barrier.default, (w, 0, 1, 1000))


def test_compiles_fullgraph():
    comm = Communicator.single()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x):
        y = comm.all_reduce(x * 2)
        comm.barrier()
        return comm.all_gather(comm.broadcast(y + 1))

    x = torch.randn(4, 8)
    assert torch.equal(f(x), (x * 2 + 1)[None])


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
