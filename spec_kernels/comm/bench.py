"""``spec-kernels bench allreduce``: how long a sum over ranks takes, checked first.

Where there is nothing to time, a described box can be simulated; such rows say "predicted".
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from spec_kernels.comm.schedules import algorithms_for
from spec_kernels.comm.simulator import Box, entries, predict_us
from spec_kernels.comm.tuning import HIDDEN
from spec_kernels.ops.pcie_allreduce.reference import ordered_sum

# Of a decode step with 61 layers: two sums a layer.
SUMS_A_STEP = 122
PREDICTED = "predicted"


@dataclass(frozen=True)
class Row:
    """One way to sum one message.

    Attributes:
        num_bytes: of a rank's contribution.
        algorithm: by name, or what the ranks meet through.
        us: microseconds a call (10th percentile, median, 90th); all alike if predicted.
        rival: (name, how many times our median its median is), None without one.
        check: what was compared before timing, or ``predicted``.
    """

    num_bytes: int
    algorithm: str
    us: tuple[float, float, float]
    num_ranks: int
    rival: tuple[str, float] | None
    check: str

    @property
    def bus_gb_s(self) -> float:
        """NCCL's bus bandwidth: 2 (n - 1) / n of the message over the median, 1e9 bytes/s."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes / self.us[1] / 1e3

    def as_dict(self) -> dict:
        return {
            "bytes": self.num_bytes,
            "algorithm": self.algorithm,
            "ranks": self.num_ranks,
            "us_p10": self.us[0],
            "us_p50": self.us[1],
            "us_p90": self.us[2],
            "bus_gb_s": self.bus_gb_s,
            "rival": self.rival[0] if self.rival else None,
            "x_rival": self.rival[1] if self.rival else None,
            "check": self.check,
        }


def table(rows: Iterable[Row]) -> list[str]:
    """size | algorithm | us p10-p90 | bus GB/s | x rival | check"""
    rows = list(rows)
    rivals = sorted({row.rival[0] for row in rows if row.rival})
    title = f"x {'/'.join(rivals) or 'rival'}"
    lines = [
        f"{'bytes':>9} | {'algorithm':18} | {'us p50 [p10-p90]':>22} | {'bus GB/s':>8} | "
        f"{title:>8} | check"
    ]
    for row in rows:
        p10, p50, p90 = row.us
        us = f"{p50:.1f}" if row.check == PREDICTED else f"{p50:.1f} [{p10:.1f}-{p90:.1f}]"
        rival = f"{row.rival[1]:.2f}" if row.rival else "-"
        lines.append(
            f"{row.num_bytes:>9} | {row.algorithm:18} | {us:>22} | {row.bus_gb_s:8.2f} | "
            f"{rival:>8} | {row.check}"
        )
    return lines


# Predicted.


def predicted(
    box: Box, sizes: Sequence[int], num_ranks: int, island_size: int, *, lossy: bool = True
) -> list[Row]:
    """Rows of every algorithm at every size by the simulator.

    Their rival is the NCCL that was measured on that very box, with as many ranks and bytes.
    """
    nccl = entries().get(box.name, {}).get("allreduce_us", {}).get(f"ranks{num_ranks}_nccl", {})
    rows = []
    for size in sizes:
        for name in algorithms_for(num_ranks, island_size, lossy=lossy):
            us = predict_us(box, name, size, num_ranks, island_size=island_size)
            measured = nccl.get(str(size))
            rival = ("NCCL", measured / us) if measured else None
            rows.append(Row(size, name, (us, us, us), num_ranks, rival, PREDICTED))
    return rows


