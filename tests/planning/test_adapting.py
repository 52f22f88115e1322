"""The loop's rule judged on traces whose best answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spec_kernels.decode.adaptive import Adapter, CostTable
from spec_kernels.planning.adapting import (
    judge,
    judge_batch,
    replay_adaptive,
    replay_together,
)
from spec_kernels.planning.cost_model import chain_costs
from spec_kernels.planning.model_shapes import kimi_k25, kimi_k25_drafter
from spec_kernels.planning.published import predicted_costs
from spec_kernels.planning.traces import Text, Trace, chain_paths, replay

RUNGS = [1, 2, 4]
COSTS = CostTable({(1, 1): 10.0, (1, 2): 12.0, (1, 4): 15.0})


def text(name, chance, confidence, num_places=200, seed=0):
    """Drafts that are right with one probability at every depth and place."""
    generator = np.random.default_rng(seed)
    ranks = np.where(generator.uniform(size=(num_places, 3)) < chance, 0, -1).astype(np.int8)
    return Text(name, 0.0, ranks, np.full((num_places, 3), confidence))


def trace(*texts):
    return Trace(tuple(chain_paths(3)), 2, texts)


def test_drafts_that_are_never_right_are_left_out():
    verdict = judge(trace(*(text(f"t{i}", 0.0, 0.9) for i in range(4))), RUNGS, COSTS)
    assert verdict.best_fixed == 1
    assert verdict.fixed == {1: pytest.approx(100), 2: pytest.approx(1e3 / 12), 4: 1e3 / 15}
    assert verdict.best_possible == pytest.approx(100)
    assert 1 / 1.08 < verdict.gain[0] <= 1


def test_drafts_that_are_always_right_are_all_taken():
    verdict = judge(trace(*(text(f"t{i}", 1.0, 0.9) for i in range(4))), RUNGS, COSTS)
    assert verdict.best_fixed == 4
    assert verdict.best_possible == pytest.approx(4e3 / 15, rel=0.02)
    assert 0.97 < verdict.gain[0] <= 1 + 1e-9


def test_texts_of_two_kinds_are_told_apart():
    """A fixed size is wrong for half of them; confidences tell nothing, acceptance does."""
    texts = [text(f"t{i}", 0.98 if i % 2 else 0.05, 0.6, seed=i) for i in range(8)]
    verdict = judge(trace(*texts), RUNGS, COSTS)
    value, low, high = verdict.gain
    assert verdict.adaptive == pytest.approx(value * verdict.fixed[verdict.best_fixed])
    assert 1.03 < low <= value <= high
    assert verdict.best_possible >= verdict.adaptive


def test_the_same_again():
    texts = [text(f"t{i}", 0.5, 0.5, seed=i) for i in range(4)]
    assert judge(trace(*texts), RUNGS, COSTS) == judge(trace(*texts), RUNGS, COSTS)


def test_one_prompt_has_no_spread():
    texts = [text("t", 0.5, 0.5, seed=i) for i in range(3)]
    value, low, high = judge(trace(*texts), RUNGS, COSTS).gain
    assert low == pytest.approx(value) and high == pytest.approx(value)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_one_size_is_that_size(delay):
    """With nothing to choose from, the rule's replay is the fixed one's."""
    one = text("t", 0.6, 0.5)
    adapter = Adapter([1], COSTS)
    run = replay_adaptive([one], adapter, chain_paths(3), delay=delay)
    assert run == replay(one, [], 10.0)


class Scripted(Adapter):
    """Chooses as told, and notes what it is shown."""

    def __init__(self, script, **options):
        super().__init__(RUNGS, COSTS, **options)
        self.script, self.shown = list(script), []

    def choose(self, active, bucket):
        choice = super().choose(active, bucket)
        choice.__dict__.update(rung=self.script[0][0], max_nodes=[self.script[0][1]])
        del self.script[0]
        return choice

    def observe(self, request_id, *seen):
        self.shown.append(seen)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_what_the_rule_is_shown(delay):
    ranks = np.array([[0, 0, 0], [1, 0, 0], [0, 0, 0], [-1, 0, 0], [0, 1, 0]], np.int8)
    confidence = np.arange(15).reshape(5, 3) / 20
    one = Text("t", 0.0, ranks, confidence)
    # Places 0 (one draft of three kept), 2 (one of one), 4.
    adapter = Scripted([(2, 2), (1, 2), (2, 4)])
    run = replay_adaptive([one], adapter, chain_paths(3), delay=delay)
    expected = [
        (2, 2, confidence[0].tolist(), 1),
        (1, 2, confidence[2, :1].tolist(), 1),
        (2, 4, confidence[4].tolist(), 1),
    ]
    assert adapter.shown == expected[: 3 - delay]
    cost = COSTS.cycle(1, 4, 1) + COSTS.cycle(1, 2, 1) + COSTS.cycle(1, 4, 3)
    assert (run.num_tokens, run.num_cycles, run.ms) == (5, 3, pytest.approx(cost))


def test_a_trees_confidences_are_multiplied_up():
    paths = [(0,), (1,), (0, 0)]
    one = Text("t", 0.0, np.zeros((1, 2), np.int8), np.array([[0.5, 0.25, 0.5]]))
    adapter = Scripted([(2, 4)], form="cumulative")
    replay_adaptive([one], adapter, paths, delay=0)
    assert adapter.shown == [(2, 4, [0.5, 0.25, 0.25], 2)]


BATCH_COSTS = CostTable({(b, n): 10.0 + 0.8 * b * (n - 1) for b in (1, 2, 4) for n in RUNGS})


def test_a_batch_of_one_is_one_after_the_other():
    texts = [text(f"t{i}", 0.7, 0.6, seed=i) for i in range(3)]
    alone = judge(trace(*texts), RUNGS, COSTS)
    together = judge_batch(trace(*texts), RUNGS, COSTS, 1)
    assert together.fixed == {n: pytest.approx(speed) for n, speed in alone.fixed.items()}
    assert together.adaptive == pytest.approx(alone.adaptive)
    assert together.best_fixed == alone.best_fixed


def test_a_fixed_size_for_a_batch_by_hand():
    """Cycles of three texts with one draft: 3, 1 and 2; two at a time."""
    ranks = ([-1, -1, -1], [0], [0, -1, -1])
    texts = [
        Text("t", 0.0, np.array(r, np.int8).reshape(-1, 1), np.zeros((len(r), 1))) for r in ranks
    ]
    run = replay_together(texts, [(0,)], 2, BATCH_COSTS, 2)
    # Together: (a, b), (a, c), (a, c).
    assert (run.num_tokens, run.num_cycles) == (7, 3)
    assert run.ms == pytest.approx(3 * BATCH_COSTS.cycle(2, 2, 2))
    run = replay_together(texts, [], 1, BATCH_COSTS, 2)
    # (a, b), (a, c) twice, then c alone.
    assert run.num_cycles == 4
    assert run.ms == pytest.approx(3 * BATCH_COSTS.cycle(2, 1, 0) + BATCH_COSTS.cycle(1, 1, 0))


def test_in_a_batch_each_request_gets_its_own_number():
    """Half of the requests are always right, half never: no fixed size suits both."""
    texts = [text(f"t{i}", 0.99 if i % 2 else 0.0, 0.6, seed=i) for i in range(16)]
    verdict = judge_batch(trace(*texts), RUNGS, BATCH_COSTS, 4, num_orders=5)
    median, low, high = verdict.gain
    assert 1.03 < low <= median <= high
    assert verdict.adaptive > verdict.fixed[verdict.best_fixed]


def test_rungs_beyond_the_trace():
    with pytest.raises(ValueError, match="judge_batch: rungs: expected at most 4 nodes"):
        judge_batch(trace(text("t", 0.5, 0.5)), [1, 5], COSTS, 1)
    with pytest.raises(ValueError, match="judge: rungs: expected at most 4 nodes"):
        judge(trace(text("t", 0.5, 0.5)), [1, 5], COSTS)


TRACE = Path(__file__).parents[2] / "benchmarks/results/2026-11-29-traces.jsonl"


@pytest.mark.skipif(not TRACE.exists(), reason=f"no trace at {TRACE}")
@pytest.mark.parametrize("temperature", [0.0, 0.8, None])
def test_on_recorded_texts_the_rule_is_near_the_best_fixed_size(temperature):
    """What was found (docs/planning.md), as a bound: it may gain little, and must lose little."""
    trace = Trace.load(TRACE)
    chain = (trace if temperature is None else trace.at(temperature)).keep(chain_paths(8))
    rungs = [1, 2, 3, 4, 5, 6, 7, 9]
    grid = chain_costs(kimi_k25(), kimi_k25_drafter(), predicted_costs(), rungs)
    verdict = judge(chain, rungs, CostTable(grid))
    assert verdict.gain[0] > 0.95
    assert verdict.best_possible > 1.2 * verdict.fixed[verdict.best_fixed]
    # What any fixed choice that was made beforehand risks.
    assert verdict.adaptive > verdict.fixed[1] and verdict.adaptive > verdict.fixed[9]
