"""tree_verify against a Python walk over PyTorch's choices: checked first, then timed in turns.

    python benchmarks/bench_tree_verify.py [--rounds N] [--json FILE]

"rows" is the number of logit rows on the walked path, all that the kernel reads; "GB/s" are their
bytes over the best time. Rows that were just written, as in decoding, come from the cache.
"""

from __future__ import annotations

import argparse

import torch

from spec_kernels import link_tree, tree_verify
from spec_kernels.testing.timing import copy_gbps, ratio, time_in_turns, write_json

# name: V, parents, drafts on the path that the target agrees with
SHAPES = {
    "bundled model, chain of 3": (1024, [-1, 0, 1, 2], 2),
    "plain decoding": (163840, [-1], 0),
    "chain of 3": (163840, [-1, 0, 1, 2], 2),
    "tree of 16": (163840, [-1] + [(i - 1) // 2 for i in range(1, 16)], 3),
    "tree of 64": (163840, [-1] + [(i - 1) // 4 for i in range(1, 64)], 3),
}
# "flat": nothing is agreed with, so one row is walked, and its nucleus holds thousands of tokens.
RULES = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-p 0.9, flat": {"temperature": 1.0, "top_p": 0.9},
    "top-k 50, top-p 0.9, min-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(vocab, parents, num_agreed, dtype, flat):
    g = torch.Generator().manual_seed(0)
    num_nodes = len(parents)
    logits = torch.randn(1, num_nodes, vocab, generator=g) * 2.5
    tokens = torch.randperm(vocab, generator=g)[:num_nodes]
    node = 0
    for _ in range(0 if flat else num_agreed):
        child = parents.index(node)
        logits[0, node, tokens[child]] = 60.0
        node = child
    if not flat:
        logits[0, node, 7] = 60.0
    return logits.to(dtype), link_tree(tokens[None], torch.tensor(parents))


def choose(row, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0):
    """One token, as written in many a PyTorch sampler."""
    if temperature == 0.0:
        return int(row.argmax())
    row = row.float() / temperature
    if top_k:
        row = row.masked_fill(row < row.topk(top_k).values[-1], -torch.inf)
    if top_p < 1.0:
        ordered, ids = row.sort(descending=True)
        p = ordered.softmax(0)
        row = row.index_fill(0, ids[p.cumsum(0) - p >= top_p], -torch.inf)
    p = row.softmax(0)
    if min_p:
        p = p.masked_fill(p < min_p * p.max(), 0.0)
    return int(p.multinomial(1))


def python_walk(logits, tree, rule):
    """One request: the links as lists, a choice a node."""
    tokens, first_child = tree.tokens[0].tolist(), tree.first_child[0].tolist()
    next_sibling = tree.next_sibling[0].tolist()
    node, path, emitted = 0, [0], []
    while True:
        token = choose(logits[0, node], **rule)
        emitted.append(token)
        child = first_child[node]
        while child >= 0 and tokens[child] != token:
            child = next_sibling[child]
        if child < 0:
            return torch.tensor(path), torch.tensor(emitted)
        path.append(child)
        node = child


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json")
    options = parser.parse_args()

    torch.manual_seed(0)
    rows = []
    print(f"copy {copy_gbps():.1f} GB/s (read + write), {torch.get_num_threads()} threads")
    header = f"{'shape':27}{'rule':28}{'dtype':6}{'rows':>5}{'us':>10}{'best':>10}"
    print(f"{header}{'python us':>11}  {'ratio':24}GB/s")
    for shape, (vocab, parents, num_agreed) in SHAPES.items():
        for rule_name, rule in RULES.items():
            if "flat" in rule_name and num_agreed:
                continue  # one row is walked whatever the tree
            for dtype_name, dtype in DTYPES.items():
                logits, tree = make(vocab, parents, num_agreed, dtype, "flat" in rule_name)
                links = (tree.tokens, tree.first_child, tree.next_sibling, torch.tensor([100]))
                sampling = {n: torch.tensor([v]) for n, v in rule.items()}
                if rule:
                    sampling["seeds"] = torch.tensor([5])
                got = tree_verify(logits, *links, **sampling)
                want = tree_verify(logits, *links, **sampling, backend="reference")
                num_rows = int(got.num_accepted) + 1
                assert got.tokens.equal(want.tokens), "differs from the reference"
                if "flat" not in rule_name:
                    path, emitted = python_walk(logits, tree, rule)
                    assert got.accept_index[0, :num_rows].equal(path.int())
                    assert got.tokens[0, :num_rows].equal(emitted)
                t = time_in_turns(
                    {
                        "ours": lambda a=logits, b=links, c=sampling, out=got: tree_verify(
                            a, *b, **c, out=out
                        ),
                        "python": lambda a=logits, b=tree, c=rule: python_walk(a, b, c),
                    },
                    rounds=options.rounds,
                )
                r = ratio(t["python"], t["ours"])
                gbps = num_rows * vocab * logits.element_size() / t["ours"].best / 1e3
                print(
                    f"{shape:27}{rule_name:28}{dtype_name:6}{num_rows:5}{t['ours'].median:10.1f}"
                    f"{t['ours'].best:10.1f}{t['python'].median:11.1f}  {str(r):24}{gbps:.1f}",
                    flush=True,
                )
                rows.append(
                    {
                        "shape": shape,
                        "rule": rule_name,
                        "dtype": dtype_name,
                        "vocab": vocab,
                        "num_nodes": len(parents),
                        "num_rows_read": num_rows,
                        "us_median": t["ours"].median,
                        "us_best": t["ours"].best,
                        "python_us_median": t["python"].median,
                        "ratio": r.median,
                        "ratio_low": r.low,
                        "ratio_high": r.high,
                        "read_gbps": gbps,
                    }
                )
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
