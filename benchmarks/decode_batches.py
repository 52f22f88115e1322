"""Batches of the bundled model for ``bench_decode.py``: plain, fixed chains, the adaptive rule."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from bundled import held_out, quotient

from spec_kernels.decode.batch import Adaptive
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.engine import Engine
from spec_kernels.models.pair import load_pair

CHAINS = (1, 2, 3, 5)
SHOWN = 3
LONGEST = 5


@dataclass
class Contender:
    """One way of decoding; of each round, seconds a token, of the cycles alone."""

    engine: Engine
    speculative: bool
    seconds: list[float] = field(default_factory=list)
    phases_ms: dict[str, float] = field(default_factory=dict)
    accept_length: float = 1.0

    def run(self, prompts: list[list[int]], new: int, counts: bool) -> list[list[int]]:
        """The texts; ``counts``: whether the round is one of those that are timed."""
        batch = self.engine.batch
        joining, phases, cycles = (
            batch.seconds_joining, dict(batch.clock.seconds), batch.cycles_by_nodes.total()
        )  # fmt: skip
        begun = time.perf_counter()
        streams = [self.engine.generate(p, new, speculative=self.speculative) for p in prompts]
        results = [stream.result() for stream in streams]
        seconds = time.perf_counter() - begun - (batch.seconds_joining - joining)
        cycles = batch.cycles_by_nodes.total() - cycles
        if counts:
            self.seconds.append(seconds / sum(len(r.tokens) - 1 for r in results))
        self.phases_ms = {p: 1e3 * (s - phases[p]) / cycles for p, s in batch.clock.seconds.items()}
        accepted = [a for r in results for a in r.accepted]
        self.accept_length = 1 + sum(accepted) / len(accepted)
        return [r.tokens for r in results]

    @property
    def tok_s(self) -> float:
        return 1 / float(np.median(self.seconds))


def contenders(size: int, longest: int) -> dict[str, Contender]:
    target, drafter = load_pair()

    def engine(steps: int, adaptive: Adaptive | None = None) -> Engine:
        plan = DraftPlan("chain", steps)
        options = {"max_tokens": longest, "max_requests": size, "adaptive": adaptive}
        return Engine(target, drafter, plan, **options)

    found = {"plain": Contender(engine(SHOWN), False)}
    found |= {f"chain of {k}": Contender(engine(k), True) for k in CHAINS}
    found["adaptive"] = Contender(engine(LONGEST, Adaptive()), True)
    return found


def bench_batches(sizes: list[int], new: int, rounds: int) -> list[dict]:
    """Prints a table; rows for a JSON file. AssertionError where a text is not plain decoding's."""
    columns = ("plain", f"chain of {SHOWN}", "speedup", "adaptive / plain", "adaptive / best fixed")
    print(f"\n{'batch':>6}" + "".join(f"{c:>24}" for c in columns) + "   ms by phase")
    rows = []
    for size in sizes:
        prompts = held_out(max(size, 4))
        with torch.inference_mode():
            every = contenders(size, max(map(len, prompts)) + new)
            for turn in range(rounds + 1):
                texts = {n: c.run(prompts, new, turn > 0) for n, c in every.items()}
                wrong = [n for n, t in texts.items() if t != texts["plain"]]
                assert not wrong, f"batch of {size}: {wrong}: not plain decoding's text"
        fixed = {n: c for n, c in every.items() if n.startswith("chain")}
        best = max(fixed, key=lambda n: fixed[n].tok_s)
        chain, plain, adaptive = every[f"chain of {SHOWN}"], every["plain"], every["adaptive"]
        ratios = {
            "speedup": quotient(plain.seconds, chain.seconds),
            "adaptive_over_plain": quotient(plain.seconds, adaptive.seconds),
            "adaptive_over_best_fixed": quotient(every[best].seconds, adaptive.seconds),
        }
        phases = " ".join(f"{p} {ms:.2f}" for p, ms in chain.phases_ms.items())
        speeds = "".join(f"{f'{c.tok_s:.0f} tok/s':>24}" for c in (plain, chain))
        cells = "".join(f"{r!s:>24}" for r in ratios.values())
        print(f"{size:>6}{speeds}{cells}   {phases}")
        lengths = {n: round(c.accept_length, 2) for n, c in every.items()}
        by_nodes = dict(sorted(adaptive.engine.batch.cycles_by_nodes.items()))
        print(f"{'':6}  best fixed: {best}; accept length {lengths}; nodes {by_nodes}", flush=True)
        rows.append(
            {
                "batch": size,
                "tok_s": {n: c.tok_s for n, c in every.items()},
                "best_fixed": best,
                "accept_length": lengths,
                "phases_ms": chain.phases_ms,
                "adaptive_cycles_by_nodes": by_nodes,
                **{name: vars(r) for name, r in ratios.items()},
            }
        )
    return rows
