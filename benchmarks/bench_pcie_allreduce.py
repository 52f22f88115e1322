"""All-reduce among the ranks of this machine, shared memory against gloo and MPI: checked, timed.

    python benchmarks/bench_pcie_allreduce.py                      8 ranks
    python benchmarks/bench_pcie_allreduce.py --ranks 2 3 4 5 6 7 8 --plot cost.png

A sample is one call on rank 0, every rank calling as fast as it can; contenders take turns. "x
gloo" and "x MPI" are medians over rounds of the rival's median over ours in that round, with 10-90
% spread: under 1 the rival is faster. Ours adds bfloat16 in float32; MPI has no bfloat16 and adds
float32 of as many bytes, half the numbers. "norm" is the all-reduce with residual add, RMSNorm and
capture in one call, and "apart" the same work in two. GB/s counts the message once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket

import mpi_ranks
import numpy as np
import torch

from spec_kernels.comm.bench import check_sums, contribution, gloo_group, take_turns
from spec_kernels.comm.launch import launch
from spec_kernels.ops import hidden_capture
from spec_kernels.ops.pcie_allreduce.algorithms import LOSSY, NAMES
from spec_kernels.ops.pcie_allreduce.reference import lossy_sum, ordered_sum
from spec_kernels.testing.compare import assert_same_bits
from spec_kernels.testing.timing import Ratio, machine, write_json

HIDDEN = 7168
ROWS = (1, 4, 16, 64)
GLOO_CALLS = 2  # in a round: tens of milliseconds each


def worker(comm, listener, mpi, num_rounds: int, calls: int) -> list[dict]:
    """In each rank: samples by contender and round, for each number of rows."""
    gloo = gloo_group(comm.rank, comm.world_size, listener)
    results = []
    for rows in ROWS:
        parts = [contribution(r, rows, HIDDEN) for r in range(comm.world_size)]
        x = parts[comm.rank]
        expected = ordered_sum(parts)
        out, theirs, summed = torch.empty_like(x), x.clone(), torch.empty_like(x)
        residual, weight = torch.zeros_like(x), torch.ones(HIDDEN, dtype=x.dtype)
        capture = torch.empty(rows, 3, HIDDEN, dtype=x.dtype)

        def ours(x=x, out=out):
            comm.all_reduce(x, out)

        def norm(x=x, residual=residual, weight=weight, out=out, capture=capture):
            comm.all_reduce_norm(x, residual, weight, 1e-5, capture=capture, slot=1, out=out)

        def apart(x=x, residual=residual, weight=weight, out=out, capture=capture, summed=summed):
            comm.all_reduce(x, summed)
            hidden_capture(summed, residual, weight, 1e-5, capture=capture, slot=1, out=out)

        def rival(x=x, theirs=theirs):
            theirs.copy_(x)
            gloo.allreduce([theirs]).wait()

        apart()
        streams = out.clone(), residual.clone(), capture[:, 1].clone()
        residual.zero_()
        norm()
        for fused, separate in zip((out, residual, capture[:, 1]), streams, strict=True):
            assert_same_bits(fused, separate)
        ours()
        rival()
        check_sums(out, theirs, expected, f"{rows} rows, rank {comm.rank}")

        contenders = {"ours": (ours, calls), "norm": (norm, calls), "apart": (apart, calls)}
        samples = {name: [] for name in (*contenders, "gloo", *(["mpi"] if mpi else []))}
        contenders["gloo"] = rival, GLOO_CALLS
        for _ in range(num_rounds):
            for name, times in take_turns(comm.barrier, contenders, 1).items():
                samples[name] += times
            # Our ranks sleep while MPI's have the machine.
            comm.barrier()
            if mpi and comm.rank == 0:
                samples["mpi"].append(mpi.turn(x.nbytes, calls))
            comm.barrier()
        results.append({"rows": rows, **samples})
    comm.barrier()  # rank 0 serves the store of all
    return results


def against(rival: list, ours: list) -> Ratio:
    ratios = np.median(np.array(rival), axis=1) / np.median(np.array(ours), axis=1)
    return Ratio(*(float(np.percentile(ratios, p)) for p in (50, 10, 90)))


def measure(num_ranks: int, mpi, num_rounds: int, calls: int) -> list[dict]:
    """Rows of the table; those of ``mpi`` (``MPIRanks`` or None) too."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        results = launch(worker, num_ranks, listener, mpi, num_rounds, calls)[0]
    table = []
    for r in results:
        size = r["rows"] * HIDDEN * 2
        p10, p50, p90 = np.percentile(r["ours"], (10, 50, 90))
        row = {
            "ranks": num_ranks,
            "rows": r["rows"],
            "hidden": HIDDEN,
            "bytes": size,
            "us_min": float(np.min(r["ours"])),
            "us_p10": float(p10),
            "us_p50": float(p50),
            "us_p90": float(p90),
            "gb_per_s": float(size / p50 / 1e3),
            "norm_us_p50": float(np.median(r["norm"])),
            "apart_us_p50": float(np.median(r["apart"])),
            "exact": True,  # or the worker would have raised
        }
        for name, rival, mine in (
            ("gloo", "gloo", "ours"),
            ("mpi", "mpi", "ours"),
            ("apart", "apart", "norm"),
        ):
            if rival in r:
                ratio = against(r[rival], r[mine])
                row |= {f"{name}_us_p50": float(np.median(r[rival])), f"x_{name}": ratio.median}
                row |= {f"x_{name}_p10": ratio.low, f"x_{name}_p90": ratio.high}
        table.append(row)
    return table


def spread(row: dict, name: str) -> str:
    return str(Ratio(row[f"x_{name}"], row[f"x_{name}_p10"], row[f"x_{name}_p90"]))


