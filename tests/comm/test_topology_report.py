"""``spec-kernels topology`` on recorded trees: what it reads, what it says, how it looks."""

import itertools
import json
import os
import random
import re
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pci_trees import ACS_ON, GPU_NAME, Tree, config_space, gpu_uuid, write_box

from spec_kernels import cli
from spec_kernels.comm.nvml import NvmlReading, read_nvml
from spec_kernels.comm.p2p import GpuId, LinkMeasurements
from spec_kernels.comm.picture import WIDTH, render
from spec_kernels.comm.report import make_report
from spec_kernels.comm.sysfs import access_control, normal_address, port_type, read_machine
from spec_kernels.comm.topology import Topology

BOXES = {
    box["name"]: box
    for box in json.loads(files("spec_kernels.comm").joinpath("boxes.json").read_text())["boxes"]
}
GOLDEN = Path(__file__).parent / "data"
LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
NO_NVML = NvmlReading(absent="not asked")


def report_of(root, nvml=NO_NVML, **how):
    return make_report(read_machine(root / "sys"), nvml, **how)


def kinds(report):
    return [f.kind for f in report.findings]


def nvml_lines(box, addresses, order=range(8), state=8, gen=1, p2p=0, widths=None):
    """What the driver of a described box says, with its GPUs in ``order``."""
    order = list(order)
    lines = [
        f"gpu {gpu_uuid(rank)} 0000{addresses[rank].upper()} {gen} {(widths or {}).get(rank, 16)} "
        f"5 16 5 {state} 0 {GPU_NAME}"
        for rank in order
    ]
    for (a, i), (b, j) in itertools.permutations(enumerate(order), 2):
        lines.append(f"label {a} {b} {LEVELS[box['nvml_labels'][i][j]]}")
        lines += [f"p2p {kind} {a} {b} {p2p}" for kind in (0, 1)]
    return lines


# The five boxes


@pytest.mark.parametrize("name", BOXES)
def test_the_tree_of_a_box_is_found_again(name, tmp_path):
    box = BOXES[name]
    addresses = write_box(tmp_path, box)
    report = report_of(tmp_path)
    assert [list(row) for row in report.topology.labels()] == box["nvml_labels"]
    assert [g.pci for g in report.ranks] == [addresses[rank] for rank in range(8)]
    assert [g.numa for g in report.ranks] == box["numa"]
    assert [g.uuid for g in report.ranks] == [gpu_uuid(rank) for rank in range(8)]
    assert report.choice.islands == ((0, 1, 2, 3), (4, 5, 6, 7))

    described = Topology.from_box(box)
    names = {v.name: v.name for v in described.vertices if v.kind == "socket"}
    names |= {f"gpu{rank}": addresses[rank] for rank in range(8)}
    names |= {k: v for k, v in addresses.items() if isinstance(k, str)}
    without_fabric = described.select(range(8))
    for i, j in itertools.permutations(range(8), 2):
        path = without_fabric.path(i, j)
        if not any({"vs0", "vs1"} == set(e) or {"vs2", "vs3"} == set(e) for e in path):
            wanted = tuple((names[a], names[b]) for a, b in path)
            assert report.topology.path(i, j) == wanted


@pytest.mark.parametrize("name", BOXES)
def test_without_rights_the_same_tree_is_found(name, tmp_path):
    """64 bytes of configuration space: no port types, so places tell what a bridge is."""
    write_box(tmp_path, BOXES[name], config_size=64)
    report = report_of(tmp_path)
    assert [list(row) for row in report.topology.labels()] == BOXES[name]["nvml_labels"]
    bridges = [d for d in report.machine.devices.values() if d.is_bridge]
    assert bridges and all(d.port_type is None and d.acs is None for d in bridges)


@pytest.mark.parametrize("name", BOXES)
def test_a_copied_tree_without_links_goes_by_bus_numbers(name, tmp_path):
    """As ``cp -rL`` leaves it: plain folders, and only numbers tell what lies above a device."""
    write_box(tmp_path / "whole", BOXES[name])
    shown = tmp_path / "whole/sys/bus/pci/devices"
    flat = tmp_path / "flat/sys/bus/pci/devices"
    flat.mkdir(parents=True)
    for device in shown.iterdir():
        (flat / device.name).mkdir()
        for part in device.resolve().iterdir():
            if part.is_file():
                shutil.copy(part, flat / device.name)
    shutil.copytree(tmp_path / "whole/sys/devices/system", tmp_path / "flat/sys/devices/system")
    report = report_of(tmp_path / "flat")
    assert [list(row) for row in report.topology.labels()] == BOXES[name]["nvml_labels"]
    assert any("place in the tree" in text for text in report.machine.unread)


def golden(name, text):
    path = GOLDEN / f"{name}.txt"
    assert text.splitlines() == path.read_text().splitlines()
    copied = [line for line in text.splitlines() if "setpci" in line or "export CUDA" in line]
    assert all(len(line) <= WIDTH for line in text.splitlines() if line not in copied)