def fastest(rows: Iterable[Row], lossy: Iterable[str] = ()) -> dict[int, Row]:
    """For each size, the row of the lowest median (the first of equals), no ``lossy`` names."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.algorithm in lossy:
            continue
        if row.num_bytes not in best or row.us[1] < best[row.num_bytes].us[1]:
            best[row.num_bytes] = row
    return best


# Measured on this machine, ranks as processes.


def contribution(rank: int, rows: int, hidden: int = HIDDEN) -> torch.Tensor:
    """What a rank adds: bf16 [rows, hidden], seeded by both."""
    g = torch.Generator().manual_seed(100 * rows + rank)
    return torch.randn((rows, hidden), generator=g).bfloat16()


def rank_store(rank: int, world_size: int, listener: socket.socket):
    """A store for the ranks that were forked with ``listener``; rank 0 serves it from there."""
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        world_size,
        is_master=rank == 0,
        master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
        wait_for_workers=False,
    )


def gloo_group(rank: int, world_size: int, listener: socket.socket):
    """gloo among the ranks that were forked with ``listener``."""
    import torch.distributed as dist

    store = rank_store(rank, world_size, listener)
    return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=60))


def take_turns(
    barrier: Callable[[], None],
    contenders: Mapping[str, tuple[Callable[[], object], int]],
    num_rounds: int,
) -> dict[str, list[list[float]]]:
    """Microseconds of single calls by contender and round; every rank calls this alike.

    ``contenders``: a call, and how many of it in a round. They take turns, so that a noisy machine
    disturbs all alike; one call before each turn is not timed.
    """
    samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, (call, num_calls) in contenders.items():
            barrier()
            call()
            times = []
            for _ in range(num_calls):
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e6)
            samples[name].append(times)
    return samples


def check_sums(out: torch.Tensor, rivals: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """AssertionError unless ``out`` has the bits of ``expected`` and a rival's sum is near it."""
    exact = torch.equal(out, expected)
    error = (rivals.float() - expected.float()).abs().max().item() if out.numel() else 0.0
    if not exact or error > 0.05 * expected.float().abs().max().item():
        raise AssertionError(f"{what}: bits as expected: {exact}; the rival differs by {error}")


def cpu_worker(comm, listener, tokens, hidden, num_rounds, calls) -> list[dict]:
    """In each rank: the communicator against gloo, checked, then timed in turns."""
    gloo = gloo_group(comm.rank, comm.world_size, listener)
    results = []
    for rows in tokens:
        x = contribution(comm.rank, rows, hidden)
        expected = ordered_sum([contribution(r, rows, hidden) for r in range(comm.world_size)])
        out, theirs = torch.empty_like(x), x.clone()

        def ours(x=x, out=out):
            comm.all_reduce(x, out)

        def rival(x=x, theirs=theirs):
            theirs.copy_(x)
            gloo.allreduce([theirs]).wait()

        ours()
        rival()
        check_sums(out, theirs, expected, f"{rows} rows, rank {comm.rank}")
        samples = take_turns(comm.barrier, {"ours": (ours, calls), "gloo": (rival, 2)}, num_rounds)
        results.append({"rows": rows, "transport": comm.transport, **samples})
    comm.barrier()  # rank 0 serves the store of all
    return results


def percentiles(samples: Iterable[Iterable[float]]) -> tuple[float, float, float]:
    """10th, 50th and 90th of all samples together."""
    flat = torch.tensor([x for part in samples for x in part], dtype=torch.float64)
    low, middle, high = flat.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return low, middle, high


def measured_on_cpu(
    num_ranks: int, tokens: Sequence[int], hidden: int, num_rounds: int, calls: int
) -> list[Row]:
    """Rows of this machine's communicator against gloo; rank 0's times."""
    from spec_kernels.comm.launch import launch

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        results = launch(cpu_worker, num_ranks, listener, tokens, hidden, num_rounds, calls)[0]
    rows = []
    for r in results:
        ours, gloo = percentiles(r["ours"]), percentiles(r["gloo"])
        rival = ("gloo", gloo[1] / ours[1])
        size = 2 * hidden * r["rows"]
        rows.append(Row(size, r["transport"], ours, num_ranks, rival, "bit-exact"))
    return rows
