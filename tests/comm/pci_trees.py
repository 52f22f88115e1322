"""Writes trees like ``/sys`` and ``/proc`` from a description, for tests that read them.

Addresses, multi-level bridges and files are laid out as Linux does: devices below
``sys/devices/pciDDDD:BB``, links to them from ``sys/bus/pci/devices``.
"""

import os
import struct
from pathlib import Path

GPU_NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
PORTS = {"endpoint": 0, "root_port": 4, "upstream": 5, "downstream": 6, "bridge": 7}
# Request, completion and upstream redirection with source validation, as a kernel with an IOMMU
# switches them on.
ACS_ON = 0x1D


def config_space(port, acs=None, size=4096):
    """Configuration space with a PCI Express capability, AER, and ACS where ``acs`` is its control.

    ``size`` as the reader may see it: 64 without rights, 256 without extended space.
    """
    data = bytearray(4096)
    struct.pack_into("<H", data, 0x06, 0x0010)
    data[0x34] = 0x40
    data[0x40:0x42] = 0x01, 0x68  # power management, then
    data[0x68:0x6A] = 0x10, 0x00  # PCI Express
    struct.pack_into("<H", data, 0x6A, PORTS[port] << 4 | 2)
    struct.pack_into("<I", data, 0x100, 0x148 << 20 | 2 << 16 | 0x0001)
    struct.pack_into("<I", data, 0x148, (0x200 << 20 if acs is not None else 0) | 1 << 16 | 0x0003)
    if acs is not None:
        struct.pack_into("<IHH", data, 0x200, 1 << 16 | 0x000D, 0x5F, acs)
    return bytes(data[:size])


def gpu_uuid(rank):
    return f"GPU-{0x1A2B0000 + rank:08x}-c0de-4bad-9bad-{rank:012x}"


