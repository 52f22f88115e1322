"""Which ranks form islands, and in which order to number them: by measurements, else by labels.

An island is a run of ranks that reach each other better than the rest. Labels name what lies
between two GPUs, not how well it works: they do not show which virtual switches share a chip, nor
that two sockets are joined by more links than eight GPUs fill. So where every pair was measured,
that decides, also that there are no islands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spec_kernels.comm.p2p import FlowMeasurement, LinkMeasurements
from spec_kernels.comm.topology import LABELS, Islands, Link, Topology, contiguous_runs

# All of an island must be nearer than all of the rest by this factor. On five measured boxes links
# of one kind differ by up to 1.07 in reads, 1.05 in streams and 1.25 in flags (here and there, so
# not for a whole island); links of different kinds by 1.38 (54 and 39 GB/s, across sockets) to 2
# (0.72 and 1.4 us, across root ports).
SEPARATION = 1.2

Square = list[list[float]]


@dataclass(frozen=True)
class IslandChoice:
    """The islands to use, or none.

    Attributes:
        islands: equal contiguous runs of ranks; empty: treat all ranks alike.
        source: ``measured`` or ``labels``.
        reason: the figures or labels behind it, for people.
    """

    islands: Islands
    source: str
    reason: str


def _costs(measurements: LinkMeasurements) -> dict[str, Square]:
    """By name, what was measured of every pair, both directions, as a cost (smaller is nearer)."""
    tables = {
        "128-byte reads": (measurements.read_128b_us, False),
        "flag writes": (measurements.flag_us, False),
        "streamed writes": (measurements.pair_write_gb_s, True),
        "streamed reads": (measurements.pair_read_gb_s, True),
    }
    ranks = range(len(measurements.gpus))
    found = {}
    for name, (table, is_rate) in tables.items():
        pairs = [(i, j) for i in ranks for j in ranks if i != j]
        if not pairs or any(not table[i][j] for i, j in pairs):
            continue  # a pair was not measured, or moved nothing: no scale to compare with
        cost = [[0.0] * len(ranks) for _ in ranks]
        for i, j in pairs:
            value = float(table[i][j])
            cost[i][j] = 1 / value if is_rate else value
        # A link is as good as its worse direction.
        found[name] = [[max(cost[i][j], cost[j][i]) for j in ranks] for i in ranks]
    return found


def _separation(cost: Square, islands: Islands) -> float:
    """How many times farther the nearest other rank is than the farthest of the own island."""
    ranks = range(len(cost))
    ratios = []
    for island in islands:
        for i in island:
            inside = max(cost[i][j] for j in island if j != i)
            ratios.append(min(cost[i][j] for j in ranks if j not in island) / inside)
    return min(ratios)


def _each(flow: FlowMeasurement) -> float | None:
    """GB/s of each copy, the better way of moving it; None unless sources and targets differ."""
    best = max((x for x in (flow.write, flow.read) if x is not None), default=None)
    count = len(flow.flows)
    ends = [{pair[side] for pair in flow.flows} for side in (0, 1)]
    if best is None or count < 2 or any(len(end) < count for end in ends):
        return None
    return best / count


def _flow_separation(flows: Sequence[FlowMeasurement], islands: Islands) -> float | None:
    """How many times faster copies run inside islands than when a whole island sends to another.

    None unless both were measured, the latter for every two islands (in one direction).
    """
    of = {rank: k for k, island in enumerate(islands) for rank in island}
    inside: list[float] = []
    across: dict[frozenset[int], float] = {}
    for flow in flows:
        each = _each(flow)
        if each is None:
            continue
        ways = [(of[s], of[d]) for s, d in flow.flows]
        if all(s == d for s, d in ways):
            inside.append(each)
        for s, d in set(ways):
            if s != d and ways.count((s, d)) == len(islands[s]):
                pair = frozenset((s, d))
                across[pair] = max(across.get(pair, 0.0), each)
    if not inside or len(across) < len(islands) * (len(islands) - 1) // 2:
        return None
    slowest = max(across.values())
    return min(inside) / slowest if slowest else float("inf")


def islands_from(measurements: LinkMeasurements | None, topology: Topology) -> IslandChoice:
    """The islands of ``topology``'s ranks.

    Measured first: a partition counts if some figure, known for every pair, sets all its islands
    apart by ``SEPARATION``, or if copies from one whole island to another get that much less each
    than copies inside. The partition most apart wins, at equality the larger islands. Labels count
    only if no figure covers every pair; the largest islands they single out are taken.

    Raises:
        ValueError: the measurements are of other GPUs, or in another order.
    """
    if measurements is not None:
        _check_same(measurements, topology)
        costs = _costs(measurements)
        best, judged = IslandChoice((), "measured", ""), bool(costs)
        apart = SEPARATION
        for islands in contiguous_runs(topology.num_ranks):
            ratios = {name: _separation(cost, islands) for name, cost in costs.items()}
            together = _flow_separation(measurements.flows, islands)
            if together is not None:
                ratios["copies at the same time"] = together
                judged = True
            name = max(ratios, key=ratios.__getitem__, default="")
            if name and ratios[name] >= apart:
                apart = ratios[name]
                best = IslandChoice(
                    islands,
                    "measured",
                    f"{name}: {apart:.2f} times better inside islands of {len(islands[0])}",
                )
        if best.islands:
            return best
        if judged:
            return replace(best, reason=f"no equal islands are {SEPARATION:g} times better inside")
    candidates = topology.islands()
    if not candidates:
        return IslandChoice((), "labels", "the labels single out no equal islands")
    islands = candidates[-1]
    inside, across = (
        "/".join(
            label
            for label in LABELS
            if any(
                topology.common(i, j) == label
                for a in islands
                for b in islands
                if (a == b) == same
                for i in a
                for j in b
            )
        )
        for same in (True, False)
    )
    return IslandChoice(islands, "labels", f"{inside} inside, {across} across")


def fabric_from(measurements: LinkMeasurements, topology: Topology) -> Topology:
    """``topology`` with a chip's fabric between switches that are as near as one switch's ports.

    For virtual switches of one chip, which the PCI tree cannot tell from two chips. Two switches
    below different root ports are joined if 128-byte reads between their GPUs take, at worst, less
    than ``SEPARATION`` times what they take inside the switches. Nothing is added unless both
    switches have two GPUs or more and every pair of these was measured.

    Raises:
        ValueError: the measurements are of other GPUs, or in another order.
    """
    _check_same(measurements, topology)
    reads = measurements.read_128b_us
    below: dict[str, list[int]] = {}
    for rank in range(topology.num_ranks):
        parent = topology.ancestors(rank)[1]
        if parent.kind == "switch":
            below.setdefault(parent.name, []).append(rank)

    def worst(ones: Sequence[int], others: Sequence[int]) -> float | None:
        values = [reads[i][j] for i in ones for j in others if i != j]
        return None if not values or None in values else max(x for x in values if x is not None)

    links = list(topology.links)
    names = sorted(below)
    for k, a in enumerate(names):
        for b in names[k + 1 :]:
            inside = [worst(below[name], below[name]) for name in (a, b)]
            across = [worst(below[a], below[b]), worst(below[b], below[a])]
            joined = any({a, b} == set(link.ends) for link in links)
            apart = topology.derived(below[a][0], below[b][0]) not in ("PIX", "PXB")
            if joined or not apart or None in inside or None in across:
                continue
            if max(x or 0.0 for x in across) < SEPARATION * max(x or 0.0 for x in inside):
                links.append(Link("chip_fabric", (a, b)))
    return replace(topology, links=tuple(links))


def rank_order(topology: Topology, measurements: LinkMeasurements | None = None) -> tuple[int, ...]:
    """An order of the ranks in which islands are contiguous: old ranks in their new places.

    Nearest ranks are joined first, by each figure and by the labels, and groups are lined up by
    their lowest rank. The order that is there stays unless another gives larger islands.
    """
    ranks = tuple(range(topology.num_ranks))
    tables: list[Sequence[Sequence[float]]] = []
    if measurements is not None:
        tables += _costs(measurements).values()
    tables.append([[topology.distance(i, j) for j in ranks] for i in ranks])

    def size(order: tuple[int, ...]) -> int:
        moved = select(measurements, order) if measurements is not None else None
        islands = islands_from(moved, topology.select(order)).islands
        return len(islands[0]) if islands else 0

    return max((ranks, *map(_line_up, tables)), key=size)


def _line_up(distances: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Leaves of the single-linkage tree, so that whatever is set apart stands together."""
    ranks = range(len(distances))
    group = {rank: [rank] for rank in ranks}
    pairs = sorted((distances[i][j], i, j) for i in ranks for j in ranks if i < j)
    for _, i, j in pairs:
        if group[i] is not group[j]:
            first, second = sorted((group[i], group[j]), key=min)
            first += second
            for rank in second:
                group[rank] = first
    return tuple(group[0]) if distances else ()


