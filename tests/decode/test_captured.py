"""Captured kinds of cycles: what they allocate, and what measuring them leaves behind."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.comm.launch import launch
from spec_kernels.decode.adaptive import CostTable
from spec_kernels.decode.batch import Adaptive, Batch, Request
from spec_kernels.decode.captured import Kind
from spec_kernels.decode.kv_cache import OutOfPages
from spec_kernels.decode.measure import measure_costs
from spec_kernels.decode.nests import named_tensors
from spec_kernels.testing.tiny_models import PLANS, PROMPTS


def batch_of(tiny, plan=PLANS["chain"], max_tokens=80, comm=None, **options):
    return Batch(*tiny.models(comm), plan, max_tokens=max_tokens, **options)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_buffers_of_a_cycle_do_not_grow_with_the_longest_context(tiny, plan):
    sizes = []
    for max_tokens in (40, 400):
        batch = batch_of(tiny, plan, max_tokens, max_requests=2)
        found = {}
        for evicts in (False, True):
            cycle = batch.cycles.cycle(Kind(plan.num_nodes, evicts=evicts), 2)
            tensors = dict(named_tensors(cycle, "cycle"))
            # Pages and the tables that lead to them are all that knows of it.
            caches = {t.untyped_storage().data_ptr() for t in batch.cache.layers}
            caches |= {batch.cache.draft.untyped_storage().data_ptr()}
            caches |= {batch.cache.block_tables.untyped_storage().data_ptr()}
            for name, tensor in tensors.items():
                if tensor.untyped_storage().data_ptr() not in caches:
                    found[evicts, name] = (tuple(tensor.shape), tensor.stride())
        sizes.append(found)
    assert sizes[0] == sizes[1] and len(sizes[0]) > 40


def test_every_bucket_stands_on_the_same_state(tiny):
    batch = batch_of(tiny, max_requests=5)
    runner = batch.cycles.runner(Kind(4))
    assert runner.buckets == [4, 8, 16, 20]
    for num_requests, places in ((1, 1), (2, 2), (3, 4), (5, 5)):
        assert batch.cycles.num_places(Kind(4), num_requests) == places
        state = batch.cycles.cycle(Kind(4), num_requests).state
        for part, whole in zip(state.tensors(), batch.state.tensors(), strict=True):
            assert part.data_ptr() == whole.data_ptr() and len(part) == places


def test_measuring_costs_leaves_nothing_behind(tiny):
    batch = batch_of(tiny, max_requests=3)
    before = [t.clone() for t in batch.state.tensors()]
    free, seconds = batch.cache.pool.num_free, dict(batch.clock.seconds)
    costs = measure_costs(batch.cycles, batch.prefill, batch.cache, batch.slack, [1, 2, 4], 1)
    assert costs.buckets == [1, 2, 3] and costs.nodes == [1, 2, 4]
    assert batch.cache.pool.num_free == free and batch.clock.seconds == seconds
    names = ("block_tables", "context_lens", "limits", "stop_ids", "max_nodes")
    for name, was, now in zip(names, before, batch.state.tensors(), strict=False):
        assert name == "max_nodes" or torch.equal(was, now), name
    assert batch.join(Request(PROMPTS[0], 4)) == 0


def test_measuring_needs_pages_for_every_row(tiny):
    batch = batch_of(tiny, max_requests=3, num_pages=6)
    with pytest.raises(OutOfPages):
        measure_costs(batch.cycles, batch.prefill, batch.cache, batch.slack, [1, 4], 1)
    assert batch.cache.pool.num_free == 5
    # With costs given, nothing has to be measured.
    costs = CostTable.from_curve(lambda tokens: 1.0 + tokens, [1, 3], [1, 4])
    options = {"max_requests": 3, "num_pages": 6}
    assert batch_of(tiny, adaptive=Adaptive([1, 4], costs), **options).adapter.costs is costs


def measured(comm, tiny):
    torch.set_num_threads(1)
    with torch.inference_mode():
        batch = batch_of(tiny, comm=comm, max_requests=2)
        parts = (batch.cycles, batch.prefill, batch.cache, batch.slack)
        return measure_costs(*parts, [1, 2, 4], 2).as_dict()


def test_all_ranks_have_the_costs_of_one(tiny):
    first, second = launch(measured, 2, tiny, timeout=60)
    assert first == second


@pytest.mark.parametrize(
    "plan, rungs, message",
    [
        (PLANS["static"], None, "a chain or a dynamic tree, .* got static"),
        (PLANS["chain"], [1, 2], "expected the plan's 4 nodes as the last one, got"),
        (PLANS["chain"], [2, 4], "rungs: expected 1 and rising numbers"),
    ],
)
def test_what_cannot_adapt_is_refused(tiny, plan, rungs, message):
    costs = CostTable.from_curve(lambda tokens: 1.0 + tokens, [1], [1, 12])
    with pytest.raises(ValueError, match=message):
        batch_of(tiny, plan, adaptive=Adaptive(rungs, costs))
