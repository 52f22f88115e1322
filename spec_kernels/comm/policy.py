"""How a group waits and shares work: a pure function of the number of ranks and cores."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from spec_kernels.ops.pcie_allreduce.checks import MAX_RANKS


@dataclass(frozen=True)
class Policy:
    """Chosen once for a group, stored in its segment, the same for all ranks.

    Attributes:
        spin_iterations: polls (with a CPU pause in between) before a waiting rank goes to sleep, at
            most: each rank learns how many pay.
        num_workers: ranks that share a large sum: the last to arrive, and sleepers that it wakes.
        block_bytes: what a worker takes at a time; sums up to this size are the last rank's alone.
        num_spare: a rank polls only while no more others than this are still at work, so that none
            of them waits for the polling rank's core.
    """

    spin_iterations: int
    num_workers: int
    block_bytes: int
    num_spare: int = MAX_RANKS - 1

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
    sums for all. A core that runs out of ranks before the last one arrives goes idle, though, and
    an idle core is slow to wake; so a rank polls where its core has nothing better to do. Measured
    on 2 cores of a virtual machine (Xeon with AVX-512; microseconds a call at 14 KB, 57 KB, 0.23
    MB and 0.92 MB of bfloat16; medians of 9 bursts, contenders in turns, at real-time priority)::

        8 ranks, sleep at once                      72    86   245   912
        poll up to 2000 times with 1 core to spare  59    83   244   892
        poll up to 4000 times                       49    80   250   882
        3 ranks, sleep at once                      30    43   127   462
        poll up to 4000 times                       17    34   126   444

    Without priority, among a dozen busy processes, polls are in vain and ranks stop making them:
    126, 259, 620, 1861 asleep at once and 127, 264, 613, 1932 polling, for 8 ranks. Had they gone
    on polling 2000 times: 207, 393, 597, 1754, where sleeping took 158, 323, 537, 1552.

    Dropped after measuring: every rank sums everything for itself (8 ranks: 75, 190, 652, 2267
    where sharing took 65, 95, 302, 990; 2 ranks: no faster); ``sched_yield`` before sleeping, which
    gives a whole time slice away to any busy neighbour. Shares of 1 to 8 workers, blocks of 16 to
    64 KiB and slots of 64 KiB to 1 MiB take alike.
    """
    return Policy(
        spin_iterations=4000,
        num_workers=min(world_size, 2 * cores),
        block_bytes=32 << 10,
        num_spare=min(cores, MAX_RANKS) - 1,
    )
