"""What ``spec-kernels topology`` tells: a machine's GPUs, what joins them, and what to change.

Where a finding states what hardware, kernel or driver do, docs/allreduce.md ("Your box") names the
source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations

from spec_kernels.comm.islands import IslandChoice, fabric_from, islands_from, rank_order
from spec_kernels.comm.nvml import NvmlGpu, NvmlReading
from spec_kernels.comm.p2p import LinkMeasurements
from spec_kernels.comm.sysfs import LinkEnd, Machine, PciDevice
from spec_kernels.comm.topology import Gpu, Topology, Vertex, interconnect
from spec_kernels.comm.visible import visible_devices

# Of the JSON form: a higher number may lack or rename fields; new ones may come at any time.
SCHEMA = 1
UNKNOWN_SOCKET = "socket_unknown"
_FULL_CONFIG_BYTES = 4096


@dataclass(frozen=True)
class Finding:
    """Something to look at.

    Attributes:
        kind: a stable name for programs.
        level: ``problem`` (costs speed or correctness) or ``note``.
        where: PCI addresses, or pairs of ranks, that it is about.
        what: what was found, and why it matters.
        todo: what to do; "" if nothing.
        command: a line to give to a shell, or to add where ``todo`` says; "" if none.
    """

    kind: str
    level: str
    where: tuple[str, ...]
    what: str
    todo: str = ""
    command: str = ""


@dataclass(frozen=True)
class LinkState:
    """A link seen from its lower end. None is unknown.

    Attributes:
        gen, width: now.
        possible_gen, possible_width: what both ends can do.
        device_gen: what the lower end alone could do.
    """

    gen: int | None = None
    width: int | None = None
    possible_gen: int | None = None
    possible_width: int | None = None
    device_gen: int | None = None

    @property
    def slow(self) -> bool:
        return None not in (self.gen, self.possible_gen) and self.gen < self.possible_gen

    @property
    def narrow(self) -> bool:
        return None not in (self.width, self.possible_width) and self.width < self.possible_width

    def __str__(self) -> str:
        now = _link_text(self.gen, self.width)
        more = [f"gen{self.possible_gen}"] if self.slow else []
        more += [f"x{self.possible_width}"] if self.narrow else []
        return f"{now}, can {' '.join(more)}" if more else now


@dataclass(frozen=True)
class ListedGpu:
    """A GPU of the machine, a rank or not.

    Attributes:
        rank: place among the chosen ones; None if it is not one of them.
        index: number by the driver; None if the driver does not have it.
        state: why it cannot be a rank; "" if it can.
    """

    rank: int | None
    index: int | None
    uuid: str
    pci: str
    name: str
    numa: int | None
    link: LinkState
    performance_state: int | None
    iommu_group: str | None
    driver: str
    state: str


@dataclass(frozen=True)
class Report:
    """All that the command prints."""

    machine: Machine
    nvml: NvmlReading
    topology: Topology
    gpus: tuple[ListedGpu, ...]
    links: dict[str, LinkState]
    others: tuple[PciDevice, ...]
    choice: IslandChoice
    order: tuple[int, ...]
    findings: tuple[Finding, ...]
    sysfs: str

    @property
    def ranks(self) -> tuple[ListedGpu, ...]:
        chosen = (g for g in self.gpus if g.rank is not None)
        return tuple(sorted(chosen, key=lambda g: g.rank or 0))

    def as_dict(self) -> dict:
        """The JSON form; ``schema`` counts up when a field is renamed or goes."""
        machine, nvml = self.machine, self.nvml
        return {
            "schema": SCHEMA,
            "sources": {
                "sysfs": self.sysfs,
                "nvml": nvml.absent or "read",
                "driver": nvml.driver or machine.driver,
                "unread": list(machine.unread),
            },
            "gpus": [asdict(g) for g in self.gpus],
            "ports": [
                {
                    "address": d.address,
                    "ids": d.ids,
                    "parent": d.parent,
                    "host_bridge": d.host_bridge,
                    "numa": d.numa,
                    "port_type": d.port_type,
                    "link": asdict(self.links[d.address]),
                    "acs": None
                    if d.acs is None
                    else {"enabled": list(d.acs.enabled), "redirects": d.acs.redirects},
                }
                for d in machine.devices.values()
                if d.is_bridge
            ],
            "topology": self.topology.as_dict(),
            "labels": [list(row) for row in self.topology.labels()],
            "p2p": None
            if nvml.absent
            else {
                "gpus": [g.uuid for g in nvml.gpus],
                "read": [list(row) for row in nvml.p2p_read],
                "write": [list(row) for row in nvml.p2p_write],
            },
            "iommu": {"state": iommu_state(machine), **asdict(machine.iommu)},
            "hypervisor": machine.hypervisor,
            "registry": machine.registry,
            "islands": {
                "ranks": [list(island) for island in self.choice.islands],
                "source": self.choice.source,
                "reason": self.choice.reason,
            },
            "rank_order": list(self.order),
            "findings": [asdict(f) for f in self.findings],
        }


def _least(*values: int | None) -> int | None:
    return min((v for v in values if v is not None), default=None)


def _link_text(gen: int | None, width: int | None) -> str:
    if gen is None and width is None:
        return "link unknown"
    return f"gen{'?' if gen is None else gen} x{'?' if width is None else width}"


def link_state(device: PciDevice, above: PciDevice | None, nvml: NvmlGpu | None) -> LinkState:
    """The link between a device and the port above it, from both ends and from the driver."""
    low, high = device.link, above.link if above is not None else LinkEnd()
    told = nvml or NvmlGpu(0, "", "", "")

    def first(*values: int | None) -> int | None:
        return next((v for v in values if v is not None), None)

    return LinkState(
        gen=first(low.gen, high.gen, told.gen),
        width=first(low.width, high.width, told.width),
        possible_gen=_least(low.max_gen, high.max_gen, told.max_gen),
        possible_width=_least(low.max_width, high.max_width, told.max_width),
        device_gen=first(low.max_gen, told.gpu_max_gen),
    )


def iommu_state(machine: Machine) -> str:
    """``off``, ``translating``, ``passthrough``, ``mixed`` or ``unknown``, for the GPUs' groups."""
    groups = {d.iommu_group for d in machine.gpus if d.iommu_group is not None}
    if not groups:
        told = machine.gpus and machine.iommu.shown and not machine.iommu.units
        return "off" if told else "unknown"
    types = {machine.iommu.group_types.get(group, "") for group in groups}
    if types == {"identity"}:
        return "passthrough"
    if all(kind.startswith("DMA") for kind in types):
        return "translating"
    return "unknown" if "" in types else "mixed"