def test_picture_of_virtual_switches_with_faults(tmp_path, library, describe):
    """Redirection on, an IOMMU that translates, and a GPU at work with half its lanes."""
    box = BOXES["asus-esc8000a-broadcom"]
    addresses = write_box(
        tmp_path,
        box,
        downstream_acs=ACS_ON,
        iommu="DMA-FQ",
        cmdline="root=/dev/sda quiet amd_iommu=on",
        gpu_how=lambda rank: {"link": (5, 8 if rank == 3 else 16, 5, 16)},
    )
    describe(*nvml_lines(box, addresses, state=0, gen=5, widths={3: 8}))
    report = report_of(tmp_path, read_nvml(library))
    assert kinds(report) == ["link_below", "acs_redirect", "iommu_translating"]
    golden("virtual_switches", render(report))


def test_picture_of_leaf_switches_seen_by_a_user(tmp_path, library, describe):
    """No rights, idle GPUs, ranks that alternate between the roots, a driver that refuses peers."""
    box = BOXES["wrx90-root-and-leaves"]
    addresses = write_box(tmp_path, box, config_size=64, iommu="identity", cmdline="iommu=pt")
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    describe(*nvml_lines(box, addresses, order, p2p=1))
    figures = [
        [None if i == j else 0.72 if order[i] // 4 == order[j] // 4 else 1.16 for j in range(8)]
        for i in range(8)
    ]
    ids = [GpuId(gpu_uuid(rank), addresses[rank]) for rank in order]
    report = report_of(
        tmp_path, read_nvml(library), measurements=LinkMeasurements(ids, read_128b_us=figures)
    )
    assert kinds(report) == [
        "link_below",
        "p2p_refused",
        "acs_unread",
        "iommu_passthrough",
        "rank_order",
    ]
    assert report.order == (0, 2, 4, 6, 1, 3, 5, 7)
    golden("leaf_switches", render(report))


def test_the_examples_of_the_docs_are_such_pictures():
    page = Path(__file__).parents[2] / "docs/allreduce.md"
    if not page.exists():
        pytest.skip("docs/allreduce.md: not in a source tree")
    blocks = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    picture = (GOLDEN / "virtual_switches.txt").read_text()
    assert len(blocks) >= 2 and all(block in picture for block in blocks[:2])


def test_an_order_of_gpus_without_uuids_is_told_by_address(tmp_path):
    """Which CUDA does not take in CUDA_VISIBLE_DEVICES, so there is no line to copy."""
    addresses = write_box(tmp_path, BOXES["wrx90-two-switches"])
    shutil.rmtree(tmp_path / "proc/driver")
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    report = report_of(tmp_path, devices=",".join(addresses[rank] for rank in order))
    (found,) = [f for f in report.findings if f.kind == "rank_order"]
    assert found.command == ""
    assert found.todo.endswith(", ".join(addresses[rank] for rank in range(8)))


def test_a_chip_of_two_switches_shows_by_measurement(tmp_path):
    box = BOXES["asus-esc8000a-broadcom"]
    addresses = write_box(tmp_path, box)
    figures = [
        [None if i == j else 0.72 if i // 4 == j // 4 else 1.3 for j in range(8)] for i in range(8)
    ]
    ids = [GpuId(gpu_uuid(rank), addresses[rank]) for rank in range(8)]
    report = report_of(tmp_path, measurements=LinkMeasurements(ids, read_128b_us=figures))
    assert report.choice.source == "measured"
    assert "one chip     0000:11:00.0 = 0000:71:00.0, 0000:81:00.0 = 0000:e1:00.0 (measured)" in (
        render(report)
    )


# Few GPUs, or none


def one_gpu(tmp_path, **how):
    tree = Tree(tmp_path)
    tree.kernel_module()
    port = tree.device(tree.host_bridge(0), "0000:00:01.1", port="root_port", buses=(1, 1))
    tree.gpu(port, "0000:01:00.0", 0, **how)
    return tree


def test_one_gpu(tmp_path):
    one_gpu(tmp_path)
    report = report_of(tmp_path)
    text = render(report)
    assert "One rank: there are no peers, and nothing is missing." in text
    assert f"1 x {GPU_NAME}; driver 580.82.07" in text
    assert report.topology.labels() == (("X",),)
    assert report.choice.islands == () and report.order == (0,)


def test_no_gpu(tmp_path):
    tree = Tree(tmp_path)
    tree.clutter(tree.host_bridge(0), 0)
    text = render(report_of(tmp_path))
    assert "No NVIDIA GPU among the PCI devices of this machine" in text
    assert "Nothing is missing" in " ".join(text.split())


def test_no_pci_bus_and_no_sysfs_at_all(tmp_path):
    assert "shows no PCI bus" in render(report_of(tmp_path))
    (tmp_path / "sys").write_text("a file")
    assert "shows no PCI bus" in render(report_of(tmp_path))


def test_other_vendors_are_no_ranks(tmp_path):
    tree = one_gpu(tmp_path)
    bridge = tree.host_bridge(0x40)
    for k, class_code in enumerate((0x030000, 0x038000, 0x120000)):
        tree.device(bridge, f"0000:40:0{k}.0", ids=(0x1002, 0x74A0), class_code=class_code)
    report = report_of(tmp_path)
    assert [g.pci for g in report.ranks] == ["0000:01:00.0"]
    assert len(report.others) == 3 and "0000:40:02.0 (1002:74a0)" in " ".join(
        render(report).split()
    )


def test_virtual_functions_are_no_ranks(tmp_path):
    tree = one_gpu(tmp_path)
    place = tree.gpu(tree.host_bridge(0x40), "0000:40:00.4")
    (place / "physfn").symlink_to("../somewhere")
    assert [g.pci for g in report_of(tmp_path).ranks] == ["0000:01:00.0"]


# Containers, virtual machines, drivers


def test_a_container_that_hides_pci_goes_by_the_driver(tmp_path, library, describe):
    box = BOXES["wrx90-two-switches"]
    addresses = {rank: f"0000:{rank + 1:02x}:00.0" for rank in range(8)}
    describe(*nvml_lines(box, addresses))
    report = report_of(tmp_path, read_nvml(library))
    assert [list(row) for row in report.topology.labels()] == box["nvml_labels"]
    assert report.choice.islands == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert "place_unknown" in kinds(report) and "labels_differ" not in kinds(report)
    assert "socket unknown" in render(report)
    assert report.topology.path(0, 4)[0][0] == addresses[0]


def test_a_container_with_some_files_missing(tmp_path):
    """Neither configuration space, nor NUMA, nor link files; half the devices not there."""
    addresses = write_box(tmp_path, BOXES["wrx90-two-switches"])
    for name in ("config", "numa_node", "current_link_speed", "max_link_width", "driver"):
        for path in (tmp_path / "sys/devices").rglob(name):
            path.unlink()
    shutil.rmtree(tmp_path / "sys/devices/system")
    shutil.rmtree(tmp_path / "sys/class")
    for rank in (4, 5, 6, 7):
        (tmp_path / "sys/bus/pci/devices" / addresses[rank]).unlink()
    report = report_of(tmp_path)
    assert report.topology.num_ranks == 4
    assert {x for row in report.topology.labels() for x in row} == {"X", "PIX"}
    assert "link_below" not in kinds(report) and "iommu_unknown" in kinds(report)
    text = render(report)
    assert "gen? x16" in text and "unreadable" in text and "numa_node (" in text


def test_a_container_with_two_of_eight_gpus(tmp_path, library, describe):
    box = BOXES["wrx90-two-switches"]
    addresses = write_box(tmp_path, box)
    describe(*nvml_lines(box, addresses, [2, 5]))
    report = report_of(tmp_path, read_nvml(library))
    assert [g.pci for g in report.ranks] == [addresses[2], addresses[5]]
    assert report.topology.labels() == (("X", "NODE"), ("NODE", "X"))
    assert kinds(report).count("not_usable") == 1
    assert "2 of them ranks" in render(report) and "not shown by the driver" in render(report)


def test_labels_and_states_follow_the_chosen_order(tmp_path, library, describe):
    box = BOXES["asus-esc8000a-broadcom"]
    addresses = {rank: f"0000:{rank + 1:02x}:00.0" for rank in range(8)}
    describe(*nvml_lines(box, addresses), "p2p 1 5 0 4")
    chosen = [5, 0, 1, 4]
    report = report_of(tmp_path, read_nvml(library), devices=",".join(map(str, chosen)))
    assert [list(row) for row in report.topology.labels()] == [
        [box["nvml_labels"][i][j] for j in chosen] for i in chosen
    ]
    (refused,) = [f for f in report.findings if f.kind == "p2p_refused"]
    assert refused.where == ("0-1",)


def test_mig_devices_are_named_and_left_out(tmp_path, library, describe):
    box = BOXES["wrx90-two-switches"]
    addresses = write_box(tmp_path, box)
    lines = nvml_lines(box, addresses)
    lines[1] = lines[1].replace(" 8 0 ", " 8 1 ")
    describe(*lines)
    report = report_of(tmp_path, read_nvml(library))
    assert [g.index for g in report.ranks] == [0, 2, 3, 4, 5, 6, 7]
    (mig,) = [f for f in report.findings if f.kind == "mig"]
    assert mig.where == (addresses[1],) and "MIG" in mig.what
    with pytest.raises(ValueError, match="MIG devices"):
        report_of(tmp_path, read_nvml(library), devices="MIG-aaaa")


def test_a_gpu_held_by_another_driver(tmp_path):
    tree = one_gpu(tmp_path)
    port = tree.device(tree.host_bridge(0x40), "0000:40:01.1", port="root_port", buses=(65, 65))
    tree.gpu(port, "0000:41:00.0", driver="vfio-pci")
    report = report_of(tmp_path)
    assert len(report.ranks) == 1 and "held by vfio-pci" in render(report)


def test_a_virtual_machine(tmp_path):
    """GPUs on the root bus, as hypervisors place them; redirection is the host's to change."""
    tree = Tree(tmp_path)
    tree.write(tree.proc / "cpuinfo", "flags\t\t: fpu hypervisor avx2")
    bridge = tree.host_bridge(0)
    for rank in range(4):
        tree.gpu(bridge, f"0000:00:0{rank + 5}.0", rank, link=None)
    report = report_of(tmp_path)
    assert {x for row in report.topology.labels() for x in row} == {"X", "PHB"}
    assert kinds(report) == ["virtual_machine"]
    assert "link unknown" in render(report)


@pytest.mark.parametrize(
    "iommu, state, kind",
    [
        ("off", "off", None),
        ("DMA", "translating", "iommu_translating"),
        ("DMA-FQ", "translating", "iommu_translating"),
        ("identity", "passthrough", "iommu_passthrough"),
        ("blocked", "mixed", "iommu_translating"),
        ("", "unknown", "iommu_unknown"),
    ],
)
def test_iommu_states(tmp_path, iommu, state, kind):
    write_box(tmp_path, BOXES["dual-turin-direct"], iommu=iommu)
    report = report_of(tmp_path)
    assert report.as_dict()["iommu"]["state"] == state
    assert [k for k in kinds(report) if k.startswith("iommu")] == ([kind] if kind else [])


def test_options_of_the_kernel_that_matter(tmp_path):
    options = "iommu=pt pci=noats amd_iommu=on pci=disable_acs_redir=pci:10b5:* ro iommu.strict=0"
    write_box(tmp_path, BOXES["dual-turin-direct"], cmdline=options)
    assert report_of(tmp_path).machine.iommu.options == (
        "iommu=pt",
        "amd_iommu=on",
        "pci=disable_acs_redir=pci:10b5:*",
    )


# Links


def links_of(tmp_path, library, describe, link, state, port_link=(5, 16, 5, 16)):
    tree = Tree(tmp_path)
    port = tree.device(
        tree.host_bridge(0), "0000:00:01.1", port="root_port", buses=(1, 1), link=port_link
    )
    tree.gpu(port, "0000:01:00.0", 0, link=link)
    gen, width, *_ = link
    describe(f"gpu {gpu_uuid(0)} 00000000:01:00.0 {gen} {width} 5 16 5 {state} 0 name")
    report = report_of(tmp_path, read_nvml(library))
    return report, [(f.kind, f.level) for f in report.findings]


@pytest.mark.parametrize(
    "link, state, wanted",
    [
        ((5, 16, 5, 16), 8, []),
        ((1, 16, 5, 16), 8, [("link_below", "note")]),
        ((1, 16, 5, 16), 32, [("link_below", "note")]),
        ((1, 16, 5, 16), 0, [("link_below", "problem")]),
        ((4, 16, 5, 16), 2, [("link_below", "problem")]),
        ((1, 8, 5, 16), 8, [("link_below", "problem")]),
        ((5, 16, 6, 16), 0, [("slot_below", "note")]),
    ],
)
def test_links_below_what_they_could_be(tmp_path, library, describe, link, state, wanted):
    report, found = links_of(tmp_path, library, describe, link, state)
    assert found == wanted
    if wanted and state != 0 and wanted[0][0] == "link_below":
        assert ("idle" in report.findings[0].what) == (state > 2)


def test_a_narrow_slot_is_no_fault_of_the_link(tmp_path, library, describe):
    report, found = links_of(tmp_path, library, describe, (4, 8, 5, 16), 0, port_link=(4, 8, 4, 8))
    assert found == [("slot_below", "note")]
    link = report.ranks[0].link
    assert (link.possible_gen, link.possible_width, link.device_gen) == (4, 8, 5)


def test_the_uplink_of_a_switch_is_looked_at(tmp_path):
    addresses = write_box(tmp_path, BOXES["wrx90-two-switches"])
    place = tmp_path / "sys/bus/pci/devices" / addresses["switch1"]
    (place / "current_link_width").write_text("8\n")
    (found,) = [f for f in report_of(tmp_path).findings if f.level == "problem"]
    assert (found.kind, found.where) == ("link_below", (addresses["switch1"],))


@pytest.mark.parametrize(
    "speed, width, wanted",
    [
        ("32.0 GT/s PCIe", "16", (5, 16)),
        ("2.5 GT/s", "1", (1, 1)),
        ("8 GT/s", "4", (3, 4)),
        ("64.0 GT/s PCIe", "32", (6, 32)),
        ("Unknown", "255", (None, None)),
        ("Unknown speed", "0", (None, None)),
        ("7.7 GT/s", "-4", (None, None)),
        ("", "", (None, None)),
        ("\xff\xfe", "16 lanes", (None, None)),
    ],
)
def test_texts_of_speed_and_width(tmp_path, speed, width, wanted):
    one_gpu(tmp_path)
    place = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    for when in ("current", "max"):
        (place / f"{when}_link_speed").write_text(speed)
        (place / f"{when}_link_width").write_text(width)
    link = read_machine(tmp_path / "sys").devices["0000:01:00.0"].link
    assert (link.gen, link.width) == (link.max_gen, link.max_width) == wanted


# Access control


@pytest.mark.parametrize(
    "control, redirects", [(0, False), (0x01, False), (0x04, True), (0x1D, True)]
)
def test_redirection_counts_on_switch_ports_between_ranks(tmp_path, control, redirects):
    addresses = write_box(tmp_path, BOXES["wrx90-root-and-leaves"], downstream_acs=control)
    found = [f for f in report_of(tmp_path).findings if f.kind == "acs_redirect"]
    assert bool(found) is redirects
    if redirects:
        roots = {addresses[name][5:7] for name in ("root0", "root1", "leaf0", "leaf3")}
        assert len(found[0].where) == 12 and addresses[0] not in found[0].where
        assert found[0].command.count("0000:") == 12 and len(roots) == 4


def test_redirection_away_from_the_ranks_is_no_finding(tmp_path):
    """One rank a switch: what it sends goes up anyway."""
    write_box(tmp_path, BOXES["wrx90-two-switches"], downstream_acs=ACS_ON)
    report = report_of(tmp_path, devices="0,4")
    assert report.topology.num_ranks == 2 and "acs_redirect" not in kinds(report)


@pytest.mark.parametrize(
    "devices, where", [("0,1", ()), ("0,2", ("0000:22:00.0", "0000:22:04.0")), ("0,4", ())]
)
def test_redirection_counts_below_the_place_where_ways_meet(tmp_path, devices, where):
    """Ports of the root switch: what GPUs of one leaf, or of two roots, send turns elsewhere."""
    write_box(tmp_path, BOXES["wrx90-root-and-leaves"])
    for port in ("0000:22:00.0", "0000:22:04.0"):
        config = tmp_path / "sys/bus/pci/devices" / port / "config"
        config.write_bytes(config_space("downstream", ACS_ON))
    found = [f for f in report_of(tmp_path, devices=devices).findings if f.kind == "acs_redirect"]
    assert [f.where for f in found] == ([where] if where else [])


def test_capabilities_are_found_in_the_registers():
    space = config_space("downstream", acs=0x1D)
    assert port_type(space) == "downstream"
    acs = access_control(space)
    assert (acs.capability, acs.control) == (0x5F, 0x1D) and acs.redirects
    assert acs.enabled == (
        "source validation",
        "request redirect",
        "completion redirect",
        "upstream forwarding",
    )
    assert access_control(config_space("upstream")) is None
    assert port_type(space[:64]) is None and access_control(space[:256]) is None


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=4096),
        st.tuples(
            st.binary(min_size=600, max_size=600), st.sampled_from((0, 0xFF, 0x40, 0x10))
        ).map(lambda x: (config_space("root_port", 0x1D)[:0x60] + x[0]).ljust(4096, bytes([x[1]]))),
    )
)
def test_any_configuration_space_can_be_read(data):
    assert port_type(data) in (None, "endpoint", "root_port", "upstream", "downstream", "bridge")
    acs = access_control(data)
    assert acs is None or acs.control <= 0xFFFF


