"""hidden_capture against three PyTorch ops (add, copy, RMSNorm): checked, then timed in turns.

    python benchmarks/bench_hidden_capture.py [--dtype fp32|bf16] [--rounds N] [--json FILE]

"of copy" is the share of this machine's own copy bandwidth, measured in the same run, that the
bytes of x, residual (read and written), out and capture stand for. Small shapes live in the caches
and may exceed it; there the fixed cost of a call is what counts.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from spec_kernels.ops import hidden_capture
from spec_kernels.testing.compare import assert_as_accurate, assert_same_bits
from spec_kernels.testing.timing import copy_gbps, ratio, time_in_turns, write_json

SHAPES = [(1, 192), (4, 192), (1, 7168), (4, 7168), (16, 7168), (64, 7168), (256, 7168)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-5


def three_ops(x, residual, weight, capture):
    residual.add_(x)
    capture[: len(x), 1].copy_(residual)
    return F.rms_norm(residual, weight.shape, weight, EPS)


def check(x, residual, weight):
    ours, theirs = residual.clone(), residual.clone()
    captures = [torch.zeros(len(x), 3, x.shape[1], dtype=x.dtype) for _ in range(2)]
    got = hidden_capture(x, ours, weight, EPS, capture=captures[0], slot=1)
    plain = three_ops(x, theirs, weight, captures[1])
    assert_same_bits(ours, theirs)
    assert_same_bits(*captures)
    r = ours.double()
    exact = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + EPS) * weight.double()
    assert_as_accurate(got, exact, plain)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()

    g = torch.Generator().manual_seed(0)
    gbps = copy_gbps()
    print(f"copy {gbps:.1f} GB/s (read + write), {torch.get_num_threads()} threads")
    print(f"{'dtype':7}{'T':>5}{'H':>6}{'us':>9}{'best':>9}{'3 ops us':>10}  {'ratio':22}of copy")
    rows = []
    for name in options.dtype or DTYPES:
        for num_rows, hidden in SHAPES:
            # Zero keeps the residual finite over any number of calls; the arithmetic is the same.
            x = torch.zeros(num_rows, hidden, dtype=DTYPES[name])
            residual = torch.randn(num_rows, hidden, generator=g).to(x.dtype)
            weight = torch.randn(hidden, generator=g).to(x.dtype)
            check(torch.randn(num_rows, hidden, generator=g).to(x.dtype), residual, weight)
            capture = torch.zeros(num_rows, 3, hidden, dtype=x.dtype)
            out = torch.empty_like(x)
            tensors = {"capture": capture, "slot": 1, "out": out}
            t = time_in_turns(
                {
                    "ours": lambda a=(x, residual, weight, EPS), k=tensors: hidden_capture(*a, **k),
                    "three": lambda a=(x, residual, weight, capture): three_ops(*a),
                },
                rounds=options.rounds,
            )
            r = ratio(t["three"], t["ours"])
            share = 5 * x.numel() * x.element_size() / t["ours"].best / 1e3 / gbps
            print(
                f"{name:7}{num_rows:5}{hidden:6}{t['ours'].median:9.1f}{t['ours'].best:9.1f}"
                f"{t['three'].median:10.1f}  {str(r):22}{share:.0%}",
                flush=True,
            )
            rows.append(
                {
                    "dtype": name,
                    "tokens": num_rows,
                    "hidden": hidden,
                    "us_median": t["ours"].median,
                    "us_best": t["ours"].best,
                    "three_ops_us_median": t["three"].median,
                    "ratio": r.median,
                    "ratio_low": r.low,
                    "ratio_high": r.high,
                    "share_of_copy": share,
                    "copy_gbps": gbps,
                }
            )
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