def _roles(bridges: Sequence[PciDevice]) -> Iterator[str]:
    """What each bridge of a chain is: its own word for it, else by its place.

    Below a root port, or a downstream port, comes the upstream port of a switch; below that, one
    of its downstream ports.
    """
    role = ""
    for k, bridge in enumerate(bridges):
        if bridge.port_type in ("root_port", "upstream", "downstream", "bridge"):
            role = bridge.port_type
        elif k == 0:
            role = "root_port"
        else:
            role = "downstream" if role == "upstream" else "upstream"
        yield role


def topology_of(machine: Machine, nvml: NvmlReading, ranks: Sequence[Gpu]) -> Topology:
    """The tree above all GPUs of the machine, with ``ranks`` as its ranks.

    A GPU that the driver has but ``/sys`` does not show hangs below ``socket_unknown``.
    """
    vertices: dict[str, Vertex] = {}
    packages = {node.number: node.package for node in machine.nodes}

    def numa_of(chain: Sequence[PciDevice]) -> int | None:
        known = next((d.numa for d in reversed(chain) if d.numa is not None), None)
        return next(iter(packages)) if known is None and len(packages) == 1 else known

    def socket(numa: int | None) -> str:
        package = packages.get(numa) if numa is not None else None
        if package is None and numa is None and len(set(packages.values())) == 1:
            package = next(iter(packages.values()))
        if package is not None:
            name = f"socket{package}"
        else:
            name = UNKNOWN_SOCKET if numa is None else f"socket_of_node{numa}"
        held = {n for n, p in packages.items() if p == package} if package is not None else {numa}
        node = next(iter(held)) if len(held) == 1 else None
        vertices.setdefault(name, Vertex(name, "socket", None, node))
        return name

    def hang(address: str) -> None:
        chain = machine.chain(address) if address in machine.devices else ()
        numa = numa_of(chain)
        bridges = [d for d in chain[:-1] if d.address != address and not d.is_nvidia_gpu]
        above = socket(numa)
        before = ""
        for bridge, role in zip(bridges, _roles(bridges), strict=True):
            at_top = vertices[above].kind == "socket"
            if role == "downstream" and before == "upstream":
                before = role
                continue  # a port of the switch above, which is one vertex
            before = role
            kind = "root_port" if at_top and role == "root_port" else "switch"
            host = bridge.host_bridge if at_top else None
            vertices.setdefault(bridge.address, Vertex(bridge.address, kind, above, numa, host))
            above = bridge.address
        at_top = vertices[above].kind == "socket"
        host = chain[-1].host_bridge if chain and at_top else None
        vertices[address] = Vertex(address, "gpu", above, numa, host)

    for address in dict.fromkeys([*(d.address for d in machine.gpus), *(g.pci for g in ranks)]):
        hang(address)
    sockets = [v.name for v in vertices.values() if v.kind == "socket"]
    places = {gpu.pci: k for k, gpu in enumerate(nvml.gpus)}
    told = ()
    if ranks and all(gpu.pci in places for gpu in ranks):
        at = [places[gpu.pci] for gpu in ranks]
        told = tuple(tuple(nvml.labels[i][j] for j in at) for i in at)
    return Topology(
        tuple(vertices.values()), tuple(ranks), tuple(interconnect(sorted(sockets))), told
    )


