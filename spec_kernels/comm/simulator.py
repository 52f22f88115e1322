"""A small discrete simulator of PCIe boxes: what an algorithm's transfers take on a box's links.

Concurrent transfers share every link that they cross max-min fairly (as a fluid); a transfer begins
when what it waits for has arrived, and arrives a latency after its last byte was sent. Everything
else that a call costs is one time a call and one a phase (``Costs``). Nothing here was measured by
this project: capacities are other people's measurements of their boxes (``boxes.json``), the rest
comes from published figures, and ``validation.py`` lays all of them beside what the model says.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files

from spec_kernels.comm.islands import islands_from
from spec_kernels.comm.islands import select as select_measurements
from spec_kernels.comm.p2p import FlowMeasurement, GpuId, LinkMeasurements
from spec_kernels.comm.schedules import Schedule, build
from spec_kernels.comm.topology import Topology

Flow = tuple[int, int, str]  # source, destination, "write" or "read" (a flag is a write)
Resource = tuple  # a directed edge, or a limit by another name
_UNLIMITED = float("inf")
_BYTES_A_US = 1e3  # in 1 GB/s


@dataclass(frozen=True)
class Costs:
    """What does not depend on the box. The defaults are published figures, none fitted to a point.

    Attributes:
        launch_us, phase_us: a call takes ``launch_us``, and each phase ``phase_us`` besides its
            links. Small messages take 7, 12 and 17 us with one, two and three phases: 5 us a phase,
            of which 1.09 us are a flag's latency across a root complex.
        flag_us, flag_root_us: from a store until a poller sees it, and what a root complex on the
            way adds (0.63-0.73 us below one switch, 1.06-1.12 us across).
        read_us, read_root_us: a remote load of 128 bytes, and what a root complex adds (0.71 us
            below one switch; 1.14-1.45 us across, depending on the box).
        fan_out_gb_s: what a GPU stores into two or more peers at once, all together.
        fan_in_gb_s: what a GPU loads from two or more peers at once (measured with three).
        port_gb_s: a gen5 x16 link, where a box says nothing else.
        cross_socket_gb_s: one pair of GPUs in different sockets (39-51), likewise.
        interconnect_gb_s: two sockets in one direction (three xGMI links), likewise.
    """

    launch_us: float = 2.0
    phase_us: float = 3.9
    flag_us: float = 0.68
    flag_root_us: float = 0.41
    read_us: float = 0.71
    read_root_us: float = 0.55
    fan_out_gb_s: float = 32.0
    fan_in_gb_s: float = 20.6
    port_gb_s: float = 53.0
    cross_socket_gb_s: float = 45.0
    interconnect_gb_s: float = 192.0


@dataclass(frozen=True, eq=False)
class Box:
    """A machine to simulate; ranks are its topology's.

    Attributes:
        name: for tables.
        topology: its tree.
        links_gb_s: capacity by kind of link: ``gpu_port`` (each GPU's own, and that of any link
            about which nothing is said), ``uplink`` (from a switch upwards),
            ``chip_fabric``, ``interconnect``, and ``cross_socket_pair``, which is no link but the
            most that one pair of GPUs in different sockets reaches.
        collapse_gb_s: what a switch's link to its root port carries while posted writes of two or
            more GPUs go through it to two or more root ports; None where that costs nothing.
        pair_gb_s: limits of single flows that bind besides the links.
        flag_us, read_us: latencies of (source, destination of data) where known; else ``costs``.
        measured: what the rest was made of, if anything was measured.
        costs: see ``Costs``.
    """

    name: str
    topology: Topology
    links_gb_s: Mapping[str, float] = field(default_factory=dict)
    collapse_gb_s: float | None = None
    pair_gb_s: Mapping[Flow, float] = field(default_factory=dict)
    flag_us: Mapping[tuple[int, int], float] = field(default_factory=dict)
    read_us: Mapping[tuple[int, int], float] = field(default_factory=dict)
    measured: LinkMeasurements | None = None
    costs: Costs = Costs()

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def island_size(self) -> int:
        """Ranks in each of its islands, 0 if it has none: measured first, labels second."""
        choice = islands_from(self.measured, self.topology)
        return len(choice.islands[0]) if choice.islands else 0

    @property
    def loads_measured(self) -> bool:
        """Whether anything is known of loads from peers."""
        flows = self.measured.flows if self.measured else []
        return any(kind == "read" for _, _, kind in self.pair_gb_s) or any(
            f.read is not None for f in flows
        )

    def select(self, ranks: Sequence[int]) -> Box:
        """The same machine with only ``ranks`` as ranks 0, 1, ..."""
        new = {old: rank for rank, old in enumerate(ranks)}

        def kept(table: Mapping) -> dict:
            return {
                (new[key[0]], new[key[1]], *key[2:]): value
                for key, value in table.items()
                if key[0] in new and key[1] in new
            }

        return replace(
            self,
            topology=self.topology.select(ranks),
            pair_gb_s=kept(self.pair_gb_s),
            flag_us=kept(self.flag_us),
            read_us=kept(self.read_us),
            measured=self.measured and select_measurements(self.measured, ranks),
        )

    @cached_property
    def _fabric(self) -> set[frozenset[str]]:
        return {frozenset(link.ends) for link in self.topology.links if link.kind == "chip_fabric"}

    @cached_property
    def _rates_of(self) -> dict[tuple[Flow, ...], tuple[float, ...]]:
        return {}

    def capacity(self, edge: tuple[str, str]) -> float:
        """GB/s of a directed edge.

        A figure for uplinks binds on the way up only: where both directions were measured, the way
        down took the port's full rate.
        """
        links = self.links_gb_s
        port = links.get("gpu_port", self.costs.port_gb_s)
        kinds = tuple(self.topology.vertex(name).kind for name in edge)
        if kinds == ("socket", "socket"):
            return links.get("interconnect", self.costs.interconnect_gb_s)
        if "socket" in kinds:
            return _UNLIMITED  # a root port's link is the one below it
        if frozenset(edge) in self._fabric:
            return links.get("chip_fabric", port)
        if _is_uplink(self.topology, edge):
            return links.get("uplink", port)
        if _is_uplink(self.topology, edge[::-1]):
            return max(port, links.get("uplink", port))
        return port

    def _kinds_passed(self, source: int, destination: int) -> list[str]:
        edges = self.topology.path(source, destination)
        return [self.topology.vertex(end).kind for _, end in edges]

    def latency_us(self, source: int, destination: int, kind: str) -> float:
        """From a word's leaving until its reader has it; of a read, half the round trip."""
        costs, kinds = self.costs, self._kinds_passed(source, destination)
        root = "root_port" in kinds or "socket" in kinds
        pair = (source, destination)
        if kind == "read":
            return self.read_us.get(pair, costs.read_us + costs.read_root_us * root) / 2
        return self.flag_us.get(pair, costs.flag_us + costs.flag_root_us * root)

    def constraints(
        self, flows: Sequence[Flow]
    ) -> tuple[dict[Resource, float], list[list[Resource]]]:
        """What limits ``flows`` that run at once: GB/s of each resource, and what each uses."""
        topology = self.topology
        peers: dict[Resource, set[int]] = defaultdict(set)
        uphill: dict[tuple[str, str], list[tuple[int, str | None]]] = defaultdict(list)
        uses: list[list[Resource]] = []
        gb_s: dict[Resource, float] = {}
        for source, destination, kind in flows:
            path = topology.path(source, destination)
            used: list[Resource] = list(path)
            for edge in path:
                gb_s[edge] = self.capacity(edge)
            issuer = ("loads", destination) if kind == "read" else ("stores", source)
            used.append(issuer)
            peers[issuer].add(source if kind == "read" else destination)
            pair = ("pair", source, destination, kind)
            limit = self.pair_gb_s.get((source, destination, kind), _UNLIMITED)
            if self._kinds_passed(source, destination).count("socket") > 1:
                across = self.links_gb_s.get("cross_socket_pair", self.costs.cross_socket_gb_s)
                limit = min(limit, across)
            if limit < _UNLIMITED:
                used.append(pair)
                gb_s[pair] = limit
            if kind == "write" and self.collapse_gb_s is not None:
                port = _last_port(topology, source, destination)
                for edge in path:
                    if _is_uplink(topology, edge) and topology.vertex(edge[1]).kind == "root_port":
                        uphill[edge].append((source, port))
            uses.append(used)
        for issuer, others in peers.items():
            many = self.costs.fan_in_gb_s if issuer[0] == "loads" else self.costs.fan_out_gb_s
            gb_s[issuer] = many if len(others) > 1 else _UNLIMITED
        for edge, writes in uphill.items():
            sources, ports = ({w[k] for w in writes} for k in (0, 1))
            if len(sources) > 1 and len(ports) > 1:
                gb_s[edge] = self.collapse_gb_s
        return gb_s, uses

    def rates(self, flows: Sequence[Flow]) -> tuple[float, ...]:
        """GB/s of each flow when all run at the same time: max-min fair."""
        key = tuple(flows)
        if key not in self._rates_of:
            self._rates_of[key] = _max_min(*self.constraints(key))
        return self._rates_of[key]

    @classmethod
    def from_topology(cls, topology: Topology, name: str = "this machine") -> Box:
        """A machine of which only the tree is known."""
        return cls(name, topology)

    @classmethod
    def from_measurements(
        cls,
        topology: Topology,
        measured: LinkMeasurements,
        name: str = "this machine",
        links_gb_s: Mapping[str, float] | None = None,
    ) -> Box:
        """A machine whose links were measured; what was not is as ``Costs`` says.

        Shown by flows that ran together: what an uplink carries (the most that went up through
        one), what a GPU can fan out and in, and the collapse of posted writes. ``links_gb_s`` are
        capacities that are known by other means and win.

        Raises:
            ValueError: the two do not have the same number of GPUs, or something moved nothing.
        """
        num = topology.num_ranks
        if len(measured.gpus) != num:
            raise ValueError(
                f"Box: measurements: expected {num} GPUs as in the topology, "
                f"got {len(measured.gpus)}"
            )
        pairs: dict[Flow, float] = {}
        flag_us: dict[tuple[int, int], float] = {}
        read_us: dict[tuple[int, int], float] = {}
        # What is measured as [issuer][peer] is kept by the way that data goes.
        for table, kind, matrix in (
            (pairs, "write", measured.pair_write_gb_s),
            (pairs, "read", measured.pair_read_gb_s),
            (flag_us, None, measured.flag_us),
            (read_us, "read", measured.read_128b_us),
        ):
            for i, row in enumerate(matrix):
                for j, value in enumerate(row):
                    if i != j and value is not None:
                        ends = (j, i) if kind == "read" else (i, j)
                        if value == 0:
                            raise ValueError(
                                f"Box: measurements: expected all above 0, got 0 for GPU {i} and "
                                f"GPU {j}"
                            )
                        table[(*ends, kind) if table is pairs else ends] = value
        links = dict(links_gb_s or {})
        alone = [rate for (_, _, kind), rate in pairs.items() if kind == "write"]
        if alone:
            links.setdefault("gpu_port", max(alone))
        if any(0 in (f.write, f.read) for f in measured.flows):
            raise ValueError("Box: measurements: expected flows above 0 GB/s, got 0")
        costs = Costs()
        seen = _Seen(topology, measured.flows)
        if seen.uplink is not None:
            links.setdefault("uplink", seen.uplink)
        if seen.fan_out is not None:
            costs = replace(costs, fan_out_gb_s=seen.fan_out)
        if seen.fan_in is not None:
            costs = replace(costs, fan_in_gb_s=seen.fan_in)
        uplink = links.get("uplink", links.get("gpu_port", costs.port_gb_s))
        collapse = seen.collapse
        if collapse is not None and collapse > uplink / 2:
            collapse = None  # such writes are carried like any others here
        return cls(name, topology, links, collapse, pairs, flag_us, read_us, measured, costs)

    @classmethod
    def from_entry(cls, entry: Mapping) -> Box:
        """From a box of ``boxes.json``: its stated links, and what its flows show besides."""
        topology = Topology.from_box(entry)
        links = {
            name: float(value)
            for name, value in entry["links_gb_s"].items()
            if name in ("gpu_port", "uplink", "chip_fabric", "cross_socket_pair")
        }
        if "xgmi" in entry["links_gb_s"]:
            links["interconnect"] = float(min(entry["links_gb_s"]["xgmi"]))
        gpus = [GpuId("", gpu.vertex) for gpu in topology.gpus]
        measured = LinkMeasurements(gpus, flows=flows_of(entry))
        return cls.from_measurements(topology, measured, entry["name"], links)


