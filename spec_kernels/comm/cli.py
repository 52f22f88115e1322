"""``spec-kernels topology``, ``links``, ``tune``, ``bench``: GPUs, their links, their sums."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def add_parser(subparsers) -> None:
    _add_topology(subparsers)
    _add_links(subparsers)
    _add_tune(subparsers)
    _add_bench(subparsers)


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
        help="links of these ranks (what spec-kernels links --json prints): islands follow them "
        "instead of labels",
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
    machine = read_machine(args.sysfs)
    devices = args.devices
    if devices is None and not recorded:
        devices = _devices_of_environment(machine, nvml)
    try:
        measured = args.measurements and LinkMeasurements.from_json(args.measurements.read_text())
        report = make_report(machine, nvml, devices, measured or None, str(args.sysfs))
    except (OSError, ValueError) as error:
        print(f"spec-kernels topology: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        print(render(report, ascii_only=not _prints_lines()))
    return 0


def _add_links(subparsers) -> None:
    parser = subparsers.add_parser(
        "links",
        help="whether this machine's GPUs reach each other, tried with data, and how fast",
        description="Stores to and loads from every GPU's memory from every other, compares what "
        "arrives, and measures each pair and concurrent copies, some seconds of full load on the "
        "links. What --json prints is what --measurements of topology and tune takes.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of tables")
    add(
        "--devices",
        nargs="+",
        metavar="GPU",
        help="in rank order: numbers, UUIDs or PCI addresses (default: all visible ones)",
    )
    add("--verify-only", action="store_true", help="try with data, measure nothing")
    parser.set_defaults(func=links)


def links(args: argparse.Namespace) -> int:
    """Exit code 0, 1 where a pair cannot be relied on, or 2 where there is nothing to try."""
    from spec_kernels.comm.device_group import Platform
    from spec_kernels.comm.p2p import Links, groups_of, render

    try:
        devices = args.devices and [int(d) if d.isdecimal() else d for d in args.devices]
        platform = Platform.cuda()
        with Links(platform.library, platform.driver(), devices) as tried:
            if len(tried.names) < 2:
                print("spec-kernels links: one GPU here, and a link takes two", file=sys.stderr)
                return 2
            report = tried.verify()
            print(f"spec-kernels links: {report}", file=sys.stderr)
            if not args.verify_only:
                from spec_kernels.comm.sysfs import read_machine

                table = tried.measure(groups_of(read_machine("/sys"), tried.names), report)
                print(table.to_json() if args.json else render(table))
            return 0 if report.sound else 1
    except (RuntimeError, ValueError) as error:
        print(f"spec-kernels links: {error}", file=sys.stderr)
        return 2


def _devices_of_environment(machine, nvml) -> str | None:
    """CUDA_VISIBLE_DEVICES; None, and a warning, where it names what is not there.

    The machine is looked at all the same: such a setting may be what the user is after.
    """
    from spec_kernels.comm.report import numbered_gpus
    from spec_kernels.comm.visible import visible_devices

    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        visible_devices(devices, numbered_gpus(machine, nvml))
    except ValueError as error:
        print(f"spec-kernels topology: CUDA_VISIBLE_DEVICES ignored: {error}", file=sys.stderr)
        return None
    return devices


def _prints_lines() -> bool:
    """Whether the terminal's encoding has the characters of the picture."""
    try:
        "├─└│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class _CannotRun(Exception):
    """What the user asked for cannot be had here; the text says what can."""


def _add_tune(subparsers) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="which all-reduce algorithm takes which message",
        description="Finds the all-reduce algorithm for each message size: by timing on this "
        "machine's GPUs, inside a graph, kept on disk; or without them by the simulator, for a "
        "described box or for links that were measured, and then everything is a prediction.",
    )
    _add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--refresh", action="store_true", help="time again, even if a table is kept"
    )
    parser.set_defaults(func=tune)


def _add_bench(subparsers) -> None:
    bench = subparsers.add_parser(
        "bench",
        help="check an op on this machine, then time it",
        description="Checks an op on this machine, then times it.",
    )
    parser = bench.add_subparsers(dest="what", required=True, metavar="WHAT").add_parser(
        "allreduce",
        help="the sum over ranks: on this machine's GPUs against NCCL, or its CPU against gloo",
        description="Times sums over ranks once their bits are right: on two or more GPUs every "
        "algorithm against NCCL, inside a graph; on the CPU the communicator against gloo. With "
        '--box nothing runs, and every row is labelled "predicted".',
    )
    _add_machine(parser)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (15)")
    parser.add_argument("--calls", type=int, default=60, help="calls in a turn (60)")
    parser.add_argument("--cpu", action="store_true", help="the CPU's ranks, even where GPUs are")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(func=bench_allreduce)


def _add_machine(parser) -> None:
    add = parser.add_argument
    add("--box", metavar="NAME", help="a described box, simulated; all: each of them")
    add(
        "--measurements",
        type=Path,
        metavar="FILE",
        help="links as measured (what spec-kernels links --json prints), simulated",
    )
    add(
        "--topology",
        type=Path,
        metavar="FILE",
        help="with --measurements, the tree (what spec-kernels topology --json prints); without it "
        "all GPUs are taken to be below one switch",
    )
    add("--ranks", type=int, help="the machine's first ranks (all, at most 8)")
    add(
        "--tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="bf16 rows in a message (1 2 3 4 8 16 64)",
    )
    add("--hidden", type=int, default=7168, help="elements of a row (7168)")


