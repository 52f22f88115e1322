"""tree_verify against a Python walk over PyTorch's choices: checked first, then timed in turns.

    python benchmarks/bench_tree_verify.py [--rounds N] [--json FILE]

"rows" is the number of logit rows on the walked path, all that the kernel reads; "GB/s" are their
bytes over the best time, rows of q included. Rows that were just written, as in decoding, come from
the cache. "drafts from q" rejects one draft, or one of each sibling, at the end of the path.
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
    "drafts from q": {"temperature": 1.0},
    "drafts from q, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "typical": {"temperature": 1.0},
}
TYPICAL = (0.09, 0.3)
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


def make_drafts(logits, tree, parents):
    """q ``[1, N, V]``: most of its mass on the children, alike, so that the walk is certain."""
    q = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    for node, parent in enumerate(parents):
        if parent >= 0:
            q[0, parent, tree.tokens[0, node]] = 30.0
    return q.softmax(-1).to(logits.dtype)


def probabilities(row, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0):
    """As written in many a PyTorch sampler."""
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
    return p


def by_choice(row, children, rule):
    """(token, the child that carries it or -1): the target's own choice."""
    if rule:
        token = int(probabilities(row, **rule).multinomial(1))
    else:
        token = int(row.argmax())
    return token, next((child for child, x in children if x == token), -1)


def by_rejection(row, children, rule, q):
    p, q = probabilities(row, **rule), q.float()
    for child, x in children:
        if torch.rand(()) < p[x] / q[x]:
            return x, child
        p = (p - q).clamp_(min=0)
        p /= p.sum()
        q[x] = 0.0
        q /= q.sum()
    return int(p.multinomial(1)), -1


def by_threshold(row, children, rule):
    p = probabilities(row, **rule)
    epsilon, delta = TYPICAL
    limit = min(epsilon, delta * float(torch.exp(torch.special.xlogy(p, p).sum())))
    best = max(children, key=lambda c: float(p[c[1]]), default=None)
    if best is not None and p[best[1]] > limit:
        return best[1], best[0]
    return int(p.multinomial(1)), -1


def python_walk(logits, tree, step):
    """One request: the links as lists, ``step(node, row, [(child, token)])`` a node."""
    tokens, first_child = tree.tokens[0].tolist(), tree.first_child[0].tolist()
    next_sibling = tree.next_sibling[0].tolist()
    node, path, emitted = 0, [0], []
    while True:
        children, child = [], first_child[node]
        while child >= 0:
            children.append((child, tokens[child]))
            child = next_sibling[child]
        token, node = step(node, logits[0, node], children)
        emitted.append(token)
        if node < 0:
            return torch.tensor(path), torch.tensor(emitted)
        path.append(node)


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
            if ("drafts" in rule_name or rule_name == "typical") and not num_agreed:
                continue  # nothing to accept
            for dtype_name, dtype in DTYPES.items():
                logits, tree = make(vocab, parents, num_agreed, dtype, "flat" in rule_name)
                links = (tree.tokens, tree.first_child, tree.next_sibling, torch.tensor([100]))
                sampling = {n: torch.tensor([v]) for n, v in rule.items()}
                if rule:
                    sampling["seeds"] = torch.tensor([5])
                bytes_per_row = vocab * logits.element_size()

                def step(node, row, children, rule=rule):
                    return by_choice(row, children, rule)

                if "drafts" in rule_name:
                    q = sampling["draft_probs"] = make_drafts(logits, tree, parents)
                    bytes_per_row *= 2

                    def step(node, row, children, rule=rule, q=q):
                        return by_rejection(row, children, rule, q[0, node].clone())

                elif rule_name == "typical":
                    sampling["typical"] = TYPICAL

                    def step(node, row, children, rule=rule):
                        return by_threshold(row, children, rule)

                got = tree_verify(logits, *links, **sampling)
                want = tree_verify(logits, *links, **sampling, backend="reference")
                num_rows = int(got.num_accepted) + 1
                assert got.tokens.equal(want.tokens), "differs from the reference"
                if "flat" not in rule_name:
                    path, emitted = python_walk(logits, tree, step)
                    assert got.accept_index[0, :num_rows].equal(path.int())
                    assert got.tokens[0, :num_rows].equal(emitted)
                t = time_in_turns(
                    {
                        "ours": lambda a=logits, b=links, c=sampling, out=got: tree_verify(
                            a, *b, **c, out=out
                        ),
                        "python": lambda a=logits, b=tree, c=step: python_walk(a, b, c),
                    },
                    rounds=options.rounds,
                )
                r = ratio(t["python"], t["ours"])
                gbps = num_rows * bytes_per_row / t["ours"].best / 1e3
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