class _Seen:
    """What flows that ran together show of a machine; None where no set of them shows it."""

    def __init__(self, topology: Topology, flows: Iterable[FlowMeasurement]):
        self._topology = topology
        self.uplink = self.collapse = self.fan_out = self.fan_in = None
        for f in flows:
            ups = [self._ups(*pair) for pair in f.flows]
            shared = len(f.flows) > 1 and bool(set.intersection(*(set(up) for up in ups)))
            sources, destinations = ({pair[k] for pair in f.flows} for k in (0, 1))
            ports = {self._last_port(*pair) for pair in f.flows}
            if f.write is not None:
                if shared and len(sources) > 1 and len(ports) > 1:
                    self.collapse = min(f.write, self.collapse or f.write)
                elif shared and len(sources) > 1:
                    self.uplink = max(f.write, self.uplink or f.write)
                elif len(sources) == 1 and len(destinations) > 1 and not any(ups):
                    self.fan_out = min(f.write, self.fan_out or f.write)
            if f.read is not None and len(destinations) == 1 and len(sources) > 1 and not any(ups):
                self.fan_in = min(f.read, self.fan_in or f.read)

    def _ups(self, source: int, destination: int) -> list[tuple[str, str]]:
        return [
            e for e in self._topology.path(source, destination) if _is_uplink(self._topology, e)
        ]

    def _last_port(self, source: int, destination: int) -> str | None:
        return _last_port(self._topology, source, destination)