def test_loops_of_capabilities_end():
    space = bytearray(config_space("endpoint"))
    space[0x41] = 0x40
    assert port_type(bytes(space)) is None
    space[0x100:0x104] = (0x100 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    assert access_control(bytes(space)) is None


# Odd trees


def test_domains_beyond_16_bits(tmp_path):
    """As behind Intel's volume management device, and as NVML spells them."""
    tree = Tree(tmp_path)
    vmd = tree.device(tree.host_bridge(0), "0000:00:0e.0", class_code=0x010400)
    inner = vmd / "pci10000:e0"
    inner.mkdir()
    port = tree.device(inner, "10000:e0:06.0", port="root_port", buses=(0xE1, 0xE1))
    tree.gpu(port, "10000:e1:00.0", 0)
    report = report_of(tmp_path)
    (gpu,) = report.ranks
    assert gpu.pci == "10000:e1:00.0"
    assert [v.name for v in report.topology.ancestors(0)] == [
        "10000:e1:00.0",
        "10000:e0:06.0",
        "socket0",
    ]
    assert report.machine.devices["10000:e0:06.0"].host_bridge == "10000:e0"
    assert normal_address("00010000:E1:00.0") == gpu.pci


def test_deep_bridges_and_a_conventional_one(tmp_path):
    tree = Tree(tmp_path)
    place = tree.device(tree.host_bridge(0), "0000:00:01.0", port="root_port", buses=(1, 40))
    for depth in range(1, 31):
        port = ("upstream", "downstream", "bridge")[(depth - 1) % 3]
        place = tree.device(place, f"0000:{depth:02x}:00.0", port=port, buses=(depth + 1, 40))
    tree.gpu(place, "0000:1f:00.0", 0)
    chain = report_of(tmp_path).topology.ancestors(0)
    assert (
        len(chain) == 1 + 20 + 1 + 1
    )  # the GPU, two vertices for every three bridges, port, socket


def test_links_that_loop_and_links_to_nowhere(tmp_path):
    one_gpu(tmp_path)
    shown = tmp_path / "sys/bus/pci/devices"
    (shown / "0000:02:00.0").symlink_to("0000:02:00.0")
    (shown / "0000:03:00.0").symlink_to("0000:04:00.0")
    (shown / "0000:04:00.0").symlink_to("0000:03:00.0")
    (shown / "0000:05:00.0").symlink_to("../../../devices/nowhere")
    (shown / "0000:01:00.0/config").unlink()
    (shown / "0000:01:00.0/config").symlink_to("config")
    (shown / "0000:01:00.0/driver").unlink()
    (shown / "0000:01:00.0/driver").symlink_to("driver")
    report = report_of(tmp_path)
    assert [g.pci for g in report.ranks] == ["0000:01:00.0"]


def test_a_tree_that_links_to_itself(tmp_path):
    """A bridge above itself, and a GPU above a GPU, by what the links spell."""
    tree = one_gpu(tmp_path)
    shown = tmp_path / "sys/bus/pci/devices"
    real = os.readlink(shown / "0000:01:00.0")
    for name, above in (
        ("0000:06:00.0", "0000:00:01.1/0000:05:00.0/0000:00:01.1"),
        ("0000:07:00.0", "0000:01:00.0"),
    ):
        (tmp_path / f"sys/devices/pci0000:00/{above}/{name}").mkdir(parents=True)
        (shown / name).symlink_to(f"../../../devices/pci0000:00/{above}/{name}")
        for file in ("class", "vendor"):
            tree.write(shown / name / file, {"class": "0x030200", "vendor": "0x10de"}[file])
    assert real.endswith("0000:01:00.0")
    report = report_of(tmp_path)
    assert report.topology.num_ranks == 3
    assert render(report)


def test_a_pipe_instead_of_a_file_does_not_hang(tmp_path):
    one_gpu(tmp_path)
    place = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    for name in ("numa_node", "config", "current_link_speed"):
        (place / name).unlink()
        os.mkfifo(place / name)
    (place / "max_link_width").unlink()
    (place / "max_link_width").mkdir()
    assert len(report_of(tmp_path).ranks) == 1


def test_hundreds_of_devices(tmp_path):
    """Many functions beside the GPUs, and more GPUs than a square of labels has room for."""
    tree = Tree(tmp_path, num_nodes=2)
    rank = itertools.count()
    for socket, bus in enumerate((0x00, 0x80)):
        bridge = tree.host_bridge(bus)
        for slot in range(1, 13):
            inner = bus + slot
            port = tree.device(
                bridge,
                f"0000:{bus:02x}:{slot:02x}.1",
                port="root_port",
                numa=socket,
                buses=(inner, inner),
            )
            tree.gpu(port, f"0000:{inner:02x}:00.0", next(rank), numa=socket)
        for k in range(150):
            address = f"0000:{bus + 0x40:02x}:{k // 8:02x}.{k % 8}"
            tree.device(bridge, address, class_code=0x088000, numa=socket)
    report = report_of(tmp_path)
    assert report.topology.num_ranks == 24
    text = render(report)
    assert "between two ranks" not in text and max(map(len, text.splitlines())) <= WIDTH
    assert len(report.machine.devices) == 48


def test_several_numa_nodes_of_one_socket(tmp_path):
    """Sub-NUMA clusters: other labels, yet one vertex for the socket."""
    tree = Tree(tmp_path, num_nodes=4, nodes_of_package=4)
    for node, bus in enumerate((0x00, 0x40, 0x80, 0xC0)):
        port = tree.device(
            tree.host_bridge(bus),
            f"0000:{bus:02x}:01.1",
            port="root_port",
            numa=node,
            buses=(bus + 1, bus + 1),
        )
        tree.gpu(port, f"0000:{bus + 1:02x}:00.0", node, numa=node)
    report = report_of(tmp_path)
    assert {x for row in report.topology.labels() for x in row} == {"X", "SYS"}
    assert [v.name for v in report.topology.vertices if v.kind == "socket"] == ["socket0"]
    assert "socket 0\n" in render(report)


def test_unknown_numa_nodes_on_two_sockets(tmp_path):
    tree = Tree(tmp_path, num_nodes=2)
    for rank, bus in enumerate((0x00, 0x80)):
        port = tree.device(
            tree.host_bridge(bus),
            f"0000:{bus:02x}:01.1",
            port="root_port",
            numa=-1,
            buses=(bus + 1, bus + 1),
        )
        tree.gpu(port, f"0000:{bus + 1:02x}:00.0", rank, numa=-1)
    report = report_of(tmp_path)
    assert "place_unknown" in kinds(report) and "socket unknown" in render(report)


def test_labels_of_the_driver_count_more(tmp_path, library, describe):
    box = BOXES["wrx90-two-switches"]
    addresses = write_box(tmp_path, box)
    describe(*nvml_lines(box, addresses), "label 0 4 50", "label 4 0 50")
    report = report_of(tmp_path, read_nvml(library))
    assert report.topology.common(0, 4) == "SYS"
    assert [f.where for f in report.findings if f.kind == "labels_differ"] == [
        ("4-0: SYS, not NODE",)
    ]


def test_garbage_in_every_file(tmp_path):
    """Files of a box replaced, emptied or removed at random: always a report, never a crash."""
    box = BOXES["wrx90-root-and-leaves"]
    write_box(tmp_path / "box", box, iommu="DMA-FQ")
    originals = sorted(p for p in (tmp_path / "box").rglob("*") if p.is_file())
    rubbish = [
        b"",
        b"\xff" * 70,
        b"-1",
        b"0x",
        b"1e9",
        b"999999999999999999999",
        b"\0\n",
        b"\xd9\xa3",
    ]
    for seed in range(12):
        rng = random.Random(seed)
        place = tmp_path / f"copy{seed}"
        shutil.copytree(tmp_path / "box", place, symlinks=True)
        for path in originals:
            target = place / path.relative_to(tmp_path / "box")
            if path.name in ("class", "vendor") and seed % 2:
                continue  # else no GPU is left to report
            if rng.random() < 0.5:
                target.write_bytes(rng.choice(rubbish))
            elif rng.random() < 0.2:
                target.unlink()
        report = report_of(place)
        json.dumps(report.as_dict())
        assert all(line.isprintable() for line in render(report).splitlines())
        if seed % 2:
            assert report.topology.num_ranks == 8


names = st.from_regex(r"[0-9a-f]{4,5}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", fullmatch=True)


@st.composite
def link_targets(draw):
    """Device names with links that spell any chain of any names above them."""
    found = {}
    for name in draw(st.lists(names, max_size=6, unique=True)):
        pool = st.one_of(names, st.sampled_from(["pci0000:00", "pci0001:80", "platform", "."]))
        found[name] = [*draw(st.lists(pool, max_size=6)), name]
    return found


@settings(max_examples=80, deadline=None)
@given(link_targets(), st.randoms(use_true_random=False))
def test_any_links_give_a_sound_topology(tmp_path_factory, targets, rng):
    root = tmp_path_factory.mktemp("links")
    devices = root / "sys/devices"
    shown = root / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    shown.mkdir(parents=True)
    for name, parts in targets.items():
        spelled = "/".join(parts)
        place = devices / spelled
        place.mkdir(parents=True, exist_ok=True)
        (place / "class").write_text(rng.choice(["0x030000", "0x060400", "0x020000"]))
        (place / "vendor").write_text(rng.choice(["0x10de", "0x1022"]))
        (shown / name).symlink_to(f"../../../devices/{spelled}")
    report = report_of(root)
    assert Topology.from_json(report.topology.to_json()) == report.topology
    for i, j in itertools.permutations(range(report.topology.num_ranks), 2):
        assert report.topology.path(i, j)
    render(report)


# The command


def run(capsys, *args):
    code = cli.main(["topology", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


SCHEMA = {
    "schema": int,
    "sources": {"sysfs": str, "nvml": str, "driver": str, "unread": [str]},
    "gpus": [
        {
            "rank": int,
            "index": int,
            "uuid": str,
            "pci": str,
            "name": str,
            "numa": int,
            "link": {
                "gen": int,
                "width": int,
                "possible_gen": int,
                "possible_width": int,
                "device_gen": int,
            },
            "performance_state": int,
            "iommu_group": str,
            "driver": str,
            "state": str,
        }
    ],
    "ports": [
        {
            "address": str,
            "ids": str,
            "parent": str,
            "host_bridge": str,
            "numa": int,
            "port_type": str,
            "link": dict,
            "acs": {"enabled": [str], "redirects": bool},
        }
    ],
    "topology": {"vertices": [dict], "gpus": [dict], "links": [dict], "told": [list]},
    "labels": [[str]],
    "p2p": {"gpus": [str], "read": [[str]], "write": [[str]]},
    "iommu": {"state": str, "units": [str], "group_types": dict, "options": [str], "shown": bool},
    "hypervisor": bool,
    "registry": dict,
    "islands": {"ranks": [[int]], "source": str, "reason": str},
    "rank_order": [int],
    "findings": [
        {"kind": str, "level": str, "where": [str], "what": str, "todo": str, "command": str}
    ],
}


def check_schema(value, schema, where=""):
    """Same fields, of these types or null."""
    if value is None:
        return
    if isinstance(schema, dict):
        assert set(value) == set(schema), where
        for key, inner in schema.items():
            check_schema(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for item in value:
            check_schema(item, schema[0], f"{where}[]")
    else:
        assert type(value) is schema, where


@pytest.mark.parametrize("name", [*BOXES, "none"])
def test_json_keeps_to_its_schema(name, tmp_path, capsys, library, describe):
    args = ["--json", "--sysfs", tmp_path / "sys"]
    if name == "none":
        Tree(tmp_path)
    else:
        addresses = write_box(tmp_path, BOXES[name], iommu="identity")
        describe(*nvml_lines(BOXES[name], addresses))
        args += ["--nvml", library]
    code, out, err = run(capsys, *args)
    assert (code, err) == (0, "")
    data = json.loads(out)
    check_schema(data, SCHEMA)
    assert data["schema"] == 1
    assert Topology.from_dict(data["topology"]).num_ranks == (0 if name == "none" else 8)


def test_command_prints_the_picture(tmp_path, capsys):
    write_box(tmp_path, BOXES["wrx90-two-switches"])
    code, out, err = run(capsys, "--sysfs", tmp_path / "sys")
    assert (code, err) == (0, "") and "├─ root port" in out
    assert "the tree is a recorded one" in " ".join(out.split())


def test_command_on_this_machine(capsys, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code, out, _ = run(capsys)
    assert code == 0 and out
    code, out, _ = run(capsys, "--json")
    check_schema(json.loads(out), SCHEMA)


def test_devices_choose_ranks_in_their_order(tmp_path, capsys):
    addresses = write_box(tmp_path, BOXES["wrx90-two-switches"])
    chosen = f"{addresses[5]},{gpu_uuid(2)[:12]},0"
    _, out, _ = run(capsys, "--json", "--sysfs", tmp_path / "sys", "--devices", chosen)
    data = json.loads(out)
    assert [g["pci"] for g in data["topology"]["gpus"]] == [addresses[k] for k in (5, 2, 0)]
    ranks = {g["pci"]: g["rank"] for g in data["gpus"]}
    assert ranks[addresses[5]] == 0 and ranks[addresses[7]] is None


def test_the_environment_does_not_choose_in_a_recorded_tree(tmp_path, capsys, monkeypatch):
    write_box(tmp_path, BOXES["wrx90-two-switches"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    _, out, _ = run(capsys, "--json", "--sysfs", tmp_path / "sys")
    assert len(json.loads(out)["topology"]["gpus"]) == 8


@pytest.mark.parametrize(
    "value, ranks, warning",
    [
        ("1", [1], ""),
        ("GPU-1a2b0001,0", [1, 0], ""),
        ("", [], ""),
        ("GPU-ffff", [0, 1], "none of the 2 GPUs has this name"),
        ("MIG-1234", [0, 1], "MIG devices cannot reach each other"),
    ],
)
def test_the_environment_chooses_on_a_live_machine(
    capsys, monkeypatch, library, describe, value, ranks, warning
):
    """With a driver of two GPUs; what names nothing is warned of, and does not hide the machine."""
    describe(
        *(f"gpu {gpu_uuid(k)} 00000000:0{k + 1}:00.0 5 16 5 16 5 0 0 {GPU_NAME}" for k in (0, 1))
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    code, out, err = run(capsys, "--json", "--nvml", library)
    assert code == 0
    assert [g["index"] for g in json.loads(out)["topology"]["gpus"]] == ranks
    assert (warning in err and "CUDA_VISIBLE_DEVICES ignored" in err) if warning else err == ""


def test_measurements_from_a_file(tmp_path, capsys):
    addresses = write_box(tmp_path, BOXES["dual-turin-direct"])
    ids = [GpuId(gpu_uuid(rank), addresses[rank]) for rank in range(8)]
    alike = [[None if i == j else 0.4 for j in range(8)] for i in range(8)]
    path = tmp_path / "links.json"
    path.write_text(LinkMeasurements(ids, flag_us=alike).to_json())
    args = ("--sysfs", tmp_path / "sys", "--measurements", path)
    code, out, _ = run(capsys, *args)
    assert code == 0 and "islands      none (measured:" in out


@pytest.mark.parametrize(
    "args, message",
    [
        (["--sysfs", "no/such/folder"], "is no directory"),
        (["--devices", "MIG-12"], "MIG devices"),
        (["--devices", "GPU-zzzz"], "none of the 1 GPUs"),
        (["--measurements", "no-such-file"], "No such file"),
        (["--measurements", "sys/bad.json"], "LinkMeasurements"),
        (["--measurements", "sys/other.json"], "expected measurements of 1 GPUs"),
    ],
)
def test_bad_arguments(tmp_path, capsys, monkeypatch, args, message):
    one_gpu(tmp_path)
    (tmp_path / "sys/bad.json").write_text("{")
    (tmp_path / "sys/other.json").write_text(LinkMeasurements([]).to_json())
    monkeypatch.chdir(tmp_path)
    if "--sysfs" not in args:
        args = ["--sysfs", "sys", *args]
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("spec-kernels topology: ") and message in err


def test_a_terminal_without_the_characters(tmp_path):
    write_box(tmp_path, BOXES["wrx90-two-switches"])
    text = render(report_of(tmp_path), ascii_only=True)
    assert text.isascii() and "|- root port" in text and "`- root port" in text