def print_table(table: list[dict], why_no_mpi: str | None) -> None:
    print(
        f"{'ranks':>5} {'bfloat16':>8} {'bytes':>7} | {'us p10':>7} {'p50':>7} {'p90':>7} "
        f"{'GB/s':>5} | {'gloo':>6} {'x gloo [10-90 %]':>20} | {'MPI':>6} {'x MPI [10-90 %]':>18} "
        f"| {'norm':>6} {'apart / norm':>18} | check"
    )
    for r in table:
        mpi = f"{'unsupported':>25}"
        if why_no_mpi is None:
            mpi = f"{r['mpi_us_p50']:6.0f} {spread(r, 'mpi'):>18}"
        print(
            f"{r['ranks']:>5} {r['rows']:>3}x{HIDDEN} {r['bytes']:>7} | {r['us_p10']:7.1f} "
            f"{r['us_p50']:7.1f} {r['us_p90']:7.1f} {r['gb_per_s']:5.2f} | {r['gloo_us_p50']:6.0f} "
            f"{spread(r, 'gloo'):>20} | {mpi} | {r['norm_us_p50']:6.1f} {spread(r, 'apart'):>18} "
            "| bit-exact",
            flush=True,
        )
    if why_no_mpi is not None:
        print(f"unsupported: MPI: {why_no_mpi}")


def lossy_errors(num_ranks: int) -> list[dict]:
    """Of sums of standard normal numbers, in parts of the exact sums' root mean square."""
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(16, HIDDEN, generator=g).bfloat16() for _ in range(num_ranks)]
    exact = sum(p.double() for p in parts)
    scale = exact.square().mean().sqrt()
    sums = {"one rounding": ordered_sum(parts)}
    for algorithm in sorted(LOSSY):
        if algorithm != 5 or num_ranks in (4, 6, 8):
            sums[NAMES[algorithm]] = lossy_sum(parts, algorithm)
    table = []
    for name, total in sums.items():
        error = (total.double() - exact) / scale
        table.append(
            {
                "ranks": num_ranks,
                "sum": name,
                "error_rms": error.square().mean().sqrt().item(),
                "error_max": error.abs().max().item(),
            }
        )
    return table


def plot(table: list[dict], about: str, path: str) -> None:
    """Cost against ranks, a panel for each size; MPI beside it where it was there."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    sizes = sorted({r["bytes"] for r in table})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(4 * len(sizes), 4.2), sharey=True)
    for axis, size in zip(np.atleast_1d(axes), sizes, strict=True):
        rows = sorted((r for r in table if r["bytes"] == size), key=lambda r: r["ranks"])
        ranks = [r["ranks"] for r in rows]
        lines = [
            ("shared memory", "us_p50", "C0", "o-"),
            ("with add and norm", "norm_us_p50", "C2", "^-"),
        ]
        lines += [("MPI", "mpi_us_p50", "C1", "s-"), ("gloo", "gloo_us_p50", "C3", "x-")]
        for label, key, color, style in lines:
            if key in rows[0]:
                axis.plot(ranks, [r[key] for r in rows], style, color=color, label=label)
        low, high = ([r[f"us_{p}"] for r in rows] for p in ("p10", "p90"))
        axis.fill_between(ranks, low, high, color="C0", alpha=0.2, linewidth=0)
        axis.set(title=f"{size / 1000:.0f} kB", xlabel="ranks", yscale="log", xticks=ranks)
        axis.grid(True, which="both", alpha=0.25)
    first = np.atleast_1d(axes)[0]
    first.set_ylabel("microseconds a call (median; band: 10-90 %)")
    first.legend(fontsize=8)
    figure.suptitle(about, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="2 to 8 (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=60, help="calls in a round, of gloo 2")
    parser.add_argument("--plot", metavar="FILE", help="draw cost against ranks and size")
    parser.add_argument("--json", help="write the table and the machine to this file")
    args = parser.parse_args()
    if not all(2 <= n <= 8 for n in args.ranks):
        parser.error(f"--ranks: expected 2 to 8, got {args.ranks}")
    about = machine()
    policies = {os.SCHED_OTHER: "ordinary", os.SCHED_FIFO: "SCHED_FIFO", os.SCHED_RR: "SCHED_RR"}
    scheduling = policies.get(os.sched_getscheduler(0), "other")
    where = (
        f"{about['cores']} cores ({about['cpu']}), load {about['load']:.1f}, {scheduling} "
        f"scheduling, commit {about['commit']}, {about['date']}"
    )
    why_no_mpi = mpi_ranks.missing()
    table = []
    for num_ranks in args.ranks:
        mpi = None
        if why_no_mpi is None:
            try:
                mpi = mpi_ranks.MPIRanks(num_ranks)
            except RuntimeError as error:
                why_no_mpi = str(error)
        if not table:
            print(where + (f", {mpi.library}" if mpi else ""))
        with mpi or contextlib.nullcontext():
            rows = measure(num_ranks, mpi, args.rounds, args.calls)
        print_table(rows, why_no_mpi)
        table += rows
    errors = [row for num_ranks in args.ranks for row in lossy_errors(num_ranks)]
    print("error of a sum of standard normal bfloat16, in parts of the exact sums' rms")
    for row in errors:
        print(
            f"{row['ranks']:>5} {row['sum']:>18} | rms {row['error_rms']:.2e} | "
            f"max {row['error_max']:.2e}"
        )
    if args.plot:
        plot(table, where, args.plot)
    if args.json:
        for row in table:
            row |= {"scheduling": scheduling}
        write_json(args.json, table + errors)


if __name__ == "__main__":
    main()