def select(measurements: LinkMeasurements, ranks: Sequence[int]) -> LinkMeasurements:
    """The same measurements with ``ranks`` of these as ranks 0, 1, ...; flows of others go."""
    place = {old: new for new, old in enumerate(ranks)}
    pick = {
        name: [[getattr(measurements, name)[i][j] for j in ranks] for i in ranks]
        for name in ("pair_write_gb_s", "pair_read_gb_s", "flag_us", "read_128b_us")
    }
    return LinkMeasurements(
        gpus=[measurements.gpus[rank] for rank in ranks],
        flows=[
            replace(flow, flows=tuple((place[s], place[d]) for s, d in flow.flows))
            for flow in measurements.flows
            if all(s in place and d in place for s, d in flow.flows)
        ],
        **pick,
    )


def _check_same(measurements: LinkMeasurements, topology: Topology) -> None:
    if len(measurements.gpus) != topology.num_ranks:
        raise ValueError(
            f"islands: expected measurements of {topology.num_ranks} GPUs, "
            f"got {len(measurements.gpus)}"
        )
    for rank, (measured, gpu) in enumerate(zip(measurements.gpus, topology.gpus, strict=True)):
        for what, ours, theirs in (
            ("uuid", gpu.uuid, measured.uuid),
            ("pci", gpu.pci, measured.pci),
        ):
            if ours and theirs and ours != theirs:
                raise ValueError(
                    f"islands: rank {rank}: expected measurements of the GPU with {what} {ours}, "
                    f"got {theirs}"
                )