def _check_machine(args: argparse.Namespace) -> None:
    if args.ranks is not None and not 1 <= args.ranks <= 8:
        raise _CannotRun(f"--ranks: expected 1 to 8, got {args.ranks}")
    if args.hidden < 1 or any(n < 1 for n in args.tokens or ()):
        raise _CannotRun("--tokens, --hidden: expected positive numbers")
    if args.box and args.measurements:
        raise _CannotRun("--box and --measurements exclude each other")
    if args.topology and not args.measurements:
        raise _CannotRun("--topology goes with --measurements")


def _machines(args: argparse.Namespace):
    """The boxes to simulate that the arguments name; none if they name none."""
    from spec_kernels.comm.p2p import LinkMeasurements
    from spec_kernels.comm.selection import box_for
    from spec_kernels.comm.simulator import boxes
    from spec_kernels.comm.topology import Topology

    if args.measurements:
        measured = LinkMeasurements.from_json(args.measurements.read_text())
        tree = None
        if args.topology:
            data = json.loads(args.topology.read_text())
            wrapped = isinstance(data, dict) and "topology" in data
            tree = Topology.from_dict(data["topology"] if wrapped else data)
        return [box_for(args.ranks or len(measured.gpus), tree, measured)]
    if args.box is None:
        return []
    known = boxes()
    if args.box != "all" and args.box not in known:
        raise _CannotRun(f"--box: expected all or one of {', '.join(known)}, got {args.box}")
    return list(known.values()) if args.box == "all" else [known[args.box]]


def _run(what: str, args: argparse.Namespace, run) -> int:
    """Exit code of ``run(args)``; 1 if a rank failed, 2 if it cannot be done, each with a line."""
    from spec_kernels.comm.launch import RankError

    try:
        _check_machine(args)
        return run(args)
    except RankError as error:
        print(f"spec-kernels {what}: rank {error.rank}: {error.message}", file=sys.stderr)
        return 1
    except (_CannotRun, OSError, RecursionError, ValueError) as error:
        print(f"spec-kernels {what}: {error}", file=sys.stderr)
        return 2


def tune(args: argparse.Namespace) -> int:
    """Exit code 0, 1 where a rank failed, or 2 for bad arguments, files, or no GPUs."""
    return _run("tune", args, _tune)


def _tune(args: argparse.Namespace) -> int:
    from spec_kernels.comm.prediction import predict, render
    from spec_kernels.comm.tuning import TOKENS

    machines = _machines(args)
    if not machines:
        return _tune_here(args)
    found = [
        predict(box, args.ranks or min(8, box.num_ranks), args.tokens or TOKENS, args.hidden)
        for box in machines
    ]
    if args.json:
        print(json.dumps([p.as_dict() for p in found], indent=1))
    else:
        print("\n\n".join("\n".join(render(p)) for p in found))
    return 0


def _tune_here(args: argparse.Namespace) -> int:
    from spec_kernels.comm.gpu_timing import gpus_here, tune_on_gpus

    report = gpus_here()
    if isinstance(report, str):
        raise _CannotRun(f"{report}; --box NAME or --measurements FILE predicts")
    selection = tune_on_gpus(report, args.ranks, refresh=args.refresh)
    if args.json:
        print(json.dumps(selection.as_dict(), indent=1))
    else:
        print("\n".join(selection.lines()))
    return 0


def bench_allreduce(args: argparse.Namespace) -> int:
    """Exit code 0, 1 where a sum is wrong or a rank failed, or 2 for bad arguments or files."""
    return _run("bench allreduce", args, _bench_allreduce)


def _bench_allreduce(args: argparse.Namespace) -> int:
    from spec_kernels.comm import bench
    from spec_kernels.comm.tuning import TOKENS

    tokens = args.tokens or TOKENS
    tables = []
    for box in _machines(args):
        ranks = args.ranks or min(8, box.num_ranks)
        box = box.select(range(ranks)) if ranks < box.num_ranks else box
        rows = bench.predicted(box, [2 * args.hidden * n for n in tokens], ranks, box.island_size)
        tables.append((f"{box.name}, {ranks} ranks: PREDICTED by the simulator", rows))
    if not tables:
        tables.append(_measure(args, tokens))
    if args.json:
        data = [{"title": title, "rows": [r.as_dict() for r in rows]} for title, rows in tables]
        print(json.dumps(data, indent=1))
    else:
        print("\n\n".join("\n".join([title, *bench.table(rows)]) for title, rows in tables))
    return 0


def _measure(args: argparse.Namespace, tokens):
    """(title, rows) of this machine."""
    from torch.distributed import is_nccl_available

    from spec_kernels.comm.bench import measured_on_cpu
    from spec_kernels.comm.gpu_timing import gpus_here, measured_on_gpus
    from spec_kernels.comm.policy import num_cores

    report = "--cpu" if args.cpu else gpus_here()
    if not isinstance(report, str):
        sizes = [2 * args.hidden * n for n in tokens]
        title = f"GPUs of this machine, {report.nvml.gpus[0].name}"
        if is_nccl_available():
            rows = measured_on_gpus(report, sizes, args.ranks)
        else:
            title += "; NCCL: unsupported, this torch has none"
            rows = measured_on_gpus(report, sizes, args.ranks, make_rival=None)
        return f"{rows[0].num_ranks} {title}", rows
    ranks = 8 if args.ranks is None else args.ranks
    if ranks < 2 or args.rounds < 1 or args.calls < 1:
        raise _CannotRun("expected at least 2 ranks, 1 round and 1 call")
    load = os.getloadavg()[0]
    rows = measured_on_cpu(ranks, tokens, args.hidden, args.rounds, args.calls)
    return f"{ranks} ranks on {num_cores()} cores, load {load:.1f} ({report})", rows