def _is_uplink(topology: Topology, edge: tuple[str, str]) -> bool:
    """From a switch towards the processor."""
    below = topology.vertex(edge[0])
    return below.kind == "switch" and below.parent == edge[1]


def _last_port(topology: Topology, source: int, destination: int) -> str | None:
    """The root port by which a transfer reaches its destination, if it passes one."""
    names = [end for _, end in topology.path(source, destination)]
    ports = [name for name in names if topology.vertex(name).kind == "root_port"]
    return ports[-1] if ports else None


def _max_min(
    gb_s: Mapping[Resource, float], uses: Sequence[Sequence[Resource]]
) -> tuple[float, ...]:
    """Rates that share each resource fairly, where no flow can have more but at a poorer's cost."""
    left = dict(gb_s)
    users: dict[Resource, set[int]] = defaultdict(set)
    for flow, used in enumerate(uses):
        for resource in used:
            users[resource].add(flow)
    rates = [0.0] * len(uses)
    waiting = set(range(len(uses)))
    while waiting:
        share, tightest = min(
            ((left[r] / len(flows), r) for r, flows in users.items() if flows), key=lambda x: x[0]
        )
        for flow in sorted(users[tightest]):
            rates[flow] = share
            waiting.discard(flow)
            for resource in uses[flow]:
                left[resource] -= share
                users[resource].discard(flow)
    return tuple(rates)


