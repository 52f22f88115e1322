"""merge_states against logsumexp, exp and a weighted sum in PyTorch: checked, then timed in turns.

    python benchmarks/bench_merge_states.py [--rounds N] [--json FILE]

"of copy" is the share of this machine's own copy bandwidth, measured in the same run, that reading
every part and writing the result stand for. Shapes that live in the caches may exceed it.
"""

from __future__ import annotations

import argparse

import torch

from spec_kernels.ops import merge_states
from spec_kernels.testing.timing import copy_gbps, ratio, time_in_turns, write_json

# name: parts, nodes, heads, dimension
SHAPES = {
    "Kimi, 8 shards, 1 node": (8, 1, 8, 512),
    "Kimi, 8 shards, tree of 16": (8, 16, 8, 512),
    "Kimi, 8 shards, tree of 64": (8, 64, 64, 512),
    "grouped, 2 shards, chain of 3": (2, 4, 32, 128),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def plain(outs, lses):
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse).unsqueeze(-1)
    return (outs * weights).sum(0).to(outs.dtype), lse


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()

    copy = copy_gbps()
    print(f"copy {copy:.1f} GB/s (read + write), {torch.get_num_threads()} threads")
    print(f"{'shape':32}{'dtype':6}{'us':>9}{'best':>9}{'plain us':>10}  {'ratio':24}of copy")
    rows = []
    for shape, (parts, nodes, heads, dim) in SHAPES.items():
        for name, dtype in DTYPES.items():
            g = torch.Generator().manual_seed(0)
            outs = torch.randn(parts, 1, nodes, heads, dim, generator=g).to(dtype)
            lses = torch.randn(parts, 1, nodes, heads, generator=g)
            out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])

            def ours(a=(outs, lses), out=out, lse=lse):
                return merge_states(*a, out=out, lse=lse)

            def theirs(a=(outs, lses)):
                return plain(*a)

            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            for a, b in zip(ours(), theirs(), strict=True):
                torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
            t = time_in_turns({"ours": ours, "plain": theirs}, rounds=options.rounds)
            r = ratio(t["plain"], t["ours"])
            moved = outs.nbytes + lses.nbytes + out.nbytes + lse.nbytes
            share = moved / t["ours"].best / 1e3 / copy
            print(
                f"{shape:32}{name:6}{t['ours'].median:9.1f}{t['ours'].best:9.1f}"
                f"{t['plain'].median:10.1f}  {str(r):24}{share:.0%}",
                flush=True,
            )
            rows.append(
                {
                    "shape": shape,
                    "dtype": name,
                    "num_parts": parts,
                    "us_median": t["ours"].median,
                    "us_best": t["ours"].best,
                    "plain_us_median": t["plain"].median,
                    "ratio": r.median,
                    "ratio_low": r.low,
                    "ratio_high": r.high,
                    "share_of_copy": share,
                    "copy_gbps": copy,
                }
            )
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
