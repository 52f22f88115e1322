"""What of the decode cycle could be captured as a graph, for every kind of draft."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.comm.launch import launch
from spec_kernels.decode.cycle import PhaseClock
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.nests import named_tensors
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.models.layers import MoE
from spec_kernels.testing import graph_safe
from spec_kernels.testing.compare import assert_same_bits
from spec_kernels.testing.tiny_models import PLANS, PROMPTS

DRAWN = {
    "chain, drawn": DraftPlan("chain", 3, sampled=True),
    "static, drawn": DraftPlan("static", 3, 3, 10, sampled=True),
}
SAMPLED = SamplingParams(0.9, top_k=20, top_p=0.95, min_p=0.01, seed=7)
SETTINGS = {"greedy": [SamplingParams()] * 3, "mixed": [SamplingParams(), SAMPLED, SAMPLED]}


class Served:
    """Three requests; between cycles one leaves and another joins."""

    def __init__(self, tiny, plan, settings):
        self.engine = tiny.engine(plan, max_tokens=80, batch=3)
        self.settings, self.plan = settings, plan
        for request in range(3):
            self.begin(request, request)

    def begin(self, request, number):
        prompt = PROMPTS[number % 3]
        self.engine.begin(request, prompt, 40, self.settings[request])

    def fill(self, run):
        leaving = run % 3
        self.engine.end(leaving)
        if run % 2:
            self.begin(leaving, run + 1)

    def inspect(self, function, fill=None, **options):
        engine = self.engine
        cache = engine.cache
        buffers = {
            "caches": (cache.target, cache.draft, cache.block_tables, cache.context_lens),
            "start": engine.start,
            "active": engine.active,
            "sampling": engine.sampling,
        }
        return graph_safe.inspect(function, buffers, fill=fill or self.fill, **options)


def cycle_of(engine, speculative=True):
    clock = PhaseClock(torch.device("cpu"))
    cycle = engine.speculative if speculative else engine.plain
    return lambda: cycle.run(clock)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_cycle_is_safe(tiny, plan, settings):
    served = Served(tiny, plan, settings)
    report = served.inspect(cycle_of(served.engine), num_runs=4)
    report.require_safe()
    target = served.engine.target
    # A MoE layer launches 12: 9 for attention, 2 norms, 1 for all experts.
    assert len(report.within("MLA.forward")) == 9 * len(target.layers)
    assert len(report.within("Target._add_norm")) == 2 * len(target.layers) + 1
    assert len(report.within("MoE.forward")) == sum(isinstance(x.mlp, MoE) for x in target.layers)
    assert report.by_op()["spec_kernels::tree_verify_compact"] == 1


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_plain_cycle_is_safe(tiny, settings):
    served = Served(tiny, PLANS["chain"], settings)
    served.inspect(cycle_of(served.engine, speculative=False)).require_safe()


@pytest.mark.parametrize("plan", DRAWN.values(), ids=DRAWN)
def test_drawing_drafts_is_safe_while_the_same_kinds_of_requests_are_served(tiny, plan):
    served = Served(tiny, plan, SETTINGS["mixed"])
    served.inspect(cycle_of(served.engine), lambda run: None, num_runs=5).require_safe()


@pytest.mark.parametrize("plan", DRAWN.values(), ids=DRAWN)
def test_what_is_not_yet_safe_the_host_chooses_how_drafts_are_drawn(tiny, plan):
    """``SamplingTensors.any_sampled`` and ``any_greedy`` are the host's, and change ops.

    With the last greedy request gone the choice between drawn and likeliest is left out; with the
    last sampling one gone, drawing is, and q is no longer given to ``tree_verify``.
    """
    served = Served(tiny, plan, [SAMPLED] * 3)

    def join_greedy(run):
        served.engine.sampling.set(0, SamplingParams() if run == 2 else SAMPLED)

    def all_greedy(run):
        for request in range(3):
            served.engine.sampling.set(request, SamplingParams() if run == 2 else SAMPLED)

    found = served.inspect(cycle_of(served.engine), join_greedy).findings
    assert [(f.kind, f.stack[0].function) for f in found] == [("sequence", "StaticDraft._drawn")]
    found = served.inspect(cycle_of(served.engine), all_greedy).findings
    assert [(f.kind, f.stack[1].function) for f in found] == [("sequence", "StaticDraft.draft")]


def ranks_findings(comm, tiny, plan, parallel):
    torch.set_num_threads(1)
    with torch.inference_mode():
        engine = tiny.engine(plan, comm=comm, parallel=parallel, batch=2)
        for request in range(2):
            engine.begin(request, PROMPTS[request], 40, SAMPLED)
        report = graph_safe.inspect(cycle_of(engine), num_runs=2)
        return [str(finding) for finding in report.findings]


@pytest.mark.parametrize("parallel", ["tp", "replicated", "leader"])
def test_the_cycle_is_safe_on_every_rank(tiny, parallel):
    assert launch(ranks_findings, 2, tiny, PLANS["static"], parallel, timeout=60) == [[], []]


@pytest.mark.parametrize("plan", (PLANS | DRAWN).values(), ids=PLANS | DRAWN)
def test_replays_of_one_recorded_cycle_equal_eager_cycles(tiny, plan):
    """As requests join and leave, and at whatever is accepted."""
    replayed, eager = (Served(tiny, plan, SETTINGS["mixed"]) for _ in range(2))
    run = cycle_of(eager.engine)
    run()
    recording = graph_safe.record(cycle_of(replayed.engine))
    accepted = set()
    for number in range(9):
        for served in (replayed, eager):
            # The first is greedy and stays, so that the host's choice of ops stays too.
            if number in (3, 6):
                served.engine.end(number // 3)
            if number == 5:
                served.begin(1, 0)
        got, want = recording.replay(), run()
        pairs = zip(named_tensors(got), named_tensors(want), strict=True)
        for (_, a), (_, b) in pairs:
            assert_same_bits(a, b)
        for name in ("context_lens", "block_tables"):
            caches = (replayed.engine.cache, eager.engine.cache)
            assert_same_bits(*(getattr(cache, name) for cache in caches))
        accepted |= set(want.num_accepted.tolist())
    assert len(accepted) > 1
    assert_same_bits(replayed.engine.cache.target, eager.engine.cache.target)
