"""How the GPUs of one machine hang together: a PCI tree as plain data, and what follows from it.

Nothing here reads a machine; ``sysfs.py`` and ``nvml.py`` do, and make a ``Topology`` of what they
find.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

KINDS = ("gpu", "switch", "root_port", "socket")
# Nearest first. The names are those of NVML and ``nvidia-smi topo -m``: one switch, several
# switches, one host bridge, one NUMA node, several NUMA nodes.
LABELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
# What pcie_allreduce's hierarchical forms take: equal subtrees of its canonical order of summing.
ISLAND_SIZES = (2, 4)

Islands = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Vertex:
    """A place in the tree.

    Attributes:
        name: unique in its topology; of a real machine, the PCI address of the port or device.
        kind: one of ``KINDS``. A switch is its upstream port and its downstream ports together.
        parent: name of the next vertex towards the processor; None for a socket.
        numa: NUMA node, None where it is unknown (and for sockets that hold several).
        host_bridge: name of the host bridge (root complex) for a child of a socket, else None.
    """

    name: str
    kind: str
    parent: str | None = None
    numa: int | None = None
    host_bridge: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A rank's device.

    Attributes:
        vertex: name of its vertex.
        index: its number among the devices that the driver shows.
        uuid: ``GPU-...``; empty where no driver told it.
        pci: ``domain:bus:device.function``; empty for a box that is described, not read.
        name: what the driver calls it; empty if unknown.
    """

    vertex: str
    index: int
    uuid: str = ""
    pci: str = ""
    name: str = ""


@dataclass(frozen=True)
class Link:
    """An edge that is not of the tree, usable in both directions.

    Attributes:
        kind: ``chip_fabric`` joins virtual switches of one chip; ``interconnect`` joins sockets.
        ends: the two vertices.
    """

    kind: str
    ends: tuple[str, str]


def _error(what: str) -> ValueError:
    return ValueError(f"Topology: {what}")