def make_report(
    machine: Machine,
    nvml: NvmlReading,
    devices: str | None = None,
    measurements: LinkMeasurements | None = None,
    sysfs: str = "/sys",
) -> Report:
    """Puts together what was read.

    Args:
        devices: which GPUs are ranks, as ``CUDA_VISIBLE_DEVICES`` has it. One that cannot be a rank
            is left out, and a finding says why.
        measurements: of these ranks, in this order.

    Raises:
        ValueError: ``devices`` names what is not there; measurements of other GPUs.
    """
    listed = _listed(machine, nvml)
    numbered = numbered_gpus(machine, nvml)
    chosen = [numbered[k] for k in visible_devices(devices, numbered)]
    chosen = [g for g in chosen if not g.state]
    rank_of = {g.pci: rank for rank, g in enumerate(chosen)}
    gpus = tuple(replace(g, rank=rank_of.get(g.pci)) for g in listed)
    topology = topology_of(
        machine,
        nvml,
        [
            Gpu(g.pci, rank if g.index is None else g.index, g.uuid, g.pci, g.name)
            for rank, g in enumerate(chosen)
        ],
    )
    if measurements is not None:
        topology = fabric_from(measurements, topology)
    links = {
        d.address: link_state(d, machine.devices.get(d.parent or ""), None)
        for d in machine.devices.values()
    }
    links |= {g.pci: g.link for g in gpus}
    choice = islands_from(measurements, topology)
    order = rank_order(topology, measurements)
    draft = Report(
        machine=machine,
        nvml=nvml,
        topology=topology,
        gpus=gpus,
        links=links,
        others=tuple(d for d in machine.devices.values() if d.is_display and not d.is_nvidia_gpu),
        choice=choice,
        order=order,
        findings=(),
        sysfs=sysfs,
    )
    return replace(draft, findings=tuple(_findings(draft)))


