"""``spec-kernels topology``: the subcommands that look at one machine's GPUs and their links."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def add_parser(subparsers) -> None:
    _add_topology(subparsers)


def _add_topology(subparsers) -> None:
    parser = subparsers.add_parser(
        "topology",
        help="how this machine's GPUs hang together, and what slows their links",
        description="Shows the PCI tree above this machine's NVIDIA GPUs, links and their speed, "
        "peer access, IOMMU and access control, islands of ranks, and what to change. Reads /sys, "
        "/proc and NVML; changes nothing. Works with one GPU, and with none.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the picture")
    add(
        "--devices",
        metavar="LIST",
        help="which GPUs are ranks, and in which order: numbers, UUIDs, PCI addresses "
        "(CUDA_VISIBLE_DEVICES, else all)",
    )
    add(
        "--measurements",
        type=Path,
        metavar="FILE",
        help="links of these ranks as measured (JSON): islands follow them instead of labels",
    )
    add(
        "--sysfs",
        type=Path,
        default=Path("/sys"),
        metavar="DIR",
        help="a recorded tree instead of /sys; proc is looked for beside it",
    )
    add(
        "--nvml",
        metavar="FILE",
        help="NVML library (libnvidia-ml.so.1; with a recorded tree: none)",
    )
    parser.set_defaults(func=topology)


def topology(args: argparse.Namespace) -> int:
    """Exit code 0, or 2 for a bad argument; what is wrong with the machine is in the text."""
    from spec_kernels.comm.nvml import LIBRARY, NvmlReading, read_nvml
    from spec_kernels.comm.p2p import LinkMeasurements
    from spec_kernels.comm.picture import render
    from spec_kernels.comm.report import make_report
    from spec_kernels.comm.sysfs import read_machine

    recorded = args.sysfs != Path("/sys")
    if recorded and not args.sysfs.is_dir():
        print(f"spec-kernels topology: {args.sysfs} is no directory", file=sys.stderr)
        return 2
    if recorded and args.nvml is None:
        nvml = NvmlReading(absent="not asked, the tree is a recorded one")
    else:
        nvml = read_nvml(args.nvml or LIBRARY)
    devices = args.devices
    if devices is None and not recorded:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        measured = args.measurements and LinkMeasurements.from_json(args.measurements.read_text())
        report = make_report(
            read_machine(args.sysfs), nvml, devices, measured or None, str(args.sysfs)
        )
    except (OSError, ValueError) as error:
        print(f"spec-kernels topology: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        print(render(report, ascii_only=not _prints_lines()))
    return 0


def _prints_lines() -> bool:
    """Whether the terminal's encoding has the characters of the picture."""
    try:
        "├─└│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