@dataclass(frozen=True)
class Topology:
    """Vertices, the GPUs among them in rank order, and the edges beside the tree's own.

    Attributes:
        told: labels of the pairs of ranks as a driver tells them, "?" where it does not; empty if
            nobody was asked. They count more than what the tree shows, which may be a part only.

    Raises:
        ValueError: names that are not unique, unknown or missing parents, kinds or ends, a circle.
    """

    vertices: tuple[Vertex, ...]
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...] = ()
    told: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        known = {v.name: v for v in self.vertices}
        if len(known) != len(self.vertices):
            raise _error("two vertices have one name")
        for v in self.vertices:
            if v.kind not in KINDS:
                raise _error(f"vertex {v.name}: kind must be one of {KINDS}, got {v.kind!r}")
            if v.kind == "socket" and v.parent is not None:
                raise _error(f"socket {v.name} must have no parent, got {v.parent}")
            if v.kind != "socket" and v.parent not in known:
                raise _error(f"vertex {v.name}: parent {v.parent!r} is not a vertex")
            if v.parent is not None and known[v.parent].kind == "gpu":
                raise _error(f"vertex {v.name}: a GPU ({v.parent}) cannot be a parent")
        for v in self.vertices:
            seen = {v.name}
            while v.parent is not None:
                v = known[v.parent]
                if v.name in seen:
                    raise _error(f"the parents of {v.name} make a circle")
                seen.add(v.name)
        shown = [g.vertex for g in self.gpus]
        for name in shown:
            if name not in known or known[name].kind != "gpu":
                raise _error(f"{name!r} is not a vertex of kind gpu")
        if len(set(shown)) != len(shown):
            raise _error("two ranks have one GPU")
        for link in self.links:
            if link.kind not in ("chip_fabric", "interconnect"):
                raise _error(f"a link is chip_fabric or interconnect, got {link.kind!r}")
            wanted = "switch" if link.kind == "chip_fabric" else "socket"
            for end in link.ends:
                if end not in known or known[end].kind != wanted:
                    raise _error(f"an end of a {link.kind} must be a {wanted}, got {end!r}")

        if self.told:
            square = all(len(part) == len(self.gpus) for part in (self.told, *self.told))
            if not square:
                raise _error(f"told must be a square of {len(self.gpus)} labels")
            for label in {label for row in self.told for label in row} - {*LABELS, "X", "?"}:
                raise _error(f"a label must be one of {LABELS}, got {label!r}")

    @cached_property
    def _by_name(self) -> dict[str, Vertex]:
        return {v.name: v for v in self.vertices}

    @cached_property
    def _neighbours(self) -> dict[str, list[str]]:
        near: dict[str, list[str]] = {v.name: [] for v in self.vertices}
        pairs = [(v.name, v.parent) for v in self.vertices if v.parent is not None]
        for a, b in [*pairs, *(link.ends for link in self.links)]:
            near[a].append(b)
            near[b].append(a)
        return near

    @cached_property
    def _paths(self) -> dict[tuple[int, int], tuple[tuple[str, str], ...]]:
        return {}

    @property
    def num_ranks(self) -> int:
        return len(self.gpus)

    def vertex(self, name: str) -> Vertex:
        """The vertex called ``name``; KeyError if there is none."""
        return self._by_name[name]

    def ancestors(self, rank: int) -> tuple[Vertex, ...]:
        """From the rank's GPU up to its socket, both included."""
        chain = [self.vertex(self.gpus[rank].vertex)]
        while chain[-1].parent is not None:
            chain.append(self.vertex(chain[-1].parent))
        return tuple(chain)

    def edges(self) -> tuple[tuple[str, str], ...]:
        """Every directed edge (from, to), each link in both directions."""
        return tuple((a, b) for a, near in self._neighbours.items() for b in near)

    def path(self, source: int, destination: int) -> tuple[tuple[str, str], ...]:
        """Directed edges (from, to) that a transfer between two ranks traverses.

        The way with the fewest edges: up to the lowest common vertex and down again, or across a
        chip's fabric or the sockets' interconnect. Empty for a rank and itself.

        Raises:
            ValueError: the two are not connected.
        """
        if (source, destination) not in self._paths:
            self._paths[source, destination] = self._shortest(source, destination)
        return self._paths[source, destination]

    def _shortest(self, source: int, destination: int) -> tuple[tuple[str, str], ...]:
        start, goal = self.gpus[source].vertex, self.gpus[destination].vertex
        came_from: dict[str, str | None] = {start: None}
        waiting = deque([start])
        while waiting and goal not in came_from:
            here = waiting.popleft()
            for there in self._neighbours[here]:
                if there not in came_from:
                    came_from[there] = here
                    waiting.append(there)
        if goal not in came_from:
            raise _error(f"no way from rank {source} ({start}) to rank {destination} ({goal})")
        edges, there = [], goal
        while (here := came_from[there]) is not None:
            edges.append((here, there))
            there = here
        return tuple(reversed(edges))

    def common(self, i: int, j: int) -> str:
        """What two ranks share, as NVML labels it: one of ``LABELS``, or ``X`` for a rank itself.

        As told, else by the tree. A fabric between virtual switches shows in neither.
        """
        if i == j:
            return "X"
        if self.told and self.told[i][j] != "?":
            return self.told[i][j]
        return self.derived(i, j)

    def derived(self, i: int, j: int) -> str:
        """The label of two different ranks by the tree alone."""
        up_i, up_j = self.ancestors(i), self.ancestors(j)
        below_j = {v.name for v in up_j}
        meet = next((v for v in up_i if v.name in below_j), None)
        if meet is not None and meet.kind != "socket":
            near = up_i[1].name == up_j[1].name
            return "PIX" if near else "PXB"
        tops = [up[-2] for up in (up_i, up_j)]
        if tops[0].host_bridge is not None and tops[0].host_bridge == tops[1].host_bridge:
            return "PHB"
        nodes = [top.numa for top in tops]
        if None in nodes:
            return "SYS" if meet is None else "NODE"
        return "NODE" if nodes[0] == nodes[1] else "SYS"

    def labels(self) -> tuple[tuple[str, ...], ...]:
        """``common`` of every pair, as a square."""
        ranks = range(self.num_ranks)
        return tuple(tuple(self.common(i, j) for j in ranks) for i in ranks)

    def distance(self, i: int, j: int) -> int:
        """Nearness of two ranks, 0 to 5, for comparisons only.

        The place of their label in ``LABELS``, plus one; ranks that a chip's fabric joins are as
        near as ranks below several switches, since no host bridge lies between them.
        """
        if i == j:
            return 0
        place = LABELS.index(self.common(i, j)) + 1
        joined = {frozenset(link.ends) for link in self.links if link.kind == "chip_fabric"}
        crosses = bool(joined) and any(frozenset(edge) in joined for edge in self.path(i, j))
        return min(place, LABELS.index("PXB") + 1) if crosses else place

    def islands(self) -> tuple[Islands, ...]:
        """Candidates for the hierarchical algorithms, smallest islands first.

        Each is a partition of the ranks into two or more contiguous runs of equal length (one of
        ``ISLAND_SIZES``) in which every rank is nearer to all of its own island than to any other
        rank. Empty when the tree singles none out.
        """
        return equal_islands(
            [[self.distance(i, j) for j in range(self.num_ranks)] for i in range(self.num_ranks)]
        )

    def select(self, ranks: Sequence[int]) -> Topology:
        """The same machine, with ``ranks`` of this one as its ranks 0, 1, ... and no others."""
        told = tuple(tuple(self.told[i][j] for j in ranks) for i in ranks) if self.told else ()
        return Topology(self.vertices, tuple(self.gpus[r] for r in ranks), self.links, told)

    def as_dict(self) -> dict:
        """Plain data, which ``from_dict`` takes."""
        return {
            "vertices": [asdict(v) for v in self.vertices],
            "gpus": [asdict(g) for g in self.gpus],
            "links": [{"kind": link.kind, "ends": list(link.ends)} for link in self.links],
            "told": [list(row) for row in self.told],
        }

    @classmethod
    def from_dict(cls, data: dict) -> Topology:
        """Inverse of ``as_dict``; ValueError names a field that is missing or unknown."""
        try:
            return cls(
                tuple(Vertex(**v) for v in data["vertices"]),
                tuple(Gpu(**g) for g in data["gpus"]),
                tuple(Link(link["kind"], tuple(link["ends"])) for link in data["links"]),
                tuple(tuple(row) for row in data["told"]),
            )
        except (KeyError, TypeError) as error:
            raise _error(f"not the fields of a topology: {error}") from error

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_box(cls, box: dict) -> Topology:
        """From a described box: ``tree``, ``numa`` and ``nvml_labels`` as in ``boxes.json``.

        The tree is nested by socket, root port and switches, with lists of GPUs at the bottom and
        pairs of switches under ``chip_fabric``. It does not say which root ports share a host
        bridge; only the labels do, so bridges are read from them: ports that any PHB joins have
        one, every other port its own. GPU k is rank k.
        """
        tree, labels = box["tree"], box.get("nvml_labels")
        numa: list[int | None] = box.get("numa") or []
        vertices: list[Vertex] = []

        def ranks_below(node: dict | list) -> list[int]:
            if isinstance(node, list):
                return [int(name.removeprefix("gpu")) for name in node]
            return [rank for child in node.values() for rank in ranks_below(child)]

        def numa_of(ranks: Iterable[int]) -> int | None:
            nodes = {numa[rank] for rank in ranks if rank < len(numa)}
            return nodes.pop() if len(nodes) == 1 else None

        def grow(name: str, node: dict | list, kind: str, parent: str | None) -> None:
            bridge = None
            if kind == "root_port":
                ranks = ranks_below(node)
                bridge = f"bridge_of_gpu{min(_joined(labels, 'PHB', ranks) if labels else ranks)}"
            vertices.append(Vertex(name, kind, parent, numa_of(ranks_below(node)), bridge))
            below = "root_port" if kind == "socket" else "switch"
            if isinstance(node, dict):
                for child, content in node.items():
                    grow(child, content, below, name)
            else:
                for gpu in node:
                    vertices.append(Vertex(gpu, "gpu", name, numa_of(ranks_below([gpu]))))

        sockets = [name for name in tree if name != "chip_fabric"]
        for name in sockets:
            grow(name, tree[name], "socket", None)
        count = sum(v.kind == "gpu" for v in vertices)
        links = [Link("chip_fabric", tuple(ends)) for ends in tree.get("chip_fabric", ())]
        links += interconnect(sockets)
        return cls(
            tuple(vertices), tuple(Gpu(f"gpu{rank}", rank) for rank in range(count)), tuple(links)
        )


