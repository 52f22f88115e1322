"""What Linux shows of the PCI tree under ``/sys`` and ``/proc``, as plain data.

Nothing is required to be there: containers hide parts, virtual machines have none. What cannot be
read is None, and ``Machine.unread`` says what that was. No file is written.

Sources: linux/Documentation/ABI/testing/sysfs-bus-pci and sysfs-kernel-iommu_groups (files),
drivers/pci/pci-sysfs.c (their text; without CAP_SYS_ADMIN only 64 bytes of configuration space),
include/uapi/linux/pci_regs.h (registers).
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([01][0-9a-f])\.([0-7])", re.IGNORECASE)
_HOST_BRIDGE = re.compile(r"pci([0-9a-f]{4,8}:[0-9a-f]{2})", re.IGNORECASE)
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?GT/s")

GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
PORT_TYPES = {
    0x0: "endpoint",
    0x1: "endpoint",
    0x4: "root_port",
    0x5: "upstream",
    0x6: "downstream",
    0x7: "bridge",
    0x8: "bridge",
    0x9: "endpoint",
}
NVIDIA = 0x10DE

_HEADER_BYTES = 64
_LEGACY_BYTES = 256
_EXTENDED_BYTES = 4096
_CAPABILITY_EXPRESS = 0x10
_EXTENDED_ACS = 0x000D
# The most capabilities that fit: every one is at least a 4-byte (in extended space 8-byte) header.
_MAX_CAPABILITIES = 48
_MAX_EXTENDED = 480


@dataclass(frozen=True)
class LinkEnd:
    """One end of a PCIe link: what runs now and what this end could do. None is unknown.

    Attributes:
        gen, max_gen: PCIe generation, 1 to 7.
        width, max_width: lanes.
    """

    gen: int | None = None
    width: int | None = None
    max_gen: int | None = None
    max_width: int | None = None


@dataclass(frozen=True)
class Acs:
    """Access Control Services of a port: the capability and the control register."""

    capability: int
    control: int

    BITS = {
        0x01: "source validation",
        0x02: "translation blocking",
        0x04: "request redirect",
        0x08: "completion redirect",
        0x10: "upstream forwarding",
        0x20: "egress control",
        0x40: "direct translated",
    }
    # Those that Linux clears for pci=disable_acs_redir=: they send peers' traffic up to the root.
    REDIRECTING = 0x04 | 0x08 | 0x20

    @property
    def enabled(self) -> tuple[str, ...]:
        return tuple(name for bit, name in self.BITS.items() if self.control & bit)

    @property
    def redirects(self) -> bool:
        return bool(self.control & self.REDIRECTING)


@dataclass(frozen=True)
class PciDevice:
    """A function of the PCI bus.

    Attributes:
        address: ``domain:bus:device.function``, lower case.
        parent: address of the bridge above; None directly below a host bridge, or if unknown.
        host_bridge: ``domain:bus`` of its host bridge; None if unknown.
        port_type: a value of ``PORT_TYPES``; None where configuration space is unreadable.
        config_bytes: how much of its configuration space could be read.
        acs: None if it has none, or if it cannot be read (``config_bytes`` tells which).
        is_virtual_function: SR-IOV; its physical function is another device.
    """

    address: str
    vendor: int | None = None
    device: int | None = None
    class_code: int | None = None
    parent: str | None = None
    host_bridge: str | None = None
    numa: int | None = None
    port_type: str | None = None
    link: LinkEnd = LinkEnd()
    config_bytes: int = 0
    acs: Acs | None = None
    iommu_group: str | None = None
    driver: str | None = None
    is_virtual_function: bool = False

    @property
    def ids(self) -> str:
        """``vendor:device``, as lspci prints it."""
        return ":".join("????" if x is None else f"{x:04x}" for x in (self.vendor, self.device))

    @property
    def is_bridge(self) -> bool:
        return self.class_code is not None and self.class_code >> 8 == 0x0604

    @property
    def is_display(self) -> bool:
        """VGA, 3D or other display controller (0x03), or processing accelerator (0x12)."""
        return self.class_code is not None and self.class_code >> 16 in (0x03, 0x12)

    @property
    def is_nvidia_gpu(self) -> bool:
        return self.vendor == NVIDIA and self.is_display and not self.is_virtual_function


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node and the processor package that holds it (None if unknown)."""

    number: int
    package: int | None