@dataclass(frozen=True)
class Run:
    """One simulated call: ``us`` until the last rank has its sum, and of each rank its own time."""

    us: float
    rank_us: tuple[float, ...]
    sent_us: tuple[float, ...]  # of each transfer: when its last byte left


def simulate(box: Box, schedule: Schedule, start_us: Sequence[float] | None = None) -> Run:
    """Runs ``schedule`` on ``box``, whose first ``schedule.num_ranks`` ranks take part.

    Args:
        start_us: when each rank's kernel is launched; 0 for all when None.

    Raises:
        ValueError: the box has fewer ranks than the schedule, or ``start_us`` not one for each.
    """
    num = schedule.num_ranks
    if num > box.num_ranks:
        raise ValueError(f"simulate: box {box.name} has {box.num_ranks} ranks, expected {num}")
    if start_us is not None and len(start_us) != num:
        raise ValueError(f"simulate: start_us: expected {num} times, got {len(start_us)}")
    costs, transfers = box.costs, schedule.transfers
    begun = [start + costs.launch_us for start in (start_us or [0.0] * num)]
    finished = list(begun)
    waits = [len(t.needs) + len(t.after) for t in transfers]
    ready = [begun[t.issuer] for t in transfers]
    needed_by: list[list[int]] = [[] for _ in transfers]
    behind: list[list[int]] = [[] for _ in transfers]
    for k, t in enumerate(transfers):
        for other in t.needs:
            needed_by[other].append(k)
        for other in t.after:
            behind[other].append(k)
    sent = [0.0] * len(transfers)
    coming = [
        (ready[k] + _issue_us(box, transfers[k]), k) for k, count in enumerate(waits) if count == 0
    ]
    heapq.heapify(coming)
    left: dict[int, float] = {}
    now = 0.0

    def release(k: int, time: float) -> None:
        ready[k] = max(ready[k], time)
        waits[k] -= 1
        if waits[k] == 0:
            heapq.heappush(coming, (ready[k] + _issue_us(box, transfers[k]), k))

    while coming or left:
        active = sorted(left)
        rates = box.rates([_flow(transfers[k]) for k in active])
        ends = [left[k] / (rate * _BYTES_A_US) for k, rate in zip(active, rates, strict=True)]
        step = min(ends, default=_UNLIMITED)
        if coming:
            step = min(step, max(0.0, coming[0][0] - now))
        now += step
        for k, rate, end in zip(active, rates, ends, strict=True):
            left[k] -= rate * _BYTES_A_US * step
            if end <= step * (1 + 1e-12):
                del left[k]
                sent[k] = now
                t = transfers[k]
                arrived = now + box.latency_us(t.source, t.destination, t.kind)
                for other in behind[k]:
                    release(other, arrived if t.kind == "read" else now)
                if t.kind != "flag":
                    arrived += costs.phase_us
                finished[t.source] = max(finished[t.source], now)
                finished[t.destination] = max(finished[t.destination], arrived)
                for other in needed_by[k]:
                    release(other, arrived)
        while coming and coming[0][0] <= now:
            _, k = heapq.heappop(coming)
            left[k] = float(transfers[k].num_bytes)
    return Run(max(finished), tuple(finished), tuple(sent))


