"""Is the chosen shape the fastest, and is choosing anew each cycle worth it: the bundled model.

    python benchmarks/bench_tree_shape.py [--rounds N] [--new-tokens N] [--prompts N] [--trace FILE]
                                          [--json FILE] [--costs FILE]

Chains and trees of many sizes decode greedily, in turns; all must give plain decoding's tokens. In
every second round their cycles are timed: verifying N nodes, and the drafter. From these costs, and
from the acceptance in a trace of other prompts (``record_traces.py``), ``planning.tree_shape``
chooses a chain and a tree. The other rounds tell how fast it and its neighbours are: chains of one
step less and more, trees of half and twice the nodes. One rank and one thread in CPU time: on an
idle machine that is wall time, and on a busy one nearly what it would be on an idle one. A
neighbour is called faster where it is so beyond the spread of rounds.

Last, the loop's rule is replayed on the trace against fixed chains, with the costs measured here
and with those that ``planning.cost_model`` predicts for Kimi-K2.5 (of which the acceptance is not:
it is the bundled model's). ``--costs`` repeats this part alone, with an earlier run's costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch
from bundled import held_out, quotient

from spec_kernels.decode.adaptive import CostTable, isotonic
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.engine import Engine
from spec_kernels.models.pair import load_pair
from spec_kernels.planning import published
from spec_kernels.planning.adapting import judge, judge_batch
from spec_kernels.planning.cost_model import chain_costs
from spec_kernels.planning.model_shapes import kimi_k25, kimi_k25_drafter
from spec_kernels.planning.traces import Trace, chain_paths, path_rates
from spec_kernels.planning.tree_shape import (
    Choice,
    Shape,
    best_chain,
    best_chain_length,
    choices,
    fastest,
)
from spec_kernels.testing.timing import write_json

TRACE = Path(__file__).parent / "results" / "2026-11-29-traces.jsonl"
# Chains as deep as the trace, then trees.
SIZES = (*range(1, 10), 12, 16, 24, 32)
RUNGS = (1, 2, 3, 4, 5, 6, 7, 9)
CONTEXTS, BATCHES = (0, 65536), (1, 8)


class Loop:
    """Decodes the prompts with one shape; plainly where it has no drafts."""

    def __init__(self, target, drafter, shape: Shape, prompts: list[list[int]], new: int):
        self.shape, self.prompts, self.new = shape, prompts, new
        plan = DraftPlan.of_paths(shape.paths) if shape.paths else None
        longest = max(map(len, prompts)) + new
        self.engine = Engine(target, drafter if plan else None, plan, max_tokens=longest)
        # Of each round: seconds a token, milliseconds a cycle, and the drafter's share of them.
        self.seconds: list[float] = []
        self.cycle_ms: list[float] = []
        self.draft_share: list[float] = []

    def run(self) -> None:
        runs, seconds = [], 0.0
        for prompt in self.prompts:
            stream = self.engine.generate(prompt, self.new, speculative=bool(self.shape.paths))
            next(stream)
            begun = time.process_time()
            runs.append(stream.result())
            seconds += time.process_time() - begun
        self.tokens = [r.tokens for r in runs]
        num_cycles = sum(len(r.accepted) for r in runs)
        self.accept_length = 1 + sum(sum(r.accepted) for r in runs) / num_cycles
        phases = {name: sum(r.phase_seconds[name] for r in runs) for name in runs[0].phase_seconds}
        self.seconds.append(seconds / sum(len(r.tokens) - 1 for r in runs))
        self.cycle_ms.append(1e3 * seconds / num_cycles)
        self.draft_share.append((phases["draft"] + phases["extend"]) / sum(phases.values()))

    @property
    def parts_ms(self) -> tuple[float, float]:
        """Milliseconds a cycle without the drafter, and of the drafter, by the even rounds."""
        cycle = float(np.median(self.cycle_ms[::2]))
        share = float(np.median(self.draft_share[::2]))
        return cycle * (1 - share), cycle * share

    @property
    def judged(self) -> list[float]:
        """Seconds a token of the odd rounds."""
        return self.seconds[1::2]


def in_turns(loops: list[Loop], rounds: int) -> None:
    for loop in loops:
        loop.run()  # makes buffers
        for samples in (loop.seconds, loop.cycle_ms, loop.draft_share):
            samples.clear()
    for _ in range(rounds):
        for loop in loops:
            loop.run()
    assert all(loop.tokens == loops[0].tokens for loop in loops), "a shape changed the text"


@dataclasses.dataclass(frozen=True)
class Costs:
    """A cycle's milliseconds: ``verify[nodes] + extend + level * depth``; plainly ``verify[1]``.

    The drafter's part of chains is fitted as a constant, for the rows that every cycle extends by,
    and a step a level. The rest is made to rise with the nodes.
    """

    verify: dict[int, float]
    extend: float
    level: float

    @classmethod
    def of(cls, loops: list[Loop]) -> Costs:
        verify = {loop.shape.num_nodes: loop.parts_ms[0] for loop in loops}
        sizes = sorted(verify)
        curve = dict(zip(sizes, isotonic([verify[n] for n in sizes]), strict=True))
        chains = [loop for loop in loops if loop.shape.is_chain and loop.shape.depth]
        depths, drafting = zip(*((c.shape.depth, c.parts_ms[1]) for c in chains), strict=True)
        level, extend = np.polyfit(depths, drafting, 1)
        return cls(curve, float(extend), float(level))

    def by_nodes(self) -> dict[int, float]:
        """What ``tree_shape`` takes beside ``level``."""
        return {n: ms + (self.extend if n > 1 else 0.0) for n, ms in self.verify.items()}

    def of_chains(self) -> CostTable:
        """Of the loop's rungs: that of one node keeps the drafter in step."""
        return CostTable(
            {(1, n): self.verify[n] + self.extend + max(1, n - 1) * self.level for n in RUNGS}
        )