@dataclass(frozen=True)
class Iommu:
    """State of the IOMMU.

    Attributes:
        units: names under ``/sys/class/iommu``; empty if there is none, or it is off.
        group_types: default domain by group: ``DMA``, ``DMA-FQ``, ``identity``, ...; "" if unread.
        options: what the kernel's command line says of it, and of ACS.
        shown: whether the folders that would tell of it are there: with none, "off" is a guess.
    """

    units: tuple[str, ...] = ()
    group_types: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    shown: bool = False


@dataclass(frozen=True)
class Card:
    """What NVIDIA's kernel module tells of a GPU without NVML; "" is unknown."""

    uuid: str = ""
    name: str = ""


@dataclass(frozen=True)
class Machine:
    """Display devices with all bridges above them, and what else bears on peer access.

    Attributes:
        devices: by address.
        nodes: NUMA nodes.
        hypervisor: whether this is a virtual machine; None if unknown.
        driver: version of NVIDIA's kernel module, "" if it is not loaded (or not shown).
        registry: its ``RegistryDwords`` setting, by key.
        cards: the GPUs that it has, by address.
        has_pci: whether there is a PCI bus to look at.
        unread: files or links that gave nothing usable, and for how many devices.
    """

    devices: dict[str, PciDevice]
    nodes: tuple[NumaNode, ...] = ()
    iommu: Iommu = Iommu()
    hypervisor: bool | None = None
    driver: str = ""
    registry: dict[str, str] = field(default_factory=dict)
    cards: dict[str, Card] = field(default_factory=dict)
    has_pci: bool = True
    unread: tuple[str, ...] = ()

    def chain(self, address: str) -> tuple[PciDevice, ...]:
        """The bridges above a device, from the host bridge down, and the device itself."""
        up = [self.devices[address]]
        while (parent := up[-1].parent) is not None and all(d.address != parent for d in up):
            up.append(self.devices[parent])
        return tuple(reversed(up))

    @property
    def gpus(self) -> tuple[PciDevice, ...]:
        """NVIDIA's, by address."""
        return tuple(d for d in self.devices.values() if d.is_nvidia_gpu)


def normal_address(text: str) -> str | None:
    """``text`` as Linux writes a PCI address (NVML has eight digits of domain), or None."""
    found = ADDRESS.fullmatch(text.strip())
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def _order(address: str) -> tuple[int, str]:
    domain, rest = address.split(":", 1)
    return int(domain, 16), rest


def _bytes(path: Path, limit: int = 1 << 16) -> bytes | None:
    try:
        # A pipe in place of a file must not keep us waiting.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while limit > 0 and (part := os.read(fd, limit)):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(fd)


def printable(data: bytes) -> str:
    """Text for a terminal: what cannot be printed is a question mark, but for tabs and newlines."""
    text = data.decode("utf-8", "replace").strip()
    return "".join(c if c.isprintable() or c in "\t\n" else "?" for c in text)


def _text(path: Path) -> str | None:
    data = _bytes(path)
    return None if data is None else printable(data)


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _link_name(path: Path, folder: str) -> str | None:
    """The name in ``folder`` that a symbolic link points to."""
    try:
        parts = os.readlink(path).split("/")
    except OSError:
        return None
    return parts[-1] if len(parts) > 1 and parts[-2] == folder and parts[-1] else None


