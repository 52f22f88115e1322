"""Decoding end to end: plain and speculative, on 8 ranks and on one, in batches, and against
transformers.

    python benchmarks/bench_decode.py [--rounds N] [--new-tokens N] [--prompts N] [--threads N]
                                      [--batches N ...] [--json FILE]

The bundled target and drafter on held-out prompts, greedily, with a chain of 3 drafts (the main
job's settings). Checked first: speculative and plain give the same tokens, and so does
``transformers`` generate on the same float32 weights (with one rank, so that it has the same
cores). Then timed in turns: a sample is one pass over all prompts, prefill not counted (for
transformers: generate's time less that of generating one token).

Then batches, on one rank: so many prompts at a time, plain against a chain of 3 drafts, against
chains of 1 to 5, and against the adaptive rule, in turns; every text must be plain decoding's.
Milliseconds by phase are of the chain of 3. ``decode_launches.py`` counts the launches.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from bundled import held_out, quotient
from decode_batches import bench_batches

from spec_kernels.comm import Communicator
from spec_kernels.comm.launch import launch
from spec_kernels.comm.policy import num_cores
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.engine import Engine
from spec_kernels.models.pair import TARGET, load_pair
from spec_kernels.testing.timing import write_json

GOAL = 1.5


def sample_loop(comm, prompts: list[list[int]], new: int, rounds: int) -> dict:
    """Seconds a decoded token of each round, plain and speculative in turns; and the tokens."""
    with torch.inference_mode():
        longest = max(map(len, prompts)) + new
        e = Engine(*load_pair(comm=comm), DraftPlan("chain", 3), max_tokens=longest)
        texts, seconds, accepted = {}, {"plain": [], "speculative": []}, []
        for turn in range(rounds + 1):
            for name in seconds:
                streams = (e.generate(p, new, speculative=name == "speculative") for p in prompts)
                results = [stream.result() for stream in streams]
                texts[name] = [r.tokens for r in results]
                if turn:  # the first one makes buffers
                    decoded = sum(len(t) - 1 for t in texts[name])
                    seconds[name].append(sum(r.seconds for r in results) / decoded)
                if name == "speculative":
                    accepted = [a for r in results for a in r.accepted]
        assert texts["plain"] == texts["speculative"], "speculative decoding is not lossless"
        return {
            "texts": texts["plain"],
            "seconds": seconds,
            "accept_length": 1 + sum(accepted) / len(accepted),
        }


def sample_transformers(prompts: list[list[int]], new: int, rounds: int) -> dict | None:
    """The same for ``transformers`` generate; None where it is not installed."""
    try:
        from transformers import DeepseekV3ForCausalLM
        from transformers.utils import logging
    except ImportError:
        return None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = DeepseekV3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()

    def generate(num: int) -> tuple[float, list[list[int]]]:
        start, texts = time.perf_counter(), []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=False,
                pad_token_id=0,
            )
            texts.append(out[0, len(prompt) :].tolist())
        return time.perf_counter() - start, texts

    seconds, texts = [], []
    for turn in range(rounds + 1):
        whole, texts = generate(new)
        first, _ = generate(1)
        if turn:
            seconds.append((whole - first) / (len(prompts) * (new - 1)))
    return {"texts": texts, "seconds": seconds}


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How many texts are the same; a difference can be a near tie of two roundings."""
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return f"{same} of {len(ours)} texts the same"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=num_cores(), help="of one rank")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--json")
    options = parser.parse_args()
    prompts, new, rounds = held_out(options.prompts), options.new_tokens, options.rounds

    rows = []
    print(f"{num_cores()} cores, {len(prompts)} prompts, {new} new tokens each, greedy, float32")
    print(f"{'':28}{'tok/s':>9}{'best':>9}   speculative / plain")
    one = None
    for tp in (8, 1):
        if tp == 1:
            torch.set_num_threads(options.threads)
            result = one = sample_loop(Communicator.single(), prompts, new, rounds)
        else:
            result = launch(sample_loop, tp, prompts, new, rounds)[0]
        s = result["seconds"]
        speedup = quotient(s["plain"], s["speculative"])
        for name in s:
            tok_s, best = 1 / float(np.median(s[name])), 1 / min(s[name])
            label = f"{name}, {tp} rank{'s' * (tp > 1)}"
            verdict = f"   {speedup}" if name == "speculative" else ""
            print(f"{label:28}{tok_s:>9.1f}{best:>9.1f}{verdict}")
            rows.append({"contender": name, "tp": tp, "tok_s": tok_s, "best_tok_s": best})
        rows[-1] |= {"speedup": vars(speedup), "accept_length": result["accept_length"]}
        met = "met" if speedup.median >= GOAL else "missed"
        print(
            f"  accept length {result['accept_length']:.2f}; lossless; goal of {GOAL} {met}",
            flush=True,
        )

    theirs = sample_transformers(prompts, new, rounds)
    if theirs is None:
        print("transformers: not installed, not compared")
    else:
        tok_s, best = 1 / float(np.median(theirs["seconds"])), 1 / min(theirs["seconds"])
        print(f"{'transformers generate':28}{tok_s:>9.1f}{best:>9.1f}")
        row = {"contender": "transformers", "tp": 1, "tok_s": tok_s, "best_tok_s": best}
        for name in ("plain", "speculative"):
            faster = quotient(theirs["seconds"], one["seconds"][name])
            print(f"  {name}, 1 rank: {faster} of it")
            row[f"{name}_over_transformers"] = vars(faster)
        row["agreement"] = agreement(one["texts"], theirs["texts"])
        print(f"  {row['agreement']}")
        rows.append(row)
    rows += bench_batches(options.batches, new, rounds)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
