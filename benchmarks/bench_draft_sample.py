"""draft_sample against the PyTorch expression of the same choice: checked, then timed in turns.

    python benchmarks/bench_draft_sample.py [--rounds N] [--json FILE]

"calls" are the dispatcher's calls that launch something: what a device would be sent. The
expression takes its coins from a table that was made beforehand; draft_sample makes its own. Only
the op tells how likely each draft is held.
"""

from __future__ import annotations

import argparse

import torch

from spec_kernels import draft_sample
from spec_kernels.ops.draft_sample.reference import draft_coins
from spec_kernels.testing import graph_safe
from spec_kernels.testing.timing import copy_gbps, ratio, time_in_turns, write_json

# name: live rows, drafts a row, draft ids, target ids
SHAPES = {
    "bundled model, chain": (1, 1, 1024, 2048),
    "chain, 32000 draft ids": (1, 1, 32000, 163840),
    "tree 4 x 4, 32000 draft ids": (4, 4, 32000, 163840),
    "chain, all ids": (1, 1, 163840, 163840),
    "tree 4 x 4, all ids": (4, 4, 163840, 163840),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEPTH, CONTEXT = 1, 100


def likeliest(logits, target_ids, tokens):
    width = tokens.shape[2]
    if width == 1:
        chosen = logits.argmax(-1, keepdim=True)
    else:
        chosen = logits.topk(width, -1).indices
    tokens.copy_(target_ids.take(chosen))


def drawn(logits, target_ids, tokens, context_lens, temperature, coins, probs):
    """As written in many a PyTorch sampler, by integer weights, so that every rank agrees."""
    coins = coins.gather(1, (context_lens + DEPTH).view(-1, 1, 1).expand(-1, 1, coins.shape[2]))
    q = (logits.float() / temperature.view(-1, 1, 1)).softmax(-1)
    probs.index_copy_(2, target_ids, q)
    weights = (q * 2.0**40).long()
    for i in range(tokens.shape[2]):
        cumulative = weights.cumsum(-1)
        below = (cumulative[..., -1:] * coins[..., i : i + 1]).long()
        found = torch.searchsorted(cumulative, below, right=True).clamp_(max=q.shape[-1] - 1)
        tokens[..., i].copy_(target_ids.take(found)[..., 0])
        if i + 1 < tokens.shape[2]:
            weights = weights.scatter(-1, found, 0)


def num_calls(function) -> int:
    return len(graph_safe.inspect(function).launches)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json")
    options = parser.parse_args()

    rows = []
    print(f"copy {copy_gbps():.1f} GB/s (read + write), {torch.get_num_threads()} threads")
    header = f"{'shape':29}{'rule':7}{'dtype':6}{'calls':>12}{'us':>9}{'best':>9}"
    print(f"{header}{'torch us':>10}  ratio")
    for name, (num_rows, width, vocab, num_ids) in SHAPES.items():
        g = torch.Generator().manual_seed(0)
        target_ids = torch.randperm(num_ids, generator=g)[:vocab].sort().values
        for dtype_name, dtype in DTYPES.items():
            logits = (torch.randn(1, num_rows, vocab, generator=g) * 2.5).to(dtype)
            lens, warm, seeds = torch.tensor([CONTEXT]), torch.tensor([0.8]), torch.tensor([5])
            positions = torch.arange(CONTEXT + 2)
            coins = draft_coins(seeds.expand(len(positions)), positions, width)[None] / 2.0**32
            tokens = torch.zeros(1, num_rows, width, dtype=torch.int64)
            theirs, confidence = torch.zeros_like(tokens), torch.zeros(1, num_rows, width)
            probs = torch.zeros(1, num_rows, num_ids)
            other = torch.zeros_like(probs)
            out = {"tokens": tokens, "confidence": confidence}
            draws = {"temperature": warm, "seeds": seeds, "probs": probs}
            args = (logits, target_ids, lens, DEPTH)
            for rule, ours, torchs in (
                (
                    "greedy",
                    lambda a=args, o=out: draft_sample(*a, **o),
                    lambda a=(logits, target_ids, theirs): likeliest(*a),
                ),
                (
                    "drawn",
                    lambda a=args, o=out, d=draws: draft_sample(*a, **o, **d),
                    lambda a=(logits, target_ids, theirs, lens, warm, coins, other): drawn(*a),
                ),
            ):
                ours()
                right = [t.clone() for t in (tokens, confidence, probs)]
                options_of = draws if rule == "drawn" else {}
                draft_sample(*args, **out, **options_of, backend="reference")
                for mine, want in zip(right, (tokens, confidence, probs), strict=True):
                    assert mine.equal(want), "differs from the reference"
                torchs()
                if rule == "greedy" and dtype == torch.float32:  # bf16 has ties, in topk's order
                    assert theirs.equal(tokens)
                if rule == "drawn":
                    torch.testing.assert_close(probs, other, rtol=1e-4, atol=1e-9)
                calls = num_calls(ours), num_calls(torchs)
                t = time_in_turns({"ours": ours, "torch": torchs}, rounds=options.rounds)
                r = ratio(t["torch"], t["ours"])
                print(
                    f"{name:29}{rule:7}{dtype_name:6}{calls[0]:5} of {calls[1]:3}"
                    f"{t['ours'].median:10.1f}{t['ours'].best:9.1f}{t['torch'].median:10.1f}  {r}",
                    flush=True,
                )
                rows.append(
                    {
                        "shape": name,
                        "rule": rule,
                        "dtype": dtype_name,
                        "num_rows": num_rows,
                        "num_drafts": width,
                        "draft_vocab": vocab,
                        "vocab": num_ids,
                        "calls": calls[0],
                        "torch_calls": calls[1],
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
