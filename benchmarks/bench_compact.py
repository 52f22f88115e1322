"""compact against one gather and one scatter a layer: checked first, then timed in turns.

    python benchmarks/bench_compact.py [--rounds N] [--json FILE]

The rival has the flat slots of the rows computed for it; what is timed is the copying alone.
"""

from __future__ import annotations

import argparse

import torch

from spec_kernels import compact
from spec_kernels.testing.compare import assert_same_bits
from spec_kernels.testing.timing import ratio, time_in_turns, write_json

PAGE, CONTEXT, NUM_PAGES = 16, 1000, 80
# name: layers, elements of a cached row, dtype, accepted nodes
SHAPES = {
    "bundled model": (4, 80, torch.float32, [0, 2, 3]),
    "61 layers of latent cache": (61, 576, torch.bfloat16, [0, 2, 5]),
    "61 layers, 7 rows": (61, 576, torch.bfloat16, [0, 3, 9, 20, 31, 40, 55, 63]),
    "32 layers, K and V of 8 heads": (64, 1024, torch.bfloat16, [0, 2, 5, 9]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json")
    options = parser.parse_args()

    rows = []
    print(f"{'shape':32}{'rows moved':>11}{'us':>9}{'best':>9}{'torch us':>10}  ratio")
    for shape, (num_layers, width, dtype, path) in SHAPES.items():
        g = torch.Generator().manual_seed(0)
        caches = [
            torch.randn(NUM_PAGES, PAGE, width, generator=g).to(dtype) for _ in range(num_layers)
        ]
        rival = [c.clone() for c in caches]
        table = torch.randperm(NUM_PAGES, generator=g)[None]
        nodes = torch.tensor(path)

        def slots(positions, table=table):
            return table[0, positions // PAGE] * PAGE + positions % PAGE

        source, target = slots(CONTEXT + nodes), slots(CONTEXT + torch.arange(len(path)))
        arguments = (nodes[None], torch.tensor([len(path) - 1]), torch.tensor([CONTEXT]), table)

        def by_layer(rival=rival, source=source, target=target):
            for c in rival:
                flat = c.flatten(0, 1)
                flat.index_copy_(0, target, flat.index_select(0, source))

        compact(*arguments, caches)
        by_layer()
        for a, b in zip(caches, rival, strict=True):
            assert_same_bits(a, b)
        t = time_in_turns(
            {
                "ours": lambda a=arguments, caches=caches: compact(*a, caches),
                "torch": by_layer,
            },
            rounds=options.rounds,
        )
        r = ratio(t["torch"], t["ours"])
        num_moved = (len(path) - 1) * num_layers
        print(
            f"{shape:32}{num_moved:11}{t['ours'].median:9.1f}{t['ours'].best:9.1f}"
            f"{t['torch'].median:10.1f}  {r}",
            flush=True,
        )
        rows.append(
            {
                "shape": shape,
                "num_rows_moved": num_moved,
                "row_bytes": width * dtype.itemsize,
                "us_median": t["ours"].median,
                "us_best": t["ours"].best,
                "torch_us_median": t["torch"].median,
                "ratio": r.median,
                "ratio_low": r.low,
                "ratio_high": r.high,
            }
        )
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