def numbered_gpus(machine: Machine, nvml: NvmlReading) -> list[ListedGpu]:
    """What a number in ``CUDA_VISIBLE_DEVICES`` counts: the driver's GPUs, else the usable ones."""
    listed = _listed(machine, nvml)
    return [g for g in listed if (not g.state if nvml.absent else g.index is not None)]


def _listed(machine: Machine, nvml: NvmlReading) -> list[ListedGpu]:
    """The driver's GPUs in its order, then those that only the PCI bus shows."""
    told = {gpu.pci: gpu for gpu in nvml.gpus}
    found = []
    for pci in dict.fromkeys([*told, *(d.address for d in machine.gpus)]):
        device, gpu = machine.devices.get(pci), told.get(pci)
        above = machine.devices.get(device.parent or "") if device else None
        card = machine.cards.get(pci)
        driver = (device.driver or "") if device else ""
        state = ""
        if gpu is not None and gpu.mig:
            state = "split into MIG devices"
        elif gpu is None and driver not in ("", "nvidia"):
            state = f"held by {driver}"
        elif gpu is None and not nvml.absent:
            state = "not shown by the driver"
        found.append(
            ListedGpu(
                rank=None,
                index=gpu.index if gpu else None,
                uuid=gpu.uuid if gpu else (card.uuid if card else ""),
                pci=pci,
                name=gpu.name if gpu else (card.name if card else ""),
                numa=device.numa if device else None,
                link=link_state(device or PciDevice(pci), above, gpu),
                performance_state=gpu.performance_state if gpu else None,
                iommu_group=device.iommu_group if device else None,
                driver=driver,
                state=state,
            )
        )
    return found


# Findings


def _findings(report: Report) -> Iterator[Finding]:
    for problem in report.nvml.problems:
        yield Finding("nvml", "problem", (), problem)
    yield from _merged(_unusable(report))
    yield from _merged(_link_findings(report))
    if len(report.ranks) > 1:
        yield from _peer_findings(report)
        yield from _acs_findings(report)
        yield from _iommu_findings(report)
        yield from _place_findings(report)


