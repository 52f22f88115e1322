"""How a group waits and shares work: a pure function of the number of ranks and cores."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Policy:
    """Chosen once for a group, stored in its segment, the same for all ranks.

    Attributes:
        spin_iterations: polls (with a CPU pause in between) before the first yield.
        yield_rounds: polls (with ``sched_yield`` in between) before the first sleep.
        num_workers: ranks that can run at the same time, and so share out a large sum.
        one_shot_bytes: messages up to this size are summed by every rank for itself; above it
            (always,
            when 0) the last rank to arrive sums for all, helped by ``num_workers - 1`` others.
        block_bytes: what a worker takes at a time.
    """

    spin_iterations: int
    yield_rounds: int
    num_workers: int
    one_shot_bytes: int
    block_bytes: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def num_cores() -> int:
    """Cores that this process may use: its affinity, and its cgroup's quota where one is set."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no such controller: the affinity stands
    return cores


def choose_policy(world_size: int, cores: int) -> Policy:
    """The policy for ``world_size`` ranks on ``cores`` cores."""
    workers = max(1, min(world_size, cores))
    if world_size <= cores:
        return Policy(2000, 64, workers, 64 << 10, 64 << 10)
    return Policy(0, 0, workers, 0, 64 << 10)
