"""Records an acceptance trace of the bundled model: see ``spec_kernels.planning.traces``.

    python benchmarks/record_traces.py FILE [--prompts N] [--new-tokens N] [--temperatures T ...]

The target continues held-out prompts by plain decoding, greedily and sampled; then the drafter is
run over what came out. A first pass tells which drafts are right most often: confidences are then
recorded of the likeliest ones and of a chain.
"""

from __future__ import annotations

import argparse

import torch
from bundled import held_out

from spec_kernels.decode.engine import Engine
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.models.pair import load_pair
from spec_kernels.planning.recorder import Recorder
from spec_kernels.planning.traces import Text, Trace, chain_paths, path_rates
from spec_kernels.planning.tree_shape import best_tree
from spec_kernels.testing.timing import machine

DEPTH, NUM_RANKS, NUM_LIKELIEST = 8, 4, 15


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    options = parser.parse_args()
    prompts = held_out(options.prompts)
    longest = max(map(len, prompts)) + options.new_tokens + DEPTH
    target, drafter = load_pair()
    engine = Engine(target, max_tokens=longest)
    texts = []
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            for temperature in options.temperatures:
                sampling = SamplingParams(temperature, seed=number)
                count = options.new_tokens + DEPTH
                stream = engine.generate(prompt, count, speculative=False, sampling=sampling)
                texts.append(
                    (f"held-out prompt {number}", temperature, prompt, stream.result().tokens)
                )

    def record(paths) -> Trace:
        recorder = Recorder(
            target, drafter, paths, depth=DEPTH, num_ranks=NUM_RANKS, max_tokens=longest
        )
        records = (
            Text(name, temperature, *recorder.record([*prompt, *new], len(prompt)))
            for name, temperature, prompt, new in texts
        )
        source = {"models": "bundled, float32", "num_new_tokens": options.new_tokens} | machine()
        return Trace(tuple(paths), NUM_RANKS, tuple(records), source)

    chain = chain_paths(DEPTH)
    likeliest = best_tree(path_rates(record(chain).texts, NUM_RANKS), NUM_LIKELIEST + 1).paths
    trace = record([*likeliest, *(path for path in chain if path not in likeliest)])
    trace.save(options.file)
    print(f"{sum(map(len, trace.texts))} places of {len(texts)} texts; drafts {trace.paths}")


if __name__ == "__main__":
    main()