class _Reader:
    def __init__(self, sysfs: Path, proc: Path) -> None:
        self.sysfs, self.proc = sysfs, proc
        self.folder = sysfs / "bus/pci/devices"
        self.unread: Counter[str] = Counter()

    def number(self, address: str, name: str, base: int = 10) -> int | None:
        text = _text(self.folder / address / name)
        try:
            if text is not None:
                return int(text, base)
        except ValueError:
            pass  # counted below, with those that are not there
        self.unread[name] += 1
        return None

    def speed(self, address: str, name: str) -> int | None:
        found = _SPEED.match(_text(self.folder / address / name) or "")
        return GENERATIONS.get(float(found[1])) if found else None

    def width(self, address: str, name: str) -> int | None:
        text = _text(self.folder / address / name) or ""
        # 0: the link is down; 255: Linux does not know.
        return int(text) if re.fullmatch("[0-9]{1,2}", text) and 0 < int(text) <= 32 else None

    def above(self, address: str) -> tuple[list[str], str | None] | None:
        """Bridges from the root down and the host bridge, as the link of the device spells them."""
        try:
            target = os.readlink(self.folder / address)
        except OSError:
            return None
        parts = target.split("/")
        hosts = [k for k, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
        below = parts[hosts[-1] + 1 :] if hosts else parts
        bridges = [normal for part in below if (normal := normal_address(part))]
        if not bridges or bridges[-1] != address:
            return None
        host = _HOST_BRIDGE.fullmatch(parts[hosts[-1]]) if hosts else None
        return bridges[:-1], host[1].lower() if host else None

    def device(self, address: str, parent: str | None, host_bridge: str | None) -> PciDevice:
        place = self.folder / address
        numa = self.number(address, "numa_node")
        config = _bytes(place / "config", _EXTENDED_BYTES) or b""
        if len(config) < _HEADER_BYTES:
            self.unread["config"] += 1
        link = LinkEnd(
            self.speed(address, "current_link_speed"),
            self.width(address, "current_link_width"),
            self.speed(address, "max_link_speed"),
            self.width(address, "max_link_width"),
        )
        return PciDevice(
            address=address,
            vendor=self.number(address, "vendor", 16),
            device=self.number(address, "device", 16),
            class_code=self.number(address, "class", 16),
            parent=parent,
            host_bridge=host_bridge,
            numa=numa if numa is not None and numa >= 0 else None,
            port_type=port_type(config),
            link=link,
            config_bytes=len(config),
            acs=access_control(config),
            iommu_group=_link_name(place / "iommu_group", "iommu_groups"),
            driver=_link_name(place / "driver", "drivers"),
            is_virtual_function=os.path.lexists(place / "physfn"),
        )

    def tree(self) -> dict[str, PciDevice]:
        addresses = [a for name in _names(self.folder) if (a := normal_address(name)) == name]
        wanted = [a for a in addresses if self._class(a) in (0x03, 0x12)]
        by_bus = self._bridges_by_bus(addresses)
        places: dict[str, tuple[str | None, str | None]] = {}
        for address in wanted:
            told = self.above(address)
            if told is None:
                self.unread["place in the tree"] += 1
                told = self._climb(address, by_bus)
            bridges, host = told
            parent = None
            for each in [*bridges, address]:
                places.setdefault(each, (parent, host))
                parent = each
        return {a: self.device(a, *places[a]) for a in sorted(places, key=_order)}

    def _class(self, address: str) -> int | None:
        text = _text(self.folder / address / "class") or ""
        return int(text, 16) >> 16 if re.fullmatch("0x[0-9a-fA-F]{1,6}", text) else None

    def _bridges_by_bus(self, addresses: list[str]) -> dict[tuple[str, int], str]:
        found = {}
        for address in addresses:
            text = _text(self.folder / address / "secondary_bus_number") or ""
            if text.isdecimal() and text.isascii() and 0 < int(text) < 256:
                found[address.split(":")[0], int(text)] = address
        return found

    def _climb(
        self, address: str, by_bus: dict[tuple[str, int], str]
    ) -> tuple[list[str], str | None]:
        """Bridges above, by bus numbers: for trees whose links are missing or were copied away."""
        up = [address]
        while True:
            domain, bus, _ = up[0].split(":")
            bridge = by_bus.get((domain, int(bus, 16)))
            if bridge is None or bridge in up:
                break
            up.insert(0, bridge)
        # Only a bridge shows that what lies above it is the root.
        return up[:-1], f"{domain}:{bus}" if len(up) > 1 else None

    def nodes(self) -> tuple[NumaNode, ...]:
        found = []
        place = self.sysfs / "devices/system/node"
        for name in _names(place):
            if not re.fullmatch("node[0-9]{1,4}", name):
                continue
            package = None
            first = re.match("[0-9]+", _text(place / name / "cpulist") or "")
            if first:
                cpu = self.sysfs / f"devices/system/cpu/cpu{first[0]}"
                text = _text(cpu / "topology/physical_package_id") or ""
                package = int(text) if text.isdecimal() and text.isascii() else None
            found.append(NumaNode(int(name[4:]), package))
        return tuple(sorted(found, key=lambda node: node.number))

    def iommu(self, devices: dict[str, PciDevice]) -> Iommu:
        groups = sorted({d.iommu_group for d in devices.values() if d.iommu_group})
        options = (_text(self.proc / "cmdline") or "").split()
        keys = ("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "pcie_acs_override")
        telling = [
            option
            for option in options
            if option.split("=")[0] in keys or (option.startswith("pci=") and "acs" in option)
        ]
        types = {
            group: _text(self.sysfs / "kernel/iommu_groups" / group / "type") or ""
            for group in groups
        }
        places = self.sysfs / "class/iommu", self.sysfs / "kernel/iommu_groups"
        shown = any(os.path.isdir(place) for place in places)
        return Iommu(tuple(_names(places[0])), types, tuple(telling), shown)

    def hypervisor(self) -> bool | None:
        cpuinfo = _text(self.proc / "cpuinfo")
        found = re.search(r"^flags\s*:(.*)$", cpuinfo or "", re.MULTILINE)
        return None if found is None else "hypervisor" in found[1].split()

    def driver(self) -> tuple[str, dict[str, str]]:
        text = _text(self.proc / "driver/nvidia/version") or ""
        version = re.search(r"^NVRM version:.*?\b([0-9]{3,4}\.[0-9.]+)", text, re.MULTILINE)
        params = _text(self.proc / "driver/nvidia/params") or ""
        dwords = re.search(r'^RegistryDwords:\s*"?([^"\n]*)"?\s*$', params, re.MULTILINE)
        pairs = (pair.partition("=") for pair in (dwords[1] if dwords else "").split(";"))
        registry = {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
        return (version[1] if version else ""), registry

    def cards(self) -> dict[str, Card]:
        found = {}
        for name in _names(self.proc / "driver/nvidia/gpus"):
            text = _text(self.proc / "driver/nvidia/gpus" / name / "information") or ""
            told = {
                key: value.strip() for key, _, value in (x.partition(":") for x in text.split("\n"))
            }
            if address := normal_address(name):
                found[address] = Card(told.get("GPU UUID", ""), told.get("Model", ""))
        return found


def _capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """(id, offset) of each capability in the first 256 bytes."""
    if len(config) < _LEGACY_BYTES or not config[0x06] & 0x10:
        return
    offset = config[0x34] & 0xFC
    for _ in range(_MAX_CAPABILITIES):
        if offset < _HEADER_BYTES:
            return
        yield config[offset], offset
        offset = config[offset + 1] & 0xFC


def port_type(config: bytes) -> str | None:
    """What a PCIe function is, by its PCI Express capability; None without one, or if unread."""
    for number, offset in _capabilities(config):
        if number == _CAPABILITY_EXPRESS:
            return PORT_TYPES.get(config[offset + 2] >> 4)
    return None


def access_control(config: bytes) -> Acs | None:
    """The ACS capability in extended configuration space; None without one, or if unread."""
    offset = _LEGACY_BYTES
    for _ in range(_MAX_EXTENDED):
        if offset < _LEGACY_BYTES or offset + 8 > len(config):
            return None
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == _EXTENDED_ACS:
            return Acs(*struct.unpack_from("<HH", config, offset + 4))
        offset = header >> 20 & 0xFFC
    return None


def read_machine(sysfs: str | Path = "/sys") -> Machine:
    """Reads the tree below ``sysfs``, and what belongs to it below ``proc`` beside it.

    Another root than ``/sys`` is a recorded tree. Never raises for what the files hold or lack.
    """
    sysfs = Path(sysfs)
    reader = _Reader(sysfs, sysfs.parent / "proc")
    devices = reader.tree()
    version, registry = reader.driver()
    return Machine(
        devices=devices,
        nodes=reader.nodes(),
        iommu=reader.iommu(devices),
        hypervisor=reader.hypervisor(),
        driver=version,
        registry=registry,
        cards=reader.cards(),
        has_pci=os.path.isdir(reader.folder),
        unread=tuple(f"{name} ({count})" for name, count in sorted(reader.unread.items())),
    )
