"""tree_build against torch.topk and linking in Python: checked first, then timed in turns.

python benchmarks/bench_tree_build.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse

import torch

from spec_kernels import DraftTree, num_words, tree_build
from spec_kernels.testing.calls import draft_pool
from spec_kernels.testing.timing import ratio, time_in_turns, write_json

# name: requests, live nodes k (each level expands k nodes by k children), levels, N
SHAPES = {
    "chain of 3": (1, 1, 3, 4),
    "k 4, 3 levels, N 16": (1, 4, 3, 16),
    "k 8, 5 levels, N 64": (1, 8, 5, 64),
    "k 10, 7 levels, N 60": (1, 10, 7, 60),
    "k 16, 8 levels, N 256": (1, 16, 8, 256),
    "8 requests, k 8, 5 levels, N 64": (8, 8, 5, 64),
}


def python_build(scores, candidates, slots, roots, num_nodes):
    """What a PyTorch drafter does: topk, sort, then parents, mask and links in a loop."""
    batch = scores.shape[0]
    best = scores.topk(num_nodes - 1, dim=1).indices.sort(dim=1).values
    tokens = torch.cat((roots[:, None], candidates.gather(1, best)), 1)
    all_parents, all_first, all_next, all_words = [], [], [], []
    for kept, parent_slots in zip(best.tolist(), slots.gather(1, best).tolist(), strict=True):
        node_of = {-1: 0, **{slot: i for i, slot in enumerate(kept, 1)}}
        parents = [-1] + [node_of[s] for s in parent_slots]
        first, following, last, bits = [-1] * num_nodes, [-1] * num_nodes, {}, [1]
        for node, parent in enumerate(parents[1:], 1):
            if parent in last:
                following[last[parent]] = node
            else:
                first[parent] = node
            last[parent] = node
            bits.append(bits[parent] | 1 << node)
        all_parents.append(parents)
        all_first.append(first)
        all_next.append(following)
        packed = b"".join(b.to_bytes(4 * num_words(num_nodes), "little") for b in bits)
        all_words.append(torch.frombuffer(bytearray(packed), dtype=torch.int32))
    words = torch.stack(all_words).view(batch, num_nodes, -1)
    links = (torch.tensor(t, dtype=torch.int32) for t in (all_parents, all_first, all_next))
    return (tokens, *links, words)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json")
    options = parser.parse_args()

    rows = []
    print(f"{'shape':34}{'pool':>6}{'us':>9}{'best':>9}{'python us':>11}  ratio")
    for shape, (batch, k, num_levels, num_nodes) in SHAPES.items():
        pool = draft_pool(batch, k, num_levels)
        out = DraftTree.allocate(batch, num_nodes)
        tree_build(*pool, out=out)
        got = (out.tokens, out.parents, out.first_child, out.next_sibling, out.ancestors)
        for x, y in zip(got, python_build(*pool, num_nodes), strict=True):
            assert x.equal(y), "differs from the Python tree"
        t = time_in_turns(
            {
                "ours": lambda pool=pool, out=out: tree_build(*pool, out=out),
                "python": lambda pool=pool, n=num_nodes: python_build(*pool, n),
            },
            rounds=options.rounds,
        )
        r = ratio(t["python"], t["ours"])
        size = pool[0].shape[1]
        print(
            f"{shape:34}{size:6}{t['ours'].median:9.1f}{t['ours'].best:9.1f}"
            f"{t['python'].median:11.1f}  {r}",
            flush=True,
        )
        rows.append(
            {
                "shape": shape,
                "pool": size,
                "num_nodes": num_nodes,
                "us_median": t["ours"].median,
                "us_best": t["ours"].best,
                "python_us_median": t["python"].median,
                "ratio": r.median,
                "ratio_low": r.low,
                "ratio_high": r.high,
            }
        )
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
