"""Every kind of decode cycle could be captured as a graph, whatever requests it runs for."""

from __future__ import annotations

import itertools

import pytest
import torch

from spec_kernels.comm.launch import launch
from spec_kernels.decode.batch import Request
from spec_kernels.decode.captured import Kind
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.nests import named_tensors
from spec_kernels.decode.sampling import SamplingOptions, SamplingParams
from spec_kernels.models.layers import MoE
from spec_kernels.testing import graph_safe
from spec_kernels.testing.compare import assert_same_bits
from spec_kernels.testing.tiny_models import DRAWN, PLANS, PROMPTS

# A tree of its 12 nodes is never accepted to its end here.
ALL = PLANS | DRAWN | {"dynamic": DraftPlan("dynamic", 3, 3, 20)}
# The first cycles of these accept every number of drafts.
STARTS = ([5, 12, 27, 17], [3, 34, 19, 15, 6, 27], PROMPTS[1])
NEW = 40
NUM_ROWS = 2
SAMPLED = SamplingParams(
    0.9, top_k=20, top_p=0.95, min_p=0.01, seed=7, logit_bias={4: 1.0}, allowed=range(38)
)
# Who may stand in a row: nobody, a greedy request, one that samples; and every mix of them.
MIXES = list(itertools.product((None, SamplingParams(), SAMPLED), repeat=NUM_ROWS))
CYCLES_EACH = 3
# Evicting cuts any tree alike: one with drawn drafts and one without will do.
EVICTING = ("dynamic", "static, drawn")
SHAPES = pytest.mark.parametrize(
    "plan, kind",
    [
        *(pytest.param(plan, "whole", id=name) for name, plan in ALL.items()),
        *(pytest.param(ALL[name], "evicting", id=f"{name}, evicting") for name in EVICTING),
    ],
)


class Served:
    """Rows of a batch that are filled by hand, one mix of requests after the other, while one and
    the same cycle runs."""

    def __init__(self, tiny, plan):
        everything = SamplingOptions(logit_bias=True, allowed=True)
        options = {"max_requests": NUM_ROWS, "sampling": everything, "chunk": 32}
        self.batch = tiny.batch(plan, max_tokens=80, **options)
        self.num_joined = 0

    def cycle(self, kind):
        plan = self.batch.plan
        if kind == "plain":
            return self.batch.cycle(NUM_ROWS, speculative=False)
        kind = Kind(plan.num_nodes, plan.sampled, evicts=kind == "evicting")
        return self.batch.cycles.cycle(kind, NUM_ROWS)

    def fill(self, run):
        if run % CYCLES_EACH == 0:
            for row, sampling in enumerate(MIXES[run // CYCLES_EACH % len(MIXES)]):
                self.put(row, sampling)

    def put(self, row, sampling):
        """Into ``row``, whoever is there."""
        cache, state, plan = self.batch.cache, self.batch.state, self.batch.plan
        cache.release(row)
        state.clear(row)
        if sampling is None:
            return
        self.num_joined += 1
        prompt = STARTS[self.num_joined % 3]
        cache.reserve(row, len(prompt) + NEW)
        state.set(row, sampling, (), len(prompt) + NEW - self.batch.slack)
        self.batch.prefill.run(row, prompt, True)
        # Heeded by cycles that evict: every size of a tree, and whole ones between.
        few = self.num_joined // 2 % plan.num_nodes + 1
        state.max_nodes[row].fill_(few if self.num_joined % 2 else plan.num_nodes)

    def inspect(self, cycle):
        """The report of a watched run for every mix, and the numbers of drafts accepted."""
        accepted = set()

        def fill(run):
            verified = cycle.result.verified
            accepted.update(verified.num_accepted[verified.tokens[:, 0] >= 0].tolist())
            self.fill(run)

        caches = self.batch.cache.target, self.batch.cache.draft
        buffers = {"state": self.batch.state, "caches": caches}
        num_runs = CYCLES_EACH * len(MIXES)
        report = graph_safe.inspect(cycle.run, buffers, fill=fill, num_runs=num_runs)
        report.require_safe()
        return report, accepted


@SHAPES
def test_the_cycle_is_safe_for_every_mix_and_outcome(tiny, plan, kind):
    served = Served(tiny, plan)
    report, accepted = served.inspect(served.cycle(kind))
    assert accepted == set(range(plan.steps + 1))
    target = served.batch.target
    # A MoE layer launches 12: 9 for attention, 2 norms, 1 for all experts.
    assert len(report.within("MLA.forward")) == 9 * len(target.layers)
    assert len(report.within("Target._add_norm")) == 2 * len(target.layers) + 1
    assert len(report.within("MoE.forward")) == sum(isinstance(x.mlp, MoE) for x in target.layers)
    assert report.by_op()["spec_kernels::tree_verify_compact"] == 1


def test_the_plain_cycle_is_safe_for_every_mix(tiny):
    served = Served(tiny, PLANS["chain"])
    served.inspect(served.cycle("plain"))


def ranks_findings(comm, tiny, plan, parallel):
    torch.set_num_threads(1)
    with torch.inference_mode():
        batch = tiny.batch(plan, comm=comm, parallel=parallel, max_requests=2)
        for prompt in PROMPTS[:2]:
            batch.join(Request(prompt, 40, SamplingParams(0.9, seed=7)))
        report = graph_safe.inspect(batch.cycle(2, draws=plan.sampled).run, num_runs=2)
        return [str(finding) for finding in report.findings]


@pytest.mark.parametrize("parallel", ["tp", "replicated", "leader"])
def test_the_cycle_is_safe_on_every_rank(tiny, parallel):
    plan = DRAWN["static, drawn"]
    assert launch(ranks_findings, 2, tiny, plan, parallel, timeout=60) == [[], []]


@SHAPES
def test_replays_of_one_recorded_cycle_equal_eager_cycles(tiny, plan, kind):
    """For every mix of requests, recorded when nobody was there."""
    replayed, eager = (Served(tiny, plan) for _ in range(2))
    cycle = eager.cycle(kind)
    cycle.run()
    recording = graph_safe.record(replayed.cycle(kind).run)
    accepted = set()
    for number in range(CYCLES_EACH * len(MIXES)):
        for served in (replayed, eager):
            served.fill(number)
        pairs = (recording.replay(), cycle.run()), (replayed.batch.state, eager.batch.state)
        for got, want in pairs:
            tensors = zip(named_tensors(got), named_tensors(want), strict=True)
            for (_, a), (_, b) in tensors:
                assert_same_bits(a, b)
        accepted |= set(cycle.result.verified.num_accepted.tolist())
    assert accepted == set(range(plan.steps + 1))
