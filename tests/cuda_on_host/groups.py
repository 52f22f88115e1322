"""Groups of ranks that are devices of the emulated machine, all in this process.

Each rank has a slab between guards, a record for its failure, and a stream of its own; ops are
called for one rank after the other and run together, interleaved, when the group synchronises.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch
from cuda_on_host import host_build

from spec_kernels.comm.device_group import STATUS_BYTES, VERSION, Attach, declare

NEVER_MS = 1 << 30
GUARD_BYTES = 256
EPS = 1e-5
_devices = itertools.count(1)


class Group:
    """``world_size`` ranks with attached slabs; ``close()`` detaches them.

    Args:
        table: (max_bytes, algorithm, num_blocks), ascending; what auto runs, and with how many
            blocks any algorithm does.
    """

    def __init__(
        self,
        machine: host_build.Machine,
        world_size: int,
        *,
        one_shot_bytes: int = 4 << 10,
        two_shot_bytes: int = 8 << 10,
        island_size: int = 0,
        table: Sequence[tuple[int, int, int]] = ((1 << 40, 1, 2),),
    ):
        self.machine = machine
        self.world_size = world_size
        self.library = declare(machine.library)
        self.ops = getattr(torch.ops, host_build.NAMESPACE)
        self.num_bytes = self.library.spec_kernels_pcie_slab_bytes(
            world_size, one_shot_bytes, two_shot_bytes, island_size
        )
        ends = (ctypes.c_uint64(), ctypes.c_uint64())
        self.library.spec_kernels_pcie_slab_slots(
            ctypes.c_int32(world_size),
            ctypes.c_uint64(one_shot_bytes),
            ctypes.c_uint64(two_shot_bytes),
            ctypes.c_int32(island_size),
            *map(ctypes.byref, ends),
        )
        self.slots = slice(ends[0].value, ends[1].value)
        self._stores = []
        self._in_use = []  # tensors of launches that have not run yet
        self.slabs = []
        for _ in range(world_size):
            store = torch.full((self.num_bytes + 3 * GUARD_BYTES,), 0xFF, dtype=torch.uint8)
            begin = GUARD_BYTES + -store.data_ptr() % GUARD_BYTES
            self._stores.append(store)
            self.slabs.append(store[begin : begin + self.num_bytes])
        self.records = [
            torch.full((STATUS_BYTES,), 0xFF, dtype=torch.uint8) for _ in range(world_size)
        ]
        self.devices = [next(_devices) for _ in range(world_size)]
        self.streams = [machine.create_stream(d) for d in self.devices]
        self.attached = []
        for rank in range(world_size):
            a = Attach(
                version=VERSION,
                rank=rank,
                world_size=world_size,
                island_size=island_size,
                one_shot_bytes=one_shot_bytes,
                two_shot_bytes=two_shot_bytes,
                num_entries=len(table),
            )
            for r, slab in enumerate(self.slabs):
                a.slabs[r] = slab.data_ptr()
            a.status_host = a.status_device = self.records[rank].data_ptr()
            for i, entry in enumerate(table):
                a.table[i].max_bytes, a.table[i].algorithm, a.table[i].num_blocks = entry
            self.attached.append(a)
            self.attach(rank)

    def attach(self, rank: int) -> None:
        error = self.library.spec_kernels_pcie_attach(ctypes.byref(self.attached[rank]))
        if error is not None:
            raise ValueError(error.decode())

    def close(self) -> None:
        for slab, stream in zip(self.slabs, self.streams, strict=True):
            self.library.spec_kernels_pcie_detach(slab.data_ptr())
            self.machine.destroy_stream(stream)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def check(self, rank: int) -> str | None:
        """How the group failed, as ``rank`` tells it."""
        text = self.library.spec_kernels_pcie_check(self.slabs[rank].data_ptr(), b"pcie_allreduce")
        return None if text is None else text.decode()

    def on(self, rank: int):
        return self.machine.on_stream(self.streams[rank])

    def all_reduce(self, rank: int, x, out=None, algorithm: int = 0, timeout_ms: int = NEVER_MS):
        """Enqueues the call of ``rank``; its result is there after ``synchronize``."""
        # Neither a sum nor the poison of a failed call.
        out = torch.full_like(x, -7) if out is None else out
        args = (x, out, self.slabs[rank], rank, self.world_size, timeout_ms, algorithm)
        with self.on(rank):
            self.ops.pcie_allreduce.default(*args)
        self._in_use += [x, out]
        return out

    def _call(self, op: str, rank: int, *args, timeout_ms: int) -> None:
        self._in_use += args
        with self.on(rank):
            getattr(self.ops, op).default(
                *args, self.slabs[rank], rank, self.world_size, timeout_ms
            )

    def all_gather(self, rank: int, x, timeout_ms: int = NEVER_MS):
        out = x.new_full((self.world_size, *x.shape), 7)
        self._call("pcie_all_gather", rank, x, out, timeout_ms=timeout_ms)
        return out

    def broadcast(self, rank: int, x, src: int, timeout_ms: int = NEVER_MS):
        self._call("pcie_broadcast", rank, x, src, timeout_ms=timeout_ms)
        return x

    def barrier(self, rank: int, timeout_ms: int = NEVER_MS) -> None:
        self._call("pcie_barrier", rank, timeout_ms=timeout_ms)

    def all_reduce_norm(
        self,
        rank: int,
        x,
        residual,
        weight,
        out,
        capture=None,
        slot: int = 0,
        algorithm: int = 0,
        timeout_ms: int = NEVER_MS,
    ) -> None:
        args = (x, residual, weight, EPS, out, capture, slot, self.slabs[rank], rank)
        args += (self.world_size, timeout_ms, algorithm)
        self._in_use += args
        with self.on(rank):
            self.ops.pcie_allreduce_norm.default(*args)

    def use_stream(self, rank: int, stream: int) -> None:
        error = self.library.spec_kernels_pcie_use_stream(self.slabs[rank].data_ptr(), stream)
        if error is not None:
            raise ValueError(error.decode())

    def synchronize(self) -> None:
        self.machine.synchronize()
        self._in_use.clear()

    def assert_at_rest(self) -> None:
        """Every slot holds the sentinel and nothing else, and nobody wrote beside a slab."""
        for slab, store in zip(self.slabs, self._stores, strict=True):
            assert bool((slab[self.slots] == 0xFF).all()), "a stale word in a free slot"
            before = slab.data_ptr() - store.data_ptr()
            assert bool((store[:before] == 0xFF).all()), "bytes before the slab were written"
            assert bool((store[before + slab.numel() :] == 0xFF).all()), "bytes beyond were written"