def _joined(labels: Sequence[Sequence[str]], label: str, ranks: Iterable[int]) -> set[int]:
    """``ranks`` and all that ``label`` joins them to, directly or through others."""
    found: set[int] = set()
    waiting = list(ranks)
    while waiting:
        rank = waiting.pop()
        if rank not in found:
            found.add(rank)
            waiting += [other for other, seen in enumerate(labels[rank]) if seen == label]
    return found


def interconnect(sockets: Sequence[str]) -> list[Link]:
    """Links between all pairs of sockets."""
    return [Link("interconnect", (a, b)) for k, a in enumerate(sockets) for b in sockets[k + 1 :]]


def contiguous_runs(num_ranks: int) -> tuple[Islands, ...]:
    """Partitions of the ranks into two or more equal runs, for each of ``ISLAND_SIZES``."""
    return tuple(
        tuple(tuple(range(k, k + size)) for k in range(0, num_ranks, size))
        for size in ISLAND_SIZES
        if num_ranks > size and num_ranks % size == 0
    )


def equal_islands(distances: Sequence[Sequence[float]]) -> tuple[Islands, ...]:
    """Partitions into contiguous equal runs, all of a rank's run nearer than all of the rest.

    ``distances[i][j]`` is any measure of how far ranks i and j are apart.
    """
    ranks = range(len(distances))
    return tuple(
        islands
        for islands in contiguous_runs(len(distances))
        if all(
            max(distances[i][j] for j in island if j != i)
            < min(distances[i][j] for j in ranks if j not in island)
            for island in islands
            for i in island
        )
    )
