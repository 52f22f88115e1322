"""Times sums over ranks on their GPUs, inside graphs, once their bits are right.

Used by ``spec-kernels tune`` and ``bench allreduce`` where there are GPUs. Everything around CUDA
itself is tested on the emulated machine; none of it has run on a GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import torch

from spec_kernels import __version__, _library
from spec_kernels.comm.bench import Row, contribution, percentiles, rank_store
from spec_kernels.comm.device_group import DeviceGroup, Platform
from spec_kernels.comm.islands import islands_from
from spec_kernels.comm.launch import launch
from spec_kernels.comm.nvml import read_nvml
from spec_kernels.comm.report import Report, make_report
from spec_kernels.comm.schedules import algorithms_for
from spec_kernels.comm.selection import DEFAULT_BLOCKS, Entry, Selection
from spec_kernels.comm.sysfs import read_machine
from spec_kernels.comm.topology import Topology
from spec_kernels.comm.tuning import Key, load, tune_group
from spec_kernels.ops.pcie_allreduce.checks import MAX_RANKS
from spec_kernels.ops.pcie_allreduce.reference import ordered_sum

# One entry decides the grid of any algorithm that is named, so it must take every size.
_ANY_SIZE = 1 << 40


def graph_times(call: Callable[[], object], *, calls: int = 20, replays: int = 20) -> list[float]:
    """Microseconds a call inside a CUDA graph of ``calls`` of them; one sample a replay.

    Calls on this thread's current stream, which must not be the default one.
    """
    cuda = torch.cuda
    stream = cuda.current_stream()
    graph = cuda.CUDAGraph()
    call()  # what is made at the first call must not be made while capturing
    stream.synchronize()
    with cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    graph.replay()
    events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for begin, end in events:
        begin.record(stream)
        graph.replay()
        end.record(stream)
    stream.synchronize()
    return [begin.elapsed_time(end) * 1e3 / calls for begin, end in events]


class CudaTimer:
    """How a call is run and timed on a device: on a stream of this rank's own.

    Attributes:
        calls: in a graph.
        replays: of it, one sample each.
    """

    def __init__(self, calls: int = 20, replays: int = 20):
        self.calls, self.replays = calls, replays
        self._stream = None

    def _on(self, device: torch.device):
        torch.cuda.set_device(device)
        self._stream = self._stream or torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)

    def run(self, device: torch.device, call: Callable[[], object]) -> None:
        """Calls once and waits for it."""
        with self._on(device):
            call()
            self._stream.synchronize()

    def times(self, device: torch.device, call: Callable[[], object]) -> list[float]:
        """Microseconds of a call, a sample for each replay."""
        with self._on(device):
            return graph_times(call, calls=self.calls, replays=self.replays)


class GroupClock:
    """A ``tuning.Clock`` over device groups, one for each grid; checks before it times.

    All ranks make it and call it alike. A context manager that closes its groups.
    """

    def __init__(
        self,
        comm,
        device: object,
        island_size: int,
        *,
        timer=None,
        platform: Platform | None = None,
        **options,
    ):
        self._comm, self._device, self._island_size = comm, device, island_size
        self.timer = timer or CudaTimer()
        self._options = {"platform": platform, **options}
        self._groups: dict[int, DeviceGroup] = {}

    def group(self, num_blocks: int) -> DeviceGroup:
        """The group whose grid has so many blocks, made at its first use, by all ranks."""
        if num_blocks not in self._groups:
            entries = (Entry(_ANY_SIZE, "one_shot", num_blocks),)
            selection = Selection(entries, self._island_size)
            self._groups[num_blocks] = DeviceGroup(
                self._comm, self._device, selection=selection, **self._options
            )
        return self._groups[num_blocks]

    def __call__(self, algorithm: str, num_blocks: int, num_bytes: int) -> list[float]:
        group = self.group(num_blocks)
        parts = [contribution(r, 1, num_bytes // 2) for r in range(group.world_size)]
        x = parts[group.rank].to(group.device)
        out = torch.empty_like(x)

        def call() -> None:
            group.all_reduce(x, out, algorithm)

        self.timer.run(group.device, call)
        group.check()
        # Every rank learns of a wrong sum, or the others would wait for one that has left.
        right = self._comm.exchange(torch.equal(out.cpu(), ordered_sum(parts)))
        if not all(right):
            raise AssertionError(
                f"{algorithm}, {num_bytes} bytes, {num_blocks} blocks: wrong sums on ranks "
                f"{[rank for rank, sound in enumerate(right) if not sound]}"
            )
        samples = self.timer.times(group.device, call)
        group.check()
        return samples

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].close()

    def __enter__(self) -> GroupClock:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.close()
        for group in self._groups.values():  # after an error the ranks are not together any more
            group.leave()


class NcclRival:
    """NCCL among the same ranks, which forked with ``listener``."""

    def __init__(self, comm, listener: socket.socket, device: torch.device):
        import torch.distributed as dist

        self._dist, self._device, self._rank = dist, device, comm.rank
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl",
            store=rank_store(comm.rank, comm.world_size, listener),
            rank=comm.rank,
            world_size=comm.world_size,
            device_id=device,
        )

    def times(self, timer: CudaTimer, num_bytes: int) -> list[float]:
        x = contribution(self._rank, 1, num_bytes // 2).to(self._device)
        return timer.times(self._device, lambda: self._dist.all_reduce(x))

    def close(self) -> None:
        self._dist.destroy_process_group()


def gpus_here() -> Report | str:
    """This machine's report, or why no sums can be timed on its GPUs. Does not initialise CUDA."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    report = make_report(read_machine("/sys"), read_nvml(), devices, None, "/sys")
    count = report.topology.num_ranks
    if count < 2:
        return f"{'one GPU' if count else 'no GPU'} here, and sums take two"
    library = _library.LIBRARIES["cuda"]
    return report if library.loaded else f"{count} GPUs here, but _C_cuda: {library.reason}"