def _flow(transfer) -> Flow:
    kind = "read" if transfer.kind == "read" else "write"
    return transfer.source, transfer.destination, kind


def _issue_us(box: Box, transfer) -> float:
    """Between a transfer's being due and its first byte: a read's request, a flag's fence.

    A fence waits until what was written before has landed: a round trip.
    """
    if transfer.kind == "write":
        return 0.0
    trip = 2 * box.latency_us(transfer.source, transfer.destination, "read")
    return trip if transfer.kind == "flag" else trip / 2


def predict_us(box: Box, algorithm: str, num_bytes: int, num_ranks: int, **options) -> float:
    """Microseconds of one call; ``options`` as for ``schedules.build``."""
    return simulate(box, build(algorithm, num_bytes, num_ranks, **options)).us


@cache
def entries() -> dict[str, dict]:
    """The described boxes by name, as they stand in ``boxes.json``."""
    text = files("spec_kernels.comm").joinpath("boxes.json").read_text()
    return {entry["name"]: entry for entry in json.loads(text)["boxes"]}


def boxes() -> dict[str, Box]:
    """All described boxes by name."""
    return {name: Box.from_entry(entry) for name, entry in entries().items()}


def flows_of(entry: Mapping) -> list[FlowMeasurement]:
    """The measured flows of a box of ``boxes.json``."""
    return [
        FlowMeasurement(tuple((s, d) for s, d in f["flows"]), f.get("write"), f.get("read"))
        for f in entry["flows_gb_s"]
    ]
