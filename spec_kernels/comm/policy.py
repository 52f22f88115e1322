"""How a group waits and shares work: a pure function of the number of ranks and cores."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Policy:
    """Chosen once for a group, stored in its segment, the same for all ranks.

    Attributes:
        spin_iterations: polls (with a CPU pause in between) before a waiting rank goes to sleep.
        num_workers: ranks that share a large sum: the last to arrive, and sleepers that it wakes.
        block_bytes: what a worker takes at a time; sums up to this size are the last rank's alone.
    """

    spin_iterations: int
    num_workers: int
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
    """The policy for ``world_size`` ranks on ``cores`` cores.

    When ranks outnumber cores a switch between processes is the cost, so each rank should run once
    a call: it copies its input, sleeps, and is woken to copy the result, while whoever arrives last
    sums for all. Measured with 8 ranks on 2 cores (Xeon with AVX-512; microseconds a call at 14 KB,
    57 KB, 0.23 MB and 0.92 MB of bfloat16; medians of 25 short bursts, contenders in turns)::

        sleep at once, 4 workers, blocks of 32 KiB      65    95   302   990
        the same, 2 workers, blocks of 64 KiB           66   105   303  1009
        poll 2000 times, then sleep                    197   230   432  1520

    Two more ways were measured and dropped. When every rank sums everything for itself: 75, 190,
    652, 2267. With up to 8 ``sched_yield`` before sleeping: 45, 93, 262, 1011, but 3146, 3385,
    3552, 3093 beside two busy loops (sleeping at once: 82, 178, 390, 1799), since a yield gives a
    whole time slice away to any neighbour.

    With a core for each rank, polling first saves the switch: 2 ranks on 2 cores take 12, 23, 61
    and 297, and 16, 29, 85 and 387 when they sleep at once.
    """
    if world_size <= cores:
        return Policy(spin_iterations=2000, num_workers=world_size, block_bytes=32 << 10)
    return Policy(spin_iterations=0, num_workers=min(world_size, 2 * cores), block_bytes=32 << 10)