class Tree:
    """A tree below ``root``, grown by calls."""

    def __init__(self, root, num_nodes=1, nodes_of_package=1, iommu="off", cmdline="quiet"):
        self.root = Path(root)
        self.sys, self.proc = self.root / "sys", self.root / "proc"
        self.iommu, self.groups = iommu, 0
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        (self.sys / "class/iommu").mkdir(parents=True)
        self.proc.mkdir()
        self.write(self.proc / "cmdline", cmdline)
        self.write(self.proc / "cpuinfo", "processor\t: 0\nflags\t\t: fpu avx2\n\n")
        if iommu != "off":
            (self.sys / "class/iommu/ivhd0").mkdir()
        for node in range(num_nodes):
            self.write(self.sys / f"devices/system/node/node{node}/cpulist", f"{8 * node}-7")
            self.write(
                self.sys / f"devices/system/cpu/cpu{8 * node}/topology/physical_package_id",
                node // nodes_of_package,
            )

    @staticmethod
    def write(path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    def host_bridge(self, bus, domain=0):
        place = self.sys / f"devices/pci{domain:04x}:{bus:02x}"
        place.mkdir(parents=True)
        return place

    def device(
        self,
        above,
        address,
        *,
        ids=(0x1022, 0x14AB),
        class_code=0x060400,
        numa=0,
        port="endpoint",
        acs=None,
        link=(5, 16, 5, 16),
        buses=None,
        config_size=4096,
        driver=None,
    ):
        """One function below the folder ``above``; returns its folder.

        ``link``: generation and width now, and at most; None: no such files.
        ``buses``: secondary and subordinate bus of a bridge.
        """
        place = above / address
        place.mkdir()
        self.write(place / "vendor", f"0x{ids[0]:04x}")
        self.write(place / "device", f"0x{ids[1]:04x}")
        self.write(place / "class", f"0x{class_code:06x}")
        self.write(place / "numa_node", numa)
        if link is not None:
            gen, width, max_gen, max_width = link
            self.write(place / "current_link_speed", f"{SPEEDS[gen]} GT/s PCIe")
            self.write(place / "current_link_width", width)
            self.write(place / "max_link_speed", f"{SPEEDS[max_gen]} GT/s PCIe")
            self.write(place / "max_link_width", max_width)
        if buses is not None:
            self.write(place / "secondary_bus_number", buses[0])
            self.write(place / "subordinate_bus_number", buses[1])
        (place / "config").write_bytes(config_space(port, acs, config_size))
        if driver is not None:
            folder = self.sys / "bus/pci/drivers" / driver
            folder.mkdir(parents=True, exist_ok=True)
            (place / "driver").symlink_to(os.path.relpath(folder, place))
        if self.iommu != "off":
            group = self.sys / f"kernel/iommu_groups/{self.groups}"
            self.groups += 1
            self.write(group / "type", self.iommu)
            (place / "iommu_group").symlink_to(os.path.relpath(group, place))
        shown = self.sys / "bus/pci/devices"
        (shown / address).symlink_to(os.path.relpath(place, shown))
        return place

    def gpu(self, above, address, rank=None, **how):
        """A GPU with its audio function; idle unless ``link`` says otherwise."""
        how = {"driver": "nvidia", "link": (1, 16, 5, 16)} | how
        place = self.device(above, address, ids=(0x10DE, 0x2BB1), class_code=0x030200, **how)
        self.device(
            above,
            address[:-1] + "1",
            ids=(0x10DE, 0x22E8),
            class_code=0x040300,
            numa=how.get("numa", 0),
            driver="snd_hda_intel",
        )
        if rank is not None:
            text = f"Model: \t\t {GPU_NAME}\nIRQ:   \t\t 150\nGPU UUID: \t {gpu_uuid(rank)}"
            self.write(self.proc / f"driver/nvidia/gpus/{address}/information", text)
        return place

    def kernel_module(self, version="580.82.07", registry=""):
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build"
        self.write(self.proc / "driver/nvidia/version", text)
        self.write(
            self.proc / "driver/nvidia/params", f'EnableMSI: 1\nRegistryDwords: "{registry}"'
        )

    def clutter(self, above, bus, numa=0):
        """What else a server has: a BMC's display, an NVMe drive behind its own root port."""
        self.device(
            above, f"0000:{bus:02x}:03.1", port="root_port", numa=numa, buses=(bus + 14, bus + 14)
        )
        drive = above / f"0000:{bus:02x}:03.1"
        ids = (0x144D, 0xA80A)
        self.device(drive, f"0000:{bus + 14:02x}:00.0", ids=ids, class_code=0x010802, numa=numa)
        ids = (0x1A03, 0x2000)
        self.device(
            above, f"0000:{bus:02x}:04.0", ids=ids, class_code=0x030000, numa=numa, link=None
        )


# Bus of the host bridge above each root port; ports of one bridge are its devices 1.1, 2.1, ...
HOST_BUSES = {
    "root_port_10": 0x10,
    "root_port_70": 0x70,
    "root_port_80": 0x80,
    "root_port_f0": 0xE0,
    "root_port_a": 0x20,
    "root_port_b": 0xA0,
}
SWITCH_IDS = {"vs": (0x1000, 0xC030), "sw": (0x11F8, 0x4152), "ro": (0x11F8, 0x4152)}


class _Box:
    def __init__(self, tree, box, gpu_how, downstream_acs, config_size):
        self.tree, self.box = tree, box
        self.gpu_how, self.downstream_acs, self.config_size = gpu_how, downstream_acs, config_size
        self.addresses, self.next_bus = {}, 0

    def bus(self):
        self.next_bus += 1
        return self.next_bus

    def content(self, above, bus, content, numa):
        """Below a port whose secondary bus is ``bus``: one GPU, or one switch."""
        if isinstance(content, list):
            (gpu,) = content
            self.endpoint(above, f"0000:{bus:02x}:00.0", int(gpu.removeprefix("gpu")), numa)
            return
        ((name, below),) = content.items()
        self.switch(above, bus, name, below, numa)

    def endpoint(self, above, address, rank, numa):
        self.addresses[rank] = address
        how = {"config_size": self.config_size} | self.gpu_how(rank)
        self.tree.gpu(above, address, rank, numa=numa, **how)

    def switch(self, above, bus, name, below, numa):
        ids = SWITCH_IDS.get(name[:2], (0x11F8, 0x4128))
        how = {"ids": ids, "numa": numa, "config_size": self.config_size}
        inner = self.bus()
        upstream = self.tree.device(
            above, f"0000:{bus:02x}:00.0", port="upstream", buses=(inner, inner + 9), **how
        )
        self.addresses[name] = f"0000:{bus:02x}:00.0"
        parts = [[gpu] for gpu in below] if isinstance(below, list) else None
        parts = parts or [{inner_name: content} for inner_name, content in below.items()]
        for k, part in enumerate(parts):
            secondary = self.bus()
            address = f"0000:{inner:02x}:{4 * k:02x}.0"
            port = self.tree.device(
                upstream,
                address,
                port="downstream",
                acs=self.downstream_acs,
                buses=(secondary, secondary + 4),
                **how,
            )
            self.content(port, secondary, part, numa)

    def grow(self):
        """Root ports of one host bridge: those that PHB joins in the labels."""
        labels, bridges = self.box["nvml_labels"], {}
        for number, socket in enumerate(n for n in self.box["tree"] if n != "chip_fabric"):
            for k, (port, content) in enumerate(self.box["tree"][socket].items()):
                shared = isinstance(content, list) and "PHB" in labels[0]
                host = HOST_BUSES.get(port, 0x20 + 0x80 * number)
                if host not in bridges:
                    bridges[host] = self.tree.host_bridge(host)
                    self.next_bus = host
                address = f"0000:{host:02x}:{k + 1 if shared else 1:02x}.1"
                secondary = self.bus()
                place = self.tree.device(
                    bridges[host],
                    address,
                    port="root_port",
                    acs=0,
                    numa=number,
                    buses=(secondary, secondary + 12),
                    config_size=self.config_size,
                )
                self.addresses[port] = address
                self.content(place, secondary, content, number)


def write_box(
    root, box, *, gpu_how=lambda rank: {}, downstream_acs=0, config_size=4096, registry="", **how
):
    """A described box as a tree below ``root``; returns addresses by its names, GPUs by rank."""
    num_nodes = max(box["numa"]) + 1
    tree = Tree(root, num_nodes=num_nodes, **how)
    tree.kernel_module(registry=registry)
    builder = _Box(tree, box, gpu_how, downstream_acs, config_size)
    builder.grow()
    tree.clutter(tree.host_bridge(0xC0), 0xC0)
    return builder.addresses