def _unusable(report: Report) -> Iterator[Finding]:
    for g in report.gpus:
        if g.state.startswith("split"):
            yield Finding(
                "mig",
                "problem",
                (g.pci,),
                "GPUs split into MIG devices, which have no peer access: they cannot be ranks.",
                "switch MIG off (nvidia-smi -i GPU -mig 0, as root)",
            )
        elif g.state:
            yield Finding("not_usable", "note", (g.pci,), f"GPUs {g.state}: no ranks.")


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings that differ only in where they are, as one."""
    places: dict[Finding, list[str]] = {}
    for f in findings:
        places.setdefault(replace(f, where=()), []).extend(f.where)
    for f, where in places.items():
        yield replace(f, where=tuple(where))


def _link_findings(report: Report) -> Iterator[Finding]:
    state_of = {g.pci: g.performance_state for g in report.gpus}
    for address, link in report.links.items():
        is_gpu = address in state_of
        if not is_gpu and not report.machine.devices[address].is_bridge:
            continue
        if link.slow or link.narrow:
            state = state_of.get(address)
            # GPUs compute in P0 to P2; switches do not idle.
            busy = not is_gpu or (state is not None and state <= 2)
            level = "problem" if busy or link.narrow else "note"
            yield Finding(
                "link_below",
                level,
                (address,),
                f"{'GPUs' if is_gpu else 'Ports'} whose link runs at "
                f"{_link_text(link.gen, link.width)}, though both ends can do "
                f"{_link_text(link.possible_gen, link.possible_width)}."
                + ("" if busy else " An idle GPU lowers its link: look again while it works."),
                "reseat the card, look at riser, cable and the slot's setting in the firmware"
                if level == "problem"
                else "",
            )
        gens = link.device_gen, link.possible_gen
        if is_gpu and None not in gens and gens[0] > gens[1]:
            what = f"GPUs that could do gen{gens[0]}, in slots that do gen{gens[1]}."
            yield Finding("slot_below", "note", (address,), what)


_P2P_ADVICE = {
    "chipset not supported": (
        "The driver refuses this platform. Its registry key ForceP2P (0x11: reads and writes) "
        "overrides that; NVIDIA keeps it for internal tests, so verify peer access with data. In "
        "/etc/modprobe.d, then load the module anew:",
        'options nvidia NVreg_RegistryDwords="ForceP2P=0x11"',
    ),
    "disabled by a driver setting": (
        "ForceP2P among the RegistryDwords of /proc/driver/nvidia/params may forbid it",
        "",
    ),
    "GPU not supported": ("NVIDIA's driver offers no peer access on this model", ""),
}


def peer_states(report: Report) -> dict[str, list[str]]:
    """By state, the pairs of ranks that have it, for reading or writing; "ok" only if for both."""
    nvml = report.nvml
    place = {gpu.pci: k for k, gpu in enumerate(nvml.gpus)}
    ranks = [(g.rank, place[g.pci]) for g in report.ranks if g.pci in place]
    found: dict[str, list[str]] = {}
    for (a, i), (b, j) in permutations(ranks, 2):
        states = {nvml.p2p_read[i][j], nvml.p2p_write[i][j]}
        for state in sorted(states - {"ok"}) or ["ok"]:
            found.setdefault(state, []).append(f"{a}-{b}")
    return found


def _peer_findings(report: Report) -> Iterator[Finding]:
    count = len(report.ranks) * (len(report.ranks) - 1)
    for state, pairs in sorted(peer_states(report).items()):
        where = tuple(pairs) if len(pairs) < count else ()
        many = f"{len(pairs)} pairs of ranks" if where else f"all {count} pairs of ranks"
        if state == "?":
            yield Finding("p2p_unknown", "note", where, f"NVML says nothing of {many}.")
        elif state != "ok":
            yield Finding(
                "p2p_refused",
                "problem",
                where,
                f"The driver gives no peer access to {many}: {state}. What one GPU stores for "
                "another is then staged through host memory.",
                *_P2P_ADVICE.get(state, ("", "")),
            )


def _acs_findings(report: Report) -> Iterator[Finding]:
    """ACS of switch ports below the place where two ranks' ways meet."""
    machine = report.machine
    chains = {g.rank: machine.chain(g.pci)[:-1] for g in report.ranks if g.pci in machine.devices}
    redirecting: dict[str, list[str]] = {}
    hidden: set[str] = set()
    for a, up_a in chains.items():
        for b, up_b in chains.items():
            if a == b or not up_a or not up_b or up_a[0] is not up_b[0]:
                continue
            shared = {d.address for d in up_b}
            for bridge, role in zip(up_a, _roles(up_a), strict=True):
                if bridge.address in shared or role != "downstream":
                    continue
                if bridge.config_bytes < _FULL_CONFIG_BYTES:
                    hidden.add(bridge.address)
                elif bridge.acs is not None and bridge.acs.redirects:
                    redirecting.setdefault(bridge.address, []).append(f"{a}-{b}")
    if redirecting:
        ports = sorted(redirecting)
        yield Finding(
            "acs_redirect",
            "problem",
            tuple(ports),
            "Access control (ACS) of these switch ports redirects what one GPU sends another: it "
            "goes up to the root complex and back through the switch's one uplink, instead of "
            "across the switch.",
            "the host decides: ask for it to be off between these GPUs"
            if machine.hypervisor
            else "unless virtual machines here rely on it for isolation, clear it as root until "
            "the next boot (for good: the kernel option pci=disable_acs_redir, or the firmware):",
            ""
            if machine.hypervisor
            else f"for p in {' '.join(ports)}; do setpci -s $p ECAP_ACS+0x6.w=0; done",
        )
    if hidden:
        sizes = {machine.devices[port].config_bytes for port in hidden}
        yield Finding(
            "acs_unread",
            "note",
            tuple(sorted(hidden)),
            "Access control (ACS) of these switch ports cannot be read: it may redirect traffic "
            "between GPUs to the root complex.",
            "run this as root, outside a container" if max(sizes) <= 64 else "",
        )


