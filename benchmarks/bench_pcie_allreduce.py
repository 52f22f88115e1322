"""All-reduce among the ranks of this machine, shared memory against gloo: checked, then timed.

    python benchmarks/bench_pcie_allreduce.py [--ranks 8] [--json FILE]

A sample is one call on rank 0, every rank calling as fast as it can. "x gloo" is the median over
rounds of gloo's time over ours in that round, with its 10-90 % spread. GB/s counts the message
once.
"""

from __future__ import annotations

import argparse
import socket

import numpy as np

from spec_kernels.comm.bench import cpu_worker
from spec_kernels.comm.launch import launch
from spec_kernels.testing.timing import Ratio, machine, write_json

HIDDEN = 7168
ROWS = (1, 4, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=60, help="calls of ours in a round")
    parser.add_argument("--json", help="write the table and the machine to this file")
    args = parser.parse_args()
    if not 2 <= args.ranks <= 8:
        parser.error(f"--ranks: expected 2 to 8, got {args.ranks}")
    about = machine()
    cores, cpu, load = about["cores"], about["cpu"], about["load"]
    print(f"{args.ranks} ranks on {cores} cores ({cpu}), load {load:.1f}")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        results = launch(cpu_worker, args.ranks, listener, ROWS, HIDDEN, args.rounds, args.calls)[0]
    print(
        f"{'bfloat16':>10} {'bytes':>8} | {'us min':>7} {'p10':>7} {'p50':>7} {'p90':>7} | "
        f"{'GB/s':>6} | {'gloo p50':>9} | {'x gloo [10-90 %]':>22} | check"
    )
    table = []
    for r in results:
        ours = np.array(r["ours"])
        gloo = np.array(r["gloo"])
        ratios = np.median(gloo, axis=1) / np.median(ours, axis=1)
        times = Ratio(*(float(np.percentile(ratios, p)) for p in (50, 10, 90)))
        size = r["rows"] * HIDDEN * 2
        low = ours.min()
        p10, p50, p90 = np.percentile(ours, (10, 50, 90))
        print(
            f"{r['rows']:>5}x{HIDDEN} {size:>8} | {low:7.0f} {p10:7.0f} {p50:7.0f} {p90:7.0f} | "
            f"{size / p50 / 1e3:6.2f} | {np.median(gloo):9.0f} | {times!s:>22} | bit-exact"
        )
        table.append(
            {
                "ranks": args.ranks,
                "rows": r["rows"],
                "hidden": HIDDEN,
                "bytes": size,
                "us_min": float(ours.min()),
                "us_p10": float(p10),
                "us_p50": float(p50),
                "us_p90": float(p90),
                "gb_per_s": size / p50 / 1e3,
                "gloo_us_p50": float(np.median(gloo)),
                "x_gloo": times.median,
                "x_gloo_p10": times.low,
                "x_gloo_p90": times.high,
                "exact": True,  # or cpu_worker would have raised
            }
        )
    if args.json:
        write_json(args.json, table)


if __name__ == "__main__":
    main()