def kept_selection(num_ranks: int | None = None, **options) -> Selection | None:
    """The table that ``spec-kernels tune`` kept for this machine's first GPUs, if there is one.

    For ``DeviceGroup(selection=...)``; ``options`` as for ``tuning.load``.
    """
    report = gpus_here()
    if isinstance(report, str):
        return None
    return load(key_of(report, group_topology(report, num_ranks)), **options)


def group_topology(report: Report, num_ranks: int | None) -> Topology:
    """The tree of the first ranks of this machine. ValueError unless there are so many, 2 to 8."""
    have = report.topology.num_ranks
    num_ranks = min(have, MAX_RANKS) if num_ranks is None else num_ranks
    if not 2 <= num_ranks <= have:
        raise ValueError(f"--ranks: expected 2 to {have} GPUs of this machine, got {num_ranks}")
    return report.topology.select(range(num_ranks))


def key_of(report: Report, topology: Topology) -> Key:
    """What a table for the ranks of ``topology`` is kept under.

    ValueError for a GPU that no driver gave a UUID: a cache may be shared by several machines.
    """
    unnamed = [gpu.pci for gpu in topology.gpus if not gpu.uuid]
    if unnamed:
        raise ValueError(f"no UUID is known of GPU {', '.join(unnamed)} (is NVML there?)")
    ranks = range(topology.num_ranks)
    paths = ("/".join(v.name for v in reversed(topology.ancestors(r))) for r in ranks)
    driver = report.nvml.driver or report.machine.driver or "unknown"
    islands = islands_from(None, topology).islands
    size = len(islands[0]) if islands else 0
    return Key(tuple(g.uuid for g in topology.gpus), tuple(paths), driver, __version__, size)


def _devices(topology: Topology) -> list[str]:
    return [gpu.uuid for gpu in topology.gpus]


def _tune_rank(comm, devices, key: Key, make_clock, options: dict) -> dict:
    with make_clock(comm, devices[comm.rank], key.island_size) as clock:
        return tune_group(comm, key, clock, **options).as_dict()


def tune_on_gpus(
    report: Report, num_ranks: int | None = None, *, make_clock=GroupClock, **options
) -> Selection:
    """Times this machine's GPUs, one process each, or takes the table that is kept for them.

    ``options`` as for ``tuning.tune_group``. Must be called before this process uses CUDA.
    """
    topology = group_topology(report, num_ranks)
    key = key_of(report, topology)
    told = launch(_tune_rank, topology.num_ranks, _devices(topology), key, make_clock, options)
    return Selection.from_dict(told[0])


def _bench_rank(comm, devices, island_size, listener, sizes, make_clock, make_rival) -> list:
    with make_clock(comm, devices[comm.rank], island_size) as clock:
        device = clock.group(DEFAULT_BLOCKS).device
        rival = make_rival and make_rival(comm, listener, device)
        results = []
        for size in sizes:
            theirs = rival.times(clock.timer, size) if rival else None
            for name in algorithms_for(comm.world_size, island_size):
                results.append((size, name, clock(name, DEFAULT_BLOCKS, size), theirs))
        if rival:
            rival.close()
    comm.barrier()  # rank 0 serves NCCL's store
    return results


def measured_on_gpus(
    report: Report,
    sizes: Sequence[int],
    num_ranks: int | None = None,
    *,
    make_clock=GroupClock,
    make_rival=NcclRival,
) -> list[Row]:
    """Rows of every exact algorithm on this machine's GPUs against NCCL; rank 0's times.

    ``make_rival`` None: against nobody, as where torch has no NCCL.

    Must be called before this process uses CUDA.
    """
    topology = group_topology(report, num_ranks)
    num_ranks, island_size = topology.num_ranks, key_of(report, topology).island_size
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        args = (_devices(topology), island_size, listener, sizes, make_clock, make_rival)
        results = launch(_bench_rank, num_ranks, *args)[0]
    rows = []
    for size, name, ours, theirs in results:
        us = percentiles([ours])
        rival = theirs and ("NCCL", percentiles([theirs])[1] / us[1])
        rows.append(Row(size, name, us, num_ranks, rival, "bit-exact"))
    return rows