def compare(title: str, loops: list[Loop], chosen: Loop) -> list[dict]:
    """Prints the loops beside the chosen one; rows with each one's time over its time."""
    rows = []
    print(f"\n{title}\n{'':28}{'nodes':>6}{'accept':>8}{'tok/s':>9}   its time / the chosen one's")
    for loop in loops:
        ratio = quotient(loop.judged, chosen.judged)
        tok_s = 1 / float(np.median(loop.judged))
        verdict = "chosen" if loop is chosen else f"{ratio}"
        if ratio.high < 1:
            verdict += "  FASTER than the chosen one"
        print(
            f"{str(loop.shape):28}{loop.shape.num_nodes:>6}{loop.accept_length:>8.2f}{tok_s:>9.1f}"
            f"   {verdict}"
        )
        rows.append(
            {
                "group": title,
                "shape": str(loop.shape),
                "paths": loop.shape.paths,
                "num_nodes": loop.shape.num_nodes,
                "accept_length": loop.accept_length,
                "tok_s": tok_s,
                "chosen": loop is chosen,
                "time_over_chosen": vars(ratio),
            }
        )
    return rows


def parts(trace: Trace) -> list[tuple[str, Trace]]:
    """The trace's chains, by temperature and mixed."""
    chain = trace.keep(chain_paths(max(RUNGS) - 1))
    by_temperature = [(f"temperature {t:g}", chain.at(t)) for t in trace.temperatures]
    return [*by_temperature, ("both, prompt by prompt", chain)]


def adapting(name: str, trace: Trace, costs: CostTable, batch: int = 1) -> list[dict]:
    """Rows and lines of the rule beside fixed chains."""
    rows = []
    for what, part in parts(trace):
        if batch == 1:
            verdict = judge(part, RUNGS, costs)
            possible = f"{verdict.best_possible:.1f}"
        else:
            verdict, possible = judge_batch(part, RUNGS, costs, batch), "-"
        value, low, high = verdict.gain
        fixed = verdict.fixed[verdict.best_fixed]
        print(
            f"{name:28}{what:24}{verdict.fixed[1]:>10.1f}{fixed:>8.1f} ({verdict.best_fixed})"
            f"{verdict.adaptive:>9.1f}{possible:>10}   {value:.3f} [{low:.3f}-{high:.3f}]",
            flush=True,
        )
        rows.append(
            {"group": "adapting", "costs": name, "texts": what, "batch": batch}
            | dataclasses.asdict(verdict)
            | {"best_fixed": verdict.best_fixed}
        )
    return rows


