"""All-reduce among the ranks of this machine, shared memory against gloo: checked, then timed.

    python benchmarks/bench_pcie_allreduce.py [--ranks 8] [--json FILE]

A sample is one call on rank 0, every rank calling as fast as it can. "x gloo" is the median over
rounds of gloo's time over ours in that round, with its 10-90 % spread. GB/s counts the message
once.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from datetime import timedelta

import numpy as np
import torch

from spec_kernels.comm.launch import launch
from spec_kernels.ops.pcie_allreduce.reference import ordered_sum
from spec_kernels.testing.timing import Ratio, machine, write_json

HIDDEN = 7168
ROWS = (1, 4, 16, 64)


def contribution(rank: int, rows: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * rows + rank)
    return torch.randn((rows, HIDDEN), generator=g).bfloat16()


def gloo_group(rank: int, world_size: int, listener: socket.socket):
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        world_size,
        is_master=rank == 0,
        master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
        wait_for_workers=False,
    )
    return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=60))


def worker(comm, listener: socket.socket, num_rounds: int, calls: int) -> list[dict]:
    gloo = gloo_group(comm.rank, comm.world_size, listener)
    results = []
    for rows in ROWS:
        x = contribution(comm.rank, rows)
        expected = ordered_sum([contribution(r, rows) for r in range(comm.world_size)])
        out = torch.empty_like(x)
        theirs = x.clone()

        def ours(x=x, out=out):
            comm.all_reduce(x, out)

        def rival(x=x, theirs=theirs):
            theirs.copy_(x)
            gloo.allreduce([theirs]).wait()

        ours()
        rival()
        exact = torch.equal(out, expected)
        error = (theirs.float() - expected.float()).abs().max().item()
        if not exact or error > 0.05 * expected.float().abs().max().item():
            raise AssertionError(f"{rows} rows: exact {exact}, gloo differs by {error}")
        samples = {"ours": [], "gloo": []}
        for _ in range(num_rounds):
            for name, call, num in (("ours", ours, calls), ("gloo", rival, 2)):
                comm.barrier()
                call()
                times = []
                for _ in range(num):
                    start = time.perf_counter()
                    call()
                    times.append((time.perf_counter() - start) * 1e6)
                samples[name].append(times)
        results.append({"rows": rows, "exact": exact, **samples})
    comm.barrier()  # rank 0 serves the store of all
    return results


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
        results = launch(worker, args.ranks, listener, args.rounds, args.calls)[0]
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
                "exact": r["exact"],
            }
        )
    if args.json:
        write_json(args.json, table)


if __name__ == "__main__":
    main()