def _iommu_findings(report: Report) -> Iterator[Finding]:
    machine = report.machine
    state = iommu_state(machine)
    where = tuple(g.pci for g in report.ranks)
    if machine.hypervisor:
        yield Finding(
            "virtual_machine",
            "note",
            (),
            "This is a virtual machine: whether GPUs reach each other is decided by the host, and "
            "the tree seen here need not be the real one.",
        )
    elif state in ("translating", "mixed"):
        yield Finding(
            "iommu_translating",
            "problem",
            where,
            "The IOMMU translates what GPUs send each other. NVIDIA does not support peer access "
            "so on bare metal and warns of silently corrupted memory.",
            "switch it off (boot with amd_iommu=off or intel_iommu=off, or in the firmware), or at "
            "least boot with iommu=pt, and verify peer access with data",
        )
    elif state == "passthrough":
        yield Finding(
            "iommu_passthrough",
            "note",
            where,
            "The IOMMU is on and passes addresses through (identity). NVIDIA asks for it to be off "
            "on bare metal; with passthrough, verify peer access with data.",
        )
    elif state == "unknown":
        yield Finding("iommu_unknown", "note", where, "The state of the IOMMU cannot be read.")


def _place_findings(report: Report) -> Iterator[Finding]:
    machine, topology = report.machine, report.topology
    lost = tuple(
        g.pci for g in report.ranks if topology.ancestors(g.rank or 0)[-1].name == UNKNOWN_SOCKET
    )
    if lost and len(machine.nodes) != 1:
        yield Finding(
            "place_unknown",
            "note",
            lost,
            "Neither NUMA node nor socket of these GPUs can be read (firmware or container).",
        )
    differ = [
        f"{i}-{j}: {topology.common(i, j)}, not {topology.derived(i, j)}"
        for i in range(topology.num_ranks)
        for j in range(i)
        if topology.common(i, j) != topology.derived(i, j)
    ]
    if differ and not lost:
        yield Finding(
            "labels_differ",
            "note",
            tuple(differ),
            "The driver's labels of these pairs are not those of the tree under /sys. The "
            "driver's are used.",
        )
    if report.order != tuple(range(topology.num_ranks)):
        ranks = [report.ranks[rank] for rank in report.order]
        named = all(g.uuid for g in ranks)
        uuids = ",".join(short_names([g.uuid for g in ranks]))
        yield Finding(
            "rank_order",
            "problem",
            (),
            "In this order of ranks islands are not contiguous, which the hierarchical algorithms "
            "need.",
            "number them in this order"
            + (":" if named else f": {', '.join(g.pci for g in ranks)}"),
            f"export CUDA_VISIBLE_DEVICES={uuids}" if named else "",
        )
    kinds = {g.name for g in report.ranks}
    if len(kinds) > 1:
        yield Finding(
            "models_differ",
            "note",
            (),
            "The ranks' GPUs are of different models: CUDA numbers devices fastest first unless "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, so name them by UUID.",
        )


def short_names(names: Sequence[str]) -> list[str]:
    """UUIDs cut to eight digits, as CUDA allows, if they stay apart."""
    cut = [name[:12] if name.startswith("GPU-") else name for name in names]
    return cut if len(set(cut)) == len(cut) else list(names)