def timed(options, trace: Trace) -> tuple[list[dict], Costs]:
    """Chains and trees in turns: rows, and what cycles cost."""
    names = sorted({text.name for text in trace.texts}, key=lambda n: int(n.split()[-1]))
    prompts = held_out(len(names))
    numbers = list(range(0, len(names), len(names) // options.prompts))[: options.prompts]
    others = [t for t in trace.at(0.0).texts if t.name not in {names[i] for i in numbers}]
    rates = path_rates(others, trace.num_ranks)
    prompts, new = [prompts[i] for i in numbers], options.new_tokens
    rows: list[dict] = []
    with torch.inference_mode():
        target, drafter = load_pair()
        depth = trace.texts[0].ranks.shape[1]
        chains = [best_chain(rates, k) for k in range(depth + 1)]

        def timed_loops(shapes, rounds: int) -> dict[tuple, Loop]:
            loops = {s.paths: Loop(target, drafter, s, prompts, new) for s in shapes}
            in_turns(list(loops.values()), rounds)
            return loops

        # Which tree of a size is the best depends on costs: a few rounds with deep ones tell.
        deep = [c.shape for c in choices(rates, dict.fromkeys(SIZES, 1.0))]
        pilot = Costs.of(list(timed_loops([*chains, *deep], 2).values()))
        trees = [c.shape for c in choices(rates, pilot.by_nodes(), pilot.level)]
        loops = timed_loops([*chains, *trees], 2 * options.rounds)
        costs = Costs.of(list(loops.values()))
        print(f"{len(prompts)} prompts, {new} new tokens each, greedy, float32, one thread")
        curve = "  ".join(f"{n}: {ms:.2f}" for n, ms in costs.verify.items())
        print(f"nodes: ms without the drafter  {curve}")
        print(
            f"the drafter: {costs.extend:.2f} ms a cycle and {costs.level:.2f} ms a level; "
            f"acceptance from {len(others)} other prompts"
        )
        rows.append({"group": "costs"} | dataclasses.asdict(costs))
        chosen = best_chain_length(rates, costs.by_nodes(), costs.level)
        near = [c for c in chains if abs(c.depth - chosen.shape.depth) <= 1]
        rows += compare(
            f"chains; chosen: {chosen.shape}, {chosen.tok_s:.1f} tok/s expected",
            [loops[c.paths] for c in near],
            loops[chosen.shape.paths],
        )
        by_nodes = costs.by_nodes()
        chosen = fastest(Choice(t, by_nodes[t.num_nodes] + costs.level * t.depth) for t in trees)
        sizes = [chosen.shape.num_nodes / 2, chosen.shape.num_nodes, 2 * chosen.shape.num_nodes]
        near = [min(trees, key=lambda t: (abs(t.num_nodes - n), t.num_nodes)) for n in sizes]
        rows += compare(
            f"trees; chosen: {chosen.shape}, {chosen.tok_s:.1f} tok/s expected",
            [loops[t.paths] for t in near],
            loops[chosen.shape.paths],
        )
    return rows, costs


def replayed(trace: Trace, costs: Costs) -> list[dict]:
    """The loop's rule on the trace, with measured and with predicted costs."""
    print("\nadapting: tok/s of chains replayed on the trace (nodes)")
    print("[5th to 95th percentile: prompts drawn again; in batches, texts in other orders]")
    columns = f"{'no drafts':>10}{'best fixed':>12}{'rule':>9}{'possible':>10}"
    print(f"{'costs':28}{'texts':24}{columns}   rule / fixed")
    rows = adapting("measured", trace, costs.of_chains())
    predicted = published.predicted_costs()
    for batch in BATCHES:
        for context in CONTEXTS:
            grid = chain_costs(
                kimi_k25(), kimi_k25_drafter(), predicted, RUNGS, range(1, batch + 1), context
            )
            name = f"K2.5, batch {batch}, {context} tokens"
            rows += adapting(name, trace, CostTable(grid), batch)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--costs", type=Path, help="--json of an earlier run: replay only")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trace = Trace.load(options.trace)
    if options.costs:
        row = next(r for r in json.loads(options.costs.read_text())["rows"] if "verify" in r)
        verify = {int(num_nodes): ms for num_nodes, ms in row["verify"].items()}
        rows, costs = [row], Costs(verify, row["extend"], row["level"])
    else:
        rows, costs = timed(options, trace)
    rows += replayed(trace, costs)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
