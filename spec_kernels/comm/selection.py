"""Which all-reduce algorithm takes which message: pure functions, the same answer on every rank.

The seed is a cost model: a time for each phase, and the bytes of the busiest link over its rate. It
needs no measurement, uses those of the links where there are some, and is overridden by timings of
the calls themselves (``tuning.py``). ``simulator.py`` runs the same schedules step by step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spec_kernels.comm.p2p import LinkMeasurements
from spec_kernels.comm.schedules import (
    MAX_BLOCKS,
    NUM_PHASES,
    algorithms_for,
    build,
)
from spec_kernels.comm.simulator import Box
from spec_kernels.comm.topology import Gpu, Topology, Vertex
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, AUTO, LOSSY

# Longer messages are NCCL's: the crossover of published tables, and what a slab is laid out for.
DEFAULT_MAX_BYTES = 1 << 20
MIN_BYTES = 256
MAX_ENTRIES = 32
# Of a grid, which a launch cuts down to a block a tile. Eight ranks on one device (the local mode)
# must fit it at the same time, polling.
DEFAULT_BLOCKS = 32
# Timings closer than this are a tie, which the algorithm with the lower number wins.
TIE = 0.02


@dataclass(frozen=True)
class Entry:
    """Messages of up to ``max_bytes``, and more than the entry before takes."""

    max_bytes: int
    algorithm: str
    num_blocks: int


@dataclass(frozen=True)
class Selection:
    """A group's table, ascending; longer messages than the last entry's are not the group's.

    Attributes:
        entries: 1 to 32.
        island_size: of the hierarchical algorithms; 0 where the table has none.
        origin: ``model`` (the cost model), ``predicted`` (the simulator) or ``measured``.

    Raises:
        ValueError: it is not as above, or names an algorithm that is not exact.
    """

    entries: tuple[Entry, ...]
    island_size: int = 0
    origin: str = "model"

    def __post_init__(self) -> None:
        if not 1 <= len(self.entries) <= MAX_ENTRIES:
            raise _error(f"expected 1 to {MAX_ENTRIES} entries, got {len(self.entries)}")
        if self.origin not in ("model", "predicted", "measured"):
            raise _error(f"expected origin model, predicted or measured, got {self.origin!r}")
        before = 0
        for e in self.entries:
            if not isinstance(e.max_bytes, int) or e.max_bytes <= before:
                raise _error(f"expected ascending max_bytes, got {e.max_bytes!r} after {before}")
            before = e.max_bytes
            number = ALGORITHMS.get(e.algorithm, AUTO)
            if number == AUTO or number in LOSSY:
                raise _error(f"expected an exact algorithm, got {e.algorithm!r}")
            if not isinstance(e.num_blocks, int) or not 1 <= e.num_blocks <= MAX_BLOCKS:
                raise _error(f"expected 1 to {MAX_BLOCKS} blocks, got {e.num_blocks!r}")
        islands = any(e.algorithm.startswith("hierarchical") for e in self.entries)
        if self.island_size not in ((2, 4) if islands else (0, 2, 4)):
            raise _error(f"expected islands of 2 or 4 ranks, got {self.island_size!r}")

    def pick(self, num_bytes: int) -> tuple[str, int] | None:
        """(algorithm, number of blocks) for a message; None where it is too long for the group."""
        for e in self.entries:
            if num_bytes <= e.max_bytes:
                return e.algorithm, e.num_blocks
        return None

    def lines(self) -> list[str]:
        """For people."""
        lines, begin = [], 0
        for e in self.entries:
            blocks = f"{e.num_blocks} block{'s' * (e.num_blocks > 1)}"
            lines.append(f"{begin:>7} to {e.max_bytes:>7} bytes  {e.algorithm}, {blocks}")
            begin = e.max_bytes + 1
        islands = f"islands of {self.island_size} ranks" if self.island_size else "no islands"
        return [*lines, f"{islands}; {self.origin}; longer messages go to NCCL"]

    def as_dict(self) -> dict:
        return {
            "origin": self.origin,
            "island_size": self.island_size,
            "entries": [[e.max_bytes, e.algorithm, e.num_blocks] for e in self.entries],
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> Selection:
        """Inverse of ``as_dict``; ValueError for anything else."""
        try:
            entries = tuple(Entry(*entry) for entry in data["entries"])
            return cls(entries, data["island_size"], data["origin"])
        except (KeyError, TypeError) as error:
            raise _error(f"not the fields of a selection: {error}") from error


def _error(what: str) -> ValueError:
    return ValueError(f"Selection: {what}")


def one_switch(num_ranks: int) -> Topology:
    """The tree assumed where none is known: all GPUs below one switch."""
    vertices = [
        Vertex("socket", "socket"),
        Vertex("port", "root_port", "socket"),
        Vertex("switch", "switch", "port"),
        *(Vertex(f"gpu{i}", "gpu", "switch") for i in range(num_ranks)),
    ]
    return Topology(tuple(vertices), tuple(Gpu(f"gpu{i}", i) for i in range(num_ranks)))


def box_for(
    num_ranks: int, topology: Topology | None = None, measurements: LinkMeasurements | None = None
) -> Box:
    """The machine of ranks 0 to ``num_ranks - 1`` as far as it is known."""
    topology = topology or one_switch(len(measurements.gpus) if measurements else num_ranks)
    if topology.num_ranks < num_ranks:
        raise ValueError(
            f"selection: topology: expected at least {num_ranks} GPUs, got {topology.num_ranks}"
        )
    if measurements is None:
        box = Box.from_topology(topology)
    else:
        box = Box.from_measurements(topology, measurements)
    return box if num_ranks == topology.num_ranks else box.select(range(num_ranks))


def model_us(
    box: Box,
    algorithm: str,
    num_bytes: int,
    num_ranks: int,
    *,
    island_size: int = 0,
    itemsize: int = 2,
) -> float:
    """T = alpha + max over links(bytes / bandwidth), in microseconds.

    alpha is 7, 12 and 17 us for one, two and three phases; the pull form adds a fence and a flag.
    Links count with all that a call sends over them, as if its phases overlapped perfectly.
    """
    costs = box.costs
    flag_us = costs.flag_us + costs.flag_root_us
    alpha = costs.launch_us + NUM_PHASES[algorithm] * (costs.phase_us + flag_us)
    if algorithm == "hierarchical_pull":
        alpha += costs.read_us + costs.read_root_us + flag_us
    schedule = build(
        algorithm, num_bytes, num_ranks, island_size=island_size, itemsize=itemsize, max_chunks=1
    )
    sent: dict[tuple[int, int, str], int] = defaultdict(int)
    for t in schedule.transfers:
        sent[t.source, t.destination, "read" if t.kind == "read" else "write"] += t.num_bytes
    gb_s, uses = box.constraints(list(sent))
    load: dict[tuple, float] = defaultdict(float)
    for num, used in zip(sent.values(), uses, strict=True):
        for resource in used:
            load[resource] += num
    return alpha + max((num / (gb_s[r] * 1e3) for r, num in load.items()), default=0.0)


def first_of_the_best(us: Sequence[float], tie: float = 0.0) -> int:
    """Index of the first time that is within ``tie`` (a fraction) of the shortest."""
    limit = min(us) * (1 + tie)
    return next(k for k, time in enumerate(us) if time <= limit)


def select(
    num_bytes: int,
    num_ranks: int,
    topology: Topology | None = None,
    measurements: LinkMeasurements | None = None,
    *,
    itemsize: int = 2,
) -> tuple[str, int]:
    """(algorithm, number of blocks) for one message by the cost model.

    Args:
        num_bytes: of the message, at least 0.
        num_ranks: 1 to 8, the first ranks of ``topology``.
        topology: the machine's tree; one switch is assumed where it is None.
        measurements: of its links; published figures stand in for what is None.
        itemsize: bytes of an element: 2 or 4.
    """
    box = box_for(num_ranks, topology, measurements)
    island_size = box.island_size
    return _select(box, num_bytes, num_ranks, island_size, itemsize)


def candidates(box: Box, num_ranks: int, island_size: int) -> tuple[str, ...]:
    """Exact algorithms that may be chosen unmeasured.

    Loads are three to four times slower than stores on some boards and the better way on others, so
    the pull form waits until the box's loads have been measured.
    """
    names = algorithms_for(num_ranks, island_size)
    return tuple(n for n in names if n != "hierarchical_pull" or box.loads_measured)


def _select(box, num_bytes, num_ranks, island_size, itemsize=2) -> tuple[str, int]:
    names = candidates(box, num_ranks, island_size)
    us = [
        model_us(box, name, num_bytes, num_ranks, island_size=island_size, itemsize=itemsize)
        for name in names
    ]
    return names[first_of_the_best(us)], DEFAULT_BLOCKS


def seed(
    num_ranks: int,
    topology: Topology | None = None,
    measurements: LinkMeasurements | None = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Selection:
    """The whole table for a group by the cost model; arguments as for ``select``."""
    box = box_for(num_ranks, topology, measurements)
    island_size = box.island_size
    return tabulate(
        lambda size: _select(box, size, num_ranks, island_size)[0], max_bytes, island_size, "model"
    )


def tabulate(
    choose: Callable[[int], str], max_bytes: int, island_size: int, origin: str
) -> Selection:
    """The table of what ``choose`` says for each size, its edges to the packet.

    Looks at two sizes an octave and halves the way between two that differ.
    """
    sizes = [s for k in range(64) if (s := int(MIN_BYTES * 2 ** (k / 2)) // 16 * 16) < max_bytes]
    ends: list[tuple[int, str]] = []
    for size in [*sizes, max_bytes]:
        name = choose(size)
        if ends and ends[-1][1] == name:
            ends[-1] = (size, name)
            continue
        if ends:
            low, high = ends[-1][0], size
            while high - low > 16:
                middle = (low + high) // 32 * 16
                if choose(middle) == ends[-1][1]:
                    low = middle
                else:
                    high = middle
            ends[-1] = (low, ends[-1][1])
        ends.append((size, name))
    entries = tuple(Entry(size, name, DEFAULT_BLOCKS) for size, name in ends)
    return Selection(entries, island_size, origin)
