"""The text form of a report: the tree, the labels, a summary, and what to look at."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from spec_kernels.comm.report import Report, iommu_state, peer_states, short_names
from spec_kernels.comm.sysfs import PciDevice
from spec_kernels.comm.topology import LABELS, Vertex

WIDTH = 100
_MEANING = {
    "PIX": "one switch",
    "PXB": "several switches",
    "PHB": "one host bridge",
    "NODE": "one NUMA node",
    "SYS": "several NUMA nodes",
}
# The largest square of labels that fits WIDTH.
_MAX_SQUARE = 16
_GLYPHS = {"mid": "├─ ", "last": "└─ ", "down": "│  ", "gap": "   "}
_ASCII_GLYPHS = {"mid": "|- ", "last": "`- ", "down": "|  ", "gap": "   "}


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=True,
        break_on_hyphens=False,
    )


def _socket_title(name: str, numa: int | None) -> str:
    number = re.fullmatch(r"socket([0-9]+)", name)
    title = f"socket {number[1]}" if number else "socket unknown"
    return title if numa is None else f"{title}, NUMA node {numa}"


def _tree(report: Report, glyphs: dict[str, str]) -> list[str]:
    topology, devices = report.topology, report.machine.devices
    listed = {g.pci: g for g in report.gpus}
    one_model = len({g.name for g in report.gpus}) <= 1
    below: dict[str | None, list[Vertex]] = {}
    for v in topology.vertices:
        below.setdefault(v.parent, []).append(v)
    short = dict(zip(listed, short_names([g.uuid for g in listed.values()]), strict=True))
    rows: list[tuple[str, str]] = []

    def describe(v: Vertex) -> tuple[str, str]:
        if v.kind == "gpu":
            g = listed[v.name]
            who = "-" if g.rank is None else f"rank {g.rank}"
            index = "" if g.index is None else f"GPU {g.index}"
            why = "" if g.rank is not None else (g.state or "not chosen")
            name = "" if one_model else g.name.removeprefix("NVIDIA ")
            parts = [who, index, g.pci, short[g.pci], name, why]
            return "  ".join(p for p in parts if p), str(g.link)
        device = devices[v.name]
        if v.kind == "root_port":
            return f"root port {v.name}", ""
        return f"switch {v.name} ({device.ids})", str(report.links[v.name])

    def draw(parent: str, lead: str) -> None:
        for v in (children := below.get(parent, [])):
            last = v is children[-1]
            text, link = describe(v)
            rows.append((lead + glyphs["last" if last else "mid"] + text, link))
            draw(v.name, lead + glyphs["gap" if last else "down"])

    sections = []
    for socket in sorted(below.get(None, []), key=lambda v: v.name):
        draw(socket.name, "")
        sections.append((_socket_title(socket.name, socket.numa), list(rows)))
        rows.clear()
    column = max((len(left) for _, part in sections for left, link in part if link), default=0)
    lines = []
    for title, part in sections:
        lines.append(title)
        for left, link in part:
            lines.append(f"{left:<{column}}  {link}".rstrip())
        lines.append("")
    return lines


def _square(labels: Sequence[Sequence[str]]) -> list[str]:
    used = [label for label in LABELS if any(label in row for row in labels)]
    legend = ", ".join(f"{label} {_MEANING[label]}" for label in used)
    lines = _wrap(f"between two ranks ({legend})", "", "  ")
    lines.append("      " + "".join(f"{rank:>5}" for rank in range(len(labels))))
    for rank, row in enumerate(labels):
        lines.append(f"  {rank:>4}" + "".join(f"{label:>5}" for label in row))
    return [*lines, ""]


def _header(report: Report) -> list[str]:
    machine, nvml = report.machine, report.nvml
    ranks, gpus = report.ranks, report.gpus
    driver = nvml.driver or machine.driver
    told = f"driver {driver}" if driver else "no NVIDIA driver"
    if nvml.absent:
        told += f"; NVML: {nvml.absent}"
    if not gpus:
        where = "PCI devices" if machine.has_pci else "PCI bus"
        if machine.has_pci:
            text = f"No NVIDIA GPU among the {where} of this machine ({told})."
        else:
            text = f"No NVIDIA GPU: this machine shows no {where} ({told})."
        return _wrap(
            f"{text} Nothing is missing: ranks on the CPU meet in shared memory.", "", "  "
        )
    models = sorted({g.name or "NVIDIA GPU of unknown model" for g in gpus})
    count = f"{len(gpus)} x {models[0]}" if len(models) == 1 else f"{len(gpus)} GPUs"
    if len(ranks) != len(gpus):
        count += f", {len(ranks)} of them ranks"
    return _wrap(f"{count}; {told}", "", "  ")


def _summary(report: Report) -> list[str]:
    ranks, nvml = report.ranks, report.nvml
    if not ranks:
        return []
    if len(ranks) == 1:
        return ["One rank: there are no peers, and nothing is missing."]
    pairs = len(ranks) * (len(ranks) - 1)
    if nvml.absent:
        p2p = "unknown, NVML does not tell"
    else:
        works = len(peer_states(report).get("ok", ()))
        p2p = f"{works} of {pairs} pairs, says the driver; not verified with data"
    force = report.machine.registry.get("ForceP2P")
    if force is not None:
        p2p += f" (ForceP2P={force})"
    iommu = iommu_state(report.machine)
    options = " ".join(report.machine.iommu.options)
    islands = " | ".join(",".join(map(str, island)) for island in report.choice.islands)
    fabric = [" = ".join(k.ends) for k in report.topology.links if k.kind == "chip_fabric"]
    rows = {
        "peer access": p2p,
        "IOMMU": f"{iommu} ({options})" if options else iommu,
        "islands": f"{islands or 'none'} ({report.choice.source}: {report.choice.reason})",
    }
    if fabric:
        rows["one chip"] = f"{', '.join(fabric)} (measured)"
    return [line for key, value in rows.items() for line in _wrap(value, f"{key:<13}", " " * 13)]


def _others(others: Sequence[PciDevice]) -> list[str]:
    names = ", ".join(f"{d.address} ({d.ids})" for d in others[:4])
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return _wrap(f"other display devices: {names}{more}", f"{'left out':<13}", " " * 13)


def _advice(report: Report) -> list[str]:
    lines = []
    ranks = {g.pci for g in report.ranks}
    for f in sorted(report.findings, key=lambda f: f.level != "problem"):
        mark = "! " if f.level == "problem" else "- "
        lines += _wrap(f.what, mark, "  ")
        if len(ranks) > 1 and set(f.where) == ranks:
            lines.append("  at all ranks")
        elif f.where:
            more = f" and {len(f.where) - 8} more" if len(f.where) > 8 else ""
            lines += _wrap(f"at {', '.join(f.where[:8])}{more}", "  ", "     ")
        if f.todo:
            lines += _wrap(f"do: {f.todo}", "  ", "      ")
        if f.command:
            lines.append(f"      {f.command}")
    return lines


def render(report: Report, ascii_only: bool = False) -> str:
    """The picture, ``WIDTH`` columns wide at most, but for lines to copy and long names."""
    lines = [*_header(report), ""]
    if report.gpus:
        lines += _tree(report, _ASCII_GLYPHS if ascii_only else _GLYPHS)
    if 1 < len(report.ranks) <= _MAX_SQUARE:
        lines += _square(report.topology.labels())
    lines += _summary(report)
    if report.others and report.gpus:
        lines += _others(report.others)
    if report.machine.unread and report.gpus:
        unread = ", ".join(report.machine.unread)
        lines += _wrap(f"{unread} (devices)", f"{'unreadable':<13}", " " * 13)
    if report.findings:
        lines += ["", *_advice(report)]
    while lines and not lines[-1]:
        lines.pop()
    text = "\n".join(lines)
    return text.encode("ascii", "replace").decode() if ascii_only else text
