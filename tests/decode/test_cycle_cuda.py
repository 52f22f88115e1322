"""Captured cycles on a GPU: the tokens of the same cycles run op by op, and of the CPU."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from spec_kernels.decode.batch import Adaptive, Batch, Request
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.engine import Engine
from spec_kernels.decode.graph import GraphRunner, Plan, StaleGraph, eagerly, shared_recorder
from spec_kernels.decode.sampling import SamplingOptions, SamplingParams
from spec_kernels.models.pair import load_pair
from spec_kernels.testing.serving import requests, serve
from spec_kernels.testing.tiny_models import DRAWN, PLANS, PROMPTS

pytestmark = pytest.mark.gpu

SAMPLED = SamplingParams(0.9, top_k=20, top_p=0.95, min_p=0.01, seed=7)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def pair(tiny, request):
    return load_pair(tiny.target, tiny.drafter, None, request.param, "cuda")


@pytest.fixture
def fp32(tiny):
    return load_pair(tiny.target, tiny.drafter, device="cuda")


def batch_of(pair, plan=PLANS["chain"], max_requests=4, **options):
    return Batch(*pair, plan, max_tokens=80, max_requests=max_requests, **options)


@pytest.mark.parametrize("plain_every", [0, 1, 3], ids=["drafts", "plain", "evicting"])
@pytest.mark.parametrize("plan", (PLANS | DRAWN).values(), ids=PLANS | DRAWN)
def test_replays_equal_eager_cycles(pair, plan, plain_every):
    """While requests join, leave and are broken off, and buckets take turns."""
    made = requests(PROMPTS, 9, 20, samples=True, plain_every=plain_every)
    graphs, eager = (batch_of(pair, plan, record=record) for record in (None, eagerly))
    aborts = {2: 5}
    got, want = serve(graphs, made, aborts), serve(eager, made, aborts)
    assert (got.tokens, got.accepted, got.sizes) == (want.tokens, want.accepted, want.sizes)
    assert len(set(got.sizes)) > 1
    assert graphs.cache.pool.num_free == graphs.cache.pool.num_pages


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_tokens_are_those_of_the_cpu(tiny, fp32, plan):
    made = requests(PROMPTS, 7, 20)
    on_cpu = tiny.batch(plan, max_requests=4)
    assert serve(batch_of(fp32, plan), made).tokens == serve(on_cpu, made).tokens


def test_adapted_cycles_emit_what_fixed_ones_do(fp32):
    made = requests(PROMPTS, 5, 20)
    adapted = batch_of(fp32, adaptive=Adaptive())
    assert serve(adapted, made).tokens == serve(batch_of(fp32), made).tokens


def test_a_capture_amid_decoding_leaves_everybody_as_they_were(fp32):
    """The first request that samples comes late and brings a kind of cycle along."""
    plan = DRAWN["chain, drawn"]
    alone = serve(batch_of(fp32, plan), [Request(PROMPTS[0], 20)]).tokens[0]
    batch, tokens = batch_of(fp32, plan), []
    name = batch.join(Request(PROMPTS[0], 20))
    for cycle in itertools.count():
        if cycle == 2:
            batch.join(Request(PROMPTS[1], 20, SAMPLED))
        found = batch.step()
        tokens += [token for part in found if part.request == name for token in part.tokens]
        if not found and not batch.num_requests:
            break
    assert tokens == alone


@pytest.mark.parametrize("read_behind", [0, 1, 2])
def test_tokens_do_not_depend_on_when_they_are_read(fp32, read_behind):
    made = requests(PROMPTS, 6, 16, samples=True)
    read_late = batch_of(fp32, read_behind=read_behind)
    assert serve(read_late, made).tokens == serve(batch_of(fp32), made).tokens


def test_nothing_waits_for_the_device(fp32):
    """Neither a step nor, once every shape was met, a request that joins or leaves."""
    options = SamplingOptions(logit_bias=True, allowed=True)
    batch = batch_of(fp32, DRAWN["chain, drawn"], sampling=options)
    params = SamplingParams(0.9, seed=1, logit_bias={3: 0.5}, allowed=range(1, 30))
    serve(batch, requests(PROMPTS, 6, 8, samples=True))
    name = batch.join(Request(PROMPTS[0], 40, params))
    batch.step()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        other = batch.join(Request(PROMPTS[0], 40))
        for _ in range(3):
            batch.step()
        batch.leave(name)
        batch.step()
        batch.leave(other)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_one_order_whichever_thread_or_stream_calls(fp32):
    """Made on a stream of its own, stepped by threads, which have the default one."""
    prompts = [PROMPTS[i % 3] for i in range(6)]
    engine = Engine(*fp32, PLANS["chain"], max_tokens=80, max_requests=3)
    want = [engine.generate(prompt, 16).result().tokens for prompt in prompts]

    async def read(stream):
        return [token async for token in stream]

    async def together(engine):
        streams = [engine.generate(prompt, 16) for prompt in prompts]
        dropped = engine.generate(prompts[0], 16)
        texts = asyncio.gather(*map(read, streams))
        await asyncio.sleep(0)
        dropped.close()
        return await texts

    with torch.cuda.stream(torch.cuda.Stream()):
        engine = Engine(*fp32, PLANS["chain"], max_tokens=80, max_requests=3)
        assert asyncio.run(together(engine)) == want


def test_a_changed_weight_is_refused_until_captured_anew(fp32):
    target, _ = fp32
    batch = batch_of(fp32)
    batch.join(Request(PROMPTS[0], 20))
    batch.step()
    target.layers[0].input_norm = target.layers[0].input_norm * 1.5
    with pytest.raises(StaleGraph, match="input_norm was replaced"):
        batch.step()


def test_a_recorder_outlives_its_graphs():
    """torch drops a pool with its last graph, and takes no other into it."""
    x = torch.zeros(4, device="cuda")
    runner = GraphRunner(
        lambda bucket: Plan(lambda: x.add_(torch.ones_like(x))),
        [4],
        device="cuda",
        record=shared_recorder("cuda"),
    )
    for _ in range(3):
        runner.capture()
        runner.invalidate()
    runner.capture()
    x.zero_()
    for _ in range(2):
        runner.replay(4)
    assert x.tolist() == [2.0] * 4


def test_what_cannot_be_captured_is_told_and_the_device_goes_on(fp32):
    x = torch.zeros(4, device="cuda")
    runner = GraphRunner(lambda bucket: Plan(lambda: x.sum().item()), [4], device="cuda")
    with pytest.raises(RuntimeError, match="bucket of 4 tokens"):
        runner.capture()
    assert torch.ones(4, device="cuda").sum().item() == 4
    made = requests(PROMPTS, 3, 8)
    assert serve(batch_of(fp32), made).tokens == serve(batch_of(fp32, record=eagerly), made).tokens


def test_the_cache_may_be_longer_than_one_split_of_attention(fp32):
    """From there on the kernels take scratch, which stands in the pool of the graphs."""
    plan = DraftPlan("static", 3, 3, 10)
    prompts = [(PROMPTS[1] * 20)[:300], PROMPTS[0]]
    made = requests(prompts, 4, 12)
    options = dict(max_tokens=400, max_requests=2)
    graphs, eager = (Batch(*fp32, plan, record=record, **options) for record in (None, eagerly))
    assert serve(graphs, made).tokens == serve(eager, made).tokens
