"""The loop as a whole: lossless, replayable, and equal however it is cut into steps and ranks."""

from __future__ import annotations

import re

import pytest
import torch

from spec_kernels.comm.launch import launch
from spec_kernels.decode.batch import Request
from spec_kernels.decode.cycle import PHASES
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.engine import Engine
from spec_kernels.decode.kv_cache import INERT, OutOfPages
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.testing.tiny_models import DRAWN, PLANS, PROMPTS, drain, tokens_of
from spec_kernels.training import eagle, evaluate, export

NEW = 30


def both(engine, prompt, new=NEW, **options):
    plain = engine.generate(prompt, new, speculative=False, **options).result()
    return plain, engine.generate(prompt, new, **options).result()


def first_token(batch):
    """What the prompt of the request that joined last gave, before any cycle."""
    return int(batch.prefill.result.verified.tokens)


def cached(cache, num_tokens, row=0):
    """What stands in the caches for a request's first tokens: the target's rows, the drafter's."""
    at = cache.rows(torch.arange(num_tokens).unsqueeze(0), row)[0]
    return cache.target.flatten(1, 2)[:, at], cache.draft.flatten(0, 1)[at]


def ranks_texts(comm, tiny, plan, parallel, sampling):
    """Plain and speculative tokens of every prompt, decoded by one rank of a group."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        engine = tiny.engine(plan, comm=comm, parallel=parallel)
        texts = []
        for prompt in PROMPTS:
            plain, speculative = both(engine, prompt, 16, sampling=sampling)
            texts.append((plain.tokens, speculative.tokens, speculative.accepted))
        return texts


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_greedy_speculative_equals_plain(tiny, plan):
    engine, accepted = tiny.engine(plan), []
    for prompt in PROMPTS:
        plain, speculative = both(engine, prompt)
        assert speculative.tokens == plain.tokens
        assert len(plain.tokens) == NEW
        accepted += speculative.accepted
    # Both verdicts must have occurred, or this shows nothing.
    assert 0 in accepted and max(accepted) >= 2


@pytest.mark.parametrize(
    "tp, kind, parallel",
    [
        (2, "chain", "tp"),
        (2, "static", "tp"),
        (2, "dynamic", "tp"),
        (2, "chain", "replicated"),
        (2, "dynamic", "leader"),
        (8, "chain", "leader"),
        (8, "static", "tp"),
        (8, "dynamic", "replicated"),
    ],
)
def test_ranks_equal_one_rank(tiny, tp, kind, parallel):
    plan = PLANS[kind]
    alone = ranks_texts(None, tiny, plan, "replicated", None)
    every = launch(ranks_texts, tp, tiny, plan, parallel, None)
    for texts in every:
        assert texts == alone
        assert all(plain == speculative for plain, speculative, _ in texts)


def test_case_11_ranks_sample_alike(tiny):
    sampling = SamplingParams(1.0, top_k=20, top_p=0.95, seed=3)
    alone = ranks_texts(None, tiny, PLANS["chain"], "replicated", sampling)
    for texts in launch(ranks_texts, 2, tiny, PLANS["chain"], "tp", sampling):
        assert texts == alone


def _other_requests(comm, tiny, change):
    """What rank 1 says of its request differs in ``change``, and in no shape."""
    torch.set_num_threads(1)
    request = {"prompt": PROMPTS[0], "max_new_tokens": NEW, "sampling": SamplingParams(1.0)}
    engine = tiny.engine(comm=comm)
    engine.generate(**request).result()
    with pytest.raises(RuntimeError, match="ranks disagree") as caught:
        engine.generate(**request | (change if comm.rank else {})).result()
    return str(caught.value)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"prompt": [3, 1, 4, 1, 6]}, "prompt: rank 0 has 5 ids, .*, rank 1 has 5 ids, "),
        ({"prompt": [1]}, "prompt: rank 0 has 5 ids, .*, rank 1 has 1 ids, "),
        ({"sampling": SamplingParams(1.0, seed=1)}, "sampling: rank 0 has .*'seed': 0.*'seed': 1"),
        ({"stop_ids": [7]}, r"stop_ids: rank 0 has \[\], rank 1 has \[7\]"),
    ],
)
def test_ranks_that_let_different_requests_in_are_told(tiny, change, named):
    for message in launch(_other_requests, 2, tiny, change):
        assert re.search(named, message)


@pytest.mark.parametrize("plan", DRAWN.values(), ids=DRAWN)
def test_drawn_drafts_leave_greedy_requests_as_they_are(tiny, plan):
    for prompt in PROMPTS:
        plain, speculative = both(tiny.engine(plan), prompt)
        assert speculative.tokens == plain.tokens


@pytest.mark.parametrize("plan", DRAWN.values(), ids=DRAWN)
def test_drawn_drafts_give_one_text_a_seed_and_more_of_it_a_cycle(tiny, plan):
    engine, likeliest = tiny.engine(plan), tiny.engine(PLANS[plan.kind])
    texts, drawn, best = [], [], []
    for seed in (0, 1, 2, 3, 0):
        options = {"sampling": SamplingParams(1.0, seed=seed)}
        text = engine.generate(PROMPTS[1], 24, **options).result()
        texts.append((text.tokens, text.accepted))
        drawn += text.accepted
        best += likeliest.generate(PROMPTS[1], 24, **options).result().accepted
    assert texts[0] == texts[4]
    assert len({tuple(tokens) for tokens, _ in texts}) == 4
    assert sum(drawn) / len(drawn) > 1.1 * sum(best) / len(best)


def test_drawn_drafts_in_a_mixed_batch_equal_those_alone(tiny):
    """A greedy request beside a sampled one: each as if it were alone."""
    plan = DRAWN["static, drawn"]
    wanted = [SamplingParams(), SamplingParams(1.0, seed=4), SamplingParams(0.6, seed=4)]
    alone = [
        tiny.engine(plan).generate(p, 16, sampling=s).result().tokens
        for p, s in zip(PROMPTS, wanted, strict=True)
    ]
    batch = tiny.batch(plan, max_requests=3)
    for prompt, sampling in zip(PROMPTS, wanted, strict=True):
        batch.join(Request(prompt, 16, sampling))
    parts = drain(batch)
    assert [tokens_of(parts[name]) for name in range(3)] == alone


@pytest.mark.parametrize(
    "tp, kind, parallel",
    [
        (2, "chain", "tp"),
        (2, "static", "leader"),
        (8, "chain", "leader"),
        (2, "static", "replicated"),
    ],
)
def test_case_11_ranks_draw_alike(tiny, tp, kind, parallel):
    sampling = SamplingParams(1.0, top_p=0.95, seed=3)
    plan = DRAWN[f"{kind}, drawn"]
    alone = ranks_texts(None, tiny, plan, "replicated", sampling)
    assert any(sum(accepted) for _, _, accepted in alone)
    for texts in launch(ranks_texts, tp, tiny, plan, parallel, sampling):
        assert texts == alone


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_speculative_equals_plain(tiny, plan, temperature):
    engine = tiny.engine(plan)
    seen = set()
    for seed in range(3):
        sampling = SamplingParams(temperature, top_p=0.9, min_p=0.01, seed=seed)
        plain, speculative = both(engine, PROMPTS[1], sampling=sampling)
        assert speculative.tokens == plain.tokens
        seen.add(tuple(plain.tokens))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "plan",
    [
        DraftPlan("chain", 1),
        DraftPlan("chain", 9),
        DraftPlan("static", 2, 1),
        DraftPlan("static", 5, 2, 33),
        DraftPlan("dynamic", 1, 3),
        DraftPlan("dynamic", 4, 1),
        DraftPlan("dynamic", 3, 2, 2),
        DraftPlan("dynamic", 4, 4, 50),
    ],
    ids=lambda p: f"{p.kind}-{p.steps}-{p.topk}-{p.num_nodes}",
)
def test_extreme_shapes_are_lossless(tiny, plan):
    engine = tiny.engine(plan)
    plain, speculative = both(engine, PROMPTS[1], 20)
    assert speculative.tokens == plain.tokens
    assert max(speculative.accepted) <= plan.steps


@pytest.mark.parametrize("plan", [PLANS["dynamic"], *DRAWN.values()], ids=["dynamic", *DRAWN])
def test_sampling_keeps_the_targets_distribution(tiny, plan):
    """Second emitted token, whose drafts were in play, against the exact mixture over the first."""
    engine = tiny.engine(plan, max_tokens=16, max_requests=40)
    prompt, temperature, num_texts = PROMPTS[0], 1.0, 800

    def probabilities(ids):
        return torch.softmax(engine.logits_after(ids).double() / temperature, -1)

    first = probabilities(prompt)
    exact = sum(
        first[token] * probabilities([*prompt, token])
        for token in range(len(first))
        if first[token] > 1e-4
    )
    settings = [SamplingParams(temperature, seed=seed) for seed in range(num_texts)]
    texts = [engine.generate(prompt, 2, sampling=sampling) for sampling in settings]
    counts = torch.zeros_like(exact)
    accepted = 0
    for text in texts:
        sampled = text.result()
        counts[sampled.tokens[1]] += 1
        accepted += sampled.accepted[0] > 0
    distance = 0.5 * (counts / num_texts - exact).abs().sum()
    # Expected distance of an exact sampler: sum of sqrt(2 p (1 - p) / (pi n)) / 2.
    expected = 0.5 * (2 * exact * (1 - exact) / (torch.pi * num_texts)).clamp(min=0).sqrt().sum()
    assert distance < 1.6 * expected, (distance, expected)
    assert accepted > num_texts // 20


def test_exact_replay(tiny):
    """A TTT pass over the target's own output tells every accept count of the loop beforehand."""
    steps = 3
    engine = tiny.engine(DraftPlan("chain", steps))
    dense = export.load_target(tiny.target, torch.float32)
    drafter = export.load_drafter(tiny.drafter, torch.float32)
    layers = engine.batch.drafter.captured_layers
    for prompt in PROMPTS[:2]:
        speculative = engine.generate(prompt, NEW).result()
        plain = engine.generate(prompt, NEW + steps, speculative=False).result()
        text = torch.tensor([prompt + plain.tokens])
        right = evaluate.ttt_right(dense, drafter, layers, text, steps)[:, 0]
        predicted, row = [], len(prompt) - 1
        accepted = right.cumprod(0).sum(0).tolist()
        emitted = 1
        while emitted < NEW:
            predicted.append(accepted[row])
            emitted += accepted[row] + 1
            row += accepted[row] + 1
        assert speculative.accepted == predicted
        assert eagle.replay(right, len(prompt) - 1, row)[1] == len(predicted)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_drafters_cache_is_that_of_a_run_from_scratch(tiny, plan):
    """After every extend: one row an emitted token, and each as if the text had been the prompt."""
    batch, fresh = tiny.batch(plan), tiny.batch(plan)
    batch.join(Request(PROMPTS[0], NEW))
    text = list(PROMPTS[0])
    for _ in range(4):
        for part in batch.step():
            assert len(part.tokens) == (part.num_accepted or 0) + 1
            text += part.tokens
        assert batch.cache.context_lens.tolist() == [len(text) - 1]
    fresh.join(Request(text[:-1], 8))
    assert first_token(fresh) == text[-1]
    for ours, theirs in zip(*(cached(b.cache, len(text) - 1) for b in (batch, fresh)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
    for name in ("features", "logits"):
        starts = (getattr(b.state.start, name) for b in (batch, fresh))
        torch.testing.assert_close(*starts, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 4, 7, 16])
def test_case_29_chunked_prefill_equals_a_single_chunk(tiny, chunk):
    prompt = PROMPTS[1]
    whole, parts = tiny.batch(chunk=64), tiny.batch(chunk=chunk)
    for batch in (whole, parts):
        batch.join(Request(prompt, 8))
    assert first_token(whole) == first_token(parts)
    for a, b in zip(*(cached(x.cache, len(prompt)) for x in (whole, parts)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    starts = whole.state.start.logits, parts.state.start.logits
    torch.testing.assert_close(*starts, rtol=2e-4, atol=2e-5)


def test_case_05_padding_writes_nothing_and_a_smaller_batch_equals_a_fresh_one(tiny):
    used, fresh = (tiny.batch(max_requests=3) for _ in range(2))
    # Two other requests come, decode, and go.
    others = [used.join(Request(prompt, NEW)) for prompt in PROMPTS[1:]]
    used.step()
    for name in others:
        used.leave(name)
    outputs = []
    for batch in (used, fresh):
        assert batch.cache.pool.num_free == fresh.cache.pool.num_pages
        batch.join(Request(PROMPTS[0], NEW))
        tokens = [first_token(batch)]
        mine = set(batch.cache.block_tables[0].tolist())
        free = [p for p in range(batch.cache.draft.shape[0]) if p not in mine]
        batch.cache.draft[free] = float("nan")
        batch.cache.target[:, free] = float("nan")
        for _ in range(5):
            verified = batch.cycle(3).run().verified
            tokens += verified.tokens[0, : verified.num_accepted[0] + 1].tolist()
            assert verified.tokens[1:].eq(-1).all() and not verified.num_accepted[1:].any()
        assert batch.cache.draft[free].isnan().all()
        assert batch.cache.target[:, free].isnan().all()
        length = len(PROMPTS[0]) + len(tokens) - 1
        assert batch.cache.context_lens.tolist() == [length, INERT, INERT]
        outputs.append((tokens, *cached(batch.cache, length)))
    assert outputs[0][0] == outputs[1][0]
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert torch.equal(outputs[0][2], outputs[1][2])


def test_case_06_no_accepted_draft_still_gives_the_bonus(tiny, monkeypatch):
    engine = tiny.engine()
    plain = engine.generate(PROMPTS[1], NEW, speculative=False).result()
    cycle = engine.batch.cycle()
    draft = cycle.proposal.draft

    def wrong():
        draft()
        # The right token follows the text so far; any other is wrong.
        cycle.proposal.tree.tokens[:, 1:] = 39

    monkeypatch.setattr(cycle.proposal, "draft", wrong)
    assert 39 not in plain.tokens
    speculative = engine.generate(PROMPTS[1], NEW).result()
    assert speculative.tokens == plain.tokens
    assert speculative.accepted == [0] * (NEW - 1)
    assert cycle.result.verified.accept_index.tolist() == [[0, -1, -1, -1]]


@pytest.mark.parametrize("right", [1, 2, 3])
def test_every_accept_count_is_lossless(tiny, monkeypatch, right):
    """Drafts copied from the plain text, wrong from draft ``right`` on."""
    engine = tiny.engine()
    prompt = PROMPTS[0]
    plain = engine.generate(prompt, NEW + 4, speculative=False).result().tokens
    proposal, cache = engine.batch.cycle().proposal, engine.batch.cache

    def scripted():
        done = int(cache.context_lens[0]) - len(prompt) + 1
        for i in range(1, 4):
            token = plain[done + i - 1] if done + i - 1 < len(plain) else 0
            proposal.tree.tokens[0, i] = token if i <= right else (token + 1) % 40

    monkeypatch.setattr(proposal, "draft", scripted)
    speculative = engine.generate(prompt, NEW).result()
    assert speculative.tokens == plain[:NEW]
    assert set(speculative.accepted) == {right}


def test_case_22_replaying_a_cycle_refreshes_the_capture_buffer(tiny):
    batch = tiny.batch()
    batch.join(Request(PROMPTS[0], NEW))
    text = [*PROMPTS[0], first_token(batch)]
    dense = export.load_target(tiny.target, torch.float32)
    cycle = batch.cycle()
    buffer = cycle.capture.data_ptr()
    for _ in range(3):
        before = len(text) - 1
        verified = cycle.run().verified
        text += verified.tokens[0, : verified.num_accepted[0] + 1].tolist()
        _, streams, _ = dense(torch.tensor([text[:-1]]), batch.drafter.captured_layers)
        rows = len(text) - 1 - before
        assert cycle.capture.data_ptr() == buffer
        captured = cycle.captured[0, :rows].flatten(1)
        torch.testing.assert_close(captured, streams[0, before:], rtol=1e-3, atol=1e-4)


def test_case_25_one_hidden_row_an_emitted_token(tiny):
    batch = tiny.batch()
    batch.join(Request(PROMPTS[0], NEW))
    cycle, seen = batch.cycle(), []
    fuse = batch.drafter.fuse
    batch.drafter.fuse = lambda captured: seen.append(captured.shape[0]) or fuse(captured)
    for _ in range(6):
        before = batch.cache.context_lens.clone()
        verified = cycle.run().verified
        grown = batch.cache.context_lens - before
        num_emitted = int((verified.tokens >= 0).sum())
        assert grown.item() == num_emitted == verified.num_accepted.item() + 1
    assert seen == [4] * 6  # a static number of rows, enough for every accept length


def test_case_26_stale_rows_of_longer_prompts_are_inert(tiny):
    used, fresh = tiny.engine(), tiny.engine()
    used.generate(PROMPTS[1], NEW).result()  # leaves its rows in every buffer
    used.batch.cycle().capture.fill_(1e4)
    used.batch.prefill.capture.fill_(1e4)
    for prompt in (PROMPTS[0], PROMPTS[2]):
        a, b = (engine.generate(prompt, NEW).result() for engine in (used, fresh))
        assert (a.tokens, a.accepted) == (b.tokens, b.accepted)


def test_case_28_caches_end_together_and_an_abort_leaves_nothing(tiny):
    prompt = PROMPTS[1]
    engine = tiny.engine(max_tokens=len(prompt) + NEW, page_size=1)
    cache = engine.batch.cache
    free = cache.pool.num_free
    wanted = engine.generate(prompt, NEW).result()
    assert len(wanted.tokens) == NEW
    assert cache.draft.shape[0] == cache.target.shape[1]
    with pytest.raises(ValueError, match="at most"):
        engine.generate(prompt, NEW + 1)
    for num_parts in range(4):
        stream = engine.generate(prompt, NEW)
        parts = stream.parts()
        got = [token for _ in range(num_parts) for token in next(parts).tokens]
        stream.close()
        assert got == wanted.tokens[: len(got)]
        assert cache.pool.num_free == free
        assert cache.context_lens.tolist() == [INERT] and not cache.block_tables.any()
        assert engine.generate(prompt, NEW).result().tokens == wanted.tokens


def test_a_full_pool_refuses_before_anything_is_written(tiny):
    batch = tiny.batch(max_requests=2, num_pages=6, page_size=16)
    name = batch.join(Request(PROMPTS[0], 40))
    kept = [*batch.state.tensors(), batch.cache.target, batch.cache.draft]
    before = [t.clone() for t in kept]
    second = Request(PROMPTS[1], 40)
    assert not batch.has_room(second)
    with pytest.raises(OutOfPages, match="pages asked for"):
        batch.join(second)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    assert batch.num_requests == 1
    batch.leave(name)
    assert batch.has_room(second)
    batch.join(second)
    assert len(tokens_of(drain(batch)[1])) == 40


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_any_page_size(tiny, page_size):
    plan = PLANS["dynamic"]
    wanted = tiny.engine(plan).generate(PROMPTS[1], NEW).result()
    got = tiny.engine(plan, page_size=page_size).generate(PROMPTS[1], NEW).result()
    assert (got.tokens, got.accepted) == (wanted.tokens, wanted.accepted)


def test_stop_ids_end_the_text_within_a_cycle(tiny):
    engine = tiny.engine()
    plain = engine.generate(PROMPTS[0], NEW, speculative=False).result().tokens
    stop = plain[10]
    end = plain.index(stop) + 1
    for speculative in (False, True):
        options = {"speculative": speculative, "stop_ids": [stop]}
        result = engine.generate(PROMPTS[0], NEW, **options).result()
        assert result.tokens == plain[:end]
        parts = list(engine.generate(PROMPTS[0], NEW, **options).parts())
        assert [t for part in parts for t in part.tokens] == result.tokens
        assert parts[0].num_accepted is None
        assert [part.num_accepted for part in parts[1:]] == result.accepted
        assert [part.is_done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_phases_and_streaming_add_up(tiny):
    engine = tiny.engine()
    result = engine.generate(PROMPTS[0], NEW).result()
    assert tuple(result.phase_seconds) == PHASES
    assert all(seconds > 0 for seconds in result.phase_seconds.values())
    assert sum(result.phase_seconds.values()) <= result.seconds
    assert 1 + sum(a + 1 for a in result.accepted) >= NEW


def test_the_first_difference_has_its_logits(tiny):
    engine = tiny.engine()
    plain = engine.generate(PROMPTS[0], 6, speculative=False).result().tokens
    for at in range(6):
        logits = engine.logits_after([*PROMPTS[0], *plain[:at]])
        assert int(logits.argmax()) == plain[at]
    assert engine.batch.cache.context_lens.tolist() == [INERT]
    with pytest.raises(ValueError, match="logits_after: expected at least one id"):
        engine.logits_after([])
    for wrong in (-1, 40):
        message = rf"logits_after: expected ids in \[0, 40\), got {wrong}"
        with pytest.raises(ValueError, match=message):
            engine.logits_after([1, wrong])


@pytest.mark.parametrize(
    "prompt, new, message",
    [
        ([], 4, "at least one token"),
        ([40], 4, r"ids in \[0, 40\), got 40"),
        ([-1], 4, r"ids in \[0, 40\), got -1"),
        ([1], 0, "max_new_tokens: expected at least 1"),
        ([1] * 500, 13, "max_position_embeddings = 512"),
        ([1] * 90, 10, "at most"),
    ],
)
def test_bad_requests_are_refused(tiny, prompt, new, message):
    engine = tiny.engine()
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, new)
    with pytest.raises(ValueError, match=message):
        engine.batch.join(Request(prompt, new))
    assert engine.batch.cache.pool.num_free == engine.batch.cache.pool.num_pages


@pytest.mark.parametrize(
    "stop_ids, message",
    [
        # What pads emitted rows is no id: a request must not stop at it.
        ([-1], r"stop_ids: expected ids in \[0, 40\), got -1"),
        ([3, 40], r"stop_ids: expected ids in \[0, 40\), got 40"),
        (list(range(9)), "stop_ids: expected at most 8, got 9"),
    ],
)
def test_bad_stop_ids_are_refused(tiny, stop_ids, message):
    with pytest.raises(ValueError, match=message):
        tiny.engine().generate(PROMPTS[0], 4, stop_ids=stop_ids)


def test_logits_that_are_not_numbers_are_reported(tiny):
    target, drafter = tiny.models()
    target.final_norm.fill_(float("nan"))
    engine = Engine(target, drafter, PLANS["chain"], max_tokens=64)
    with pytest.raises(RuntimeError, match="the target's logits are not numbers"):
        engine.generate(PROMPTS[0], 8).result()
    assert engine.batch.cache.context_lens.tolist() == [INERT]


@pytest.mark.parametrize("plan", (PLANS | DRAWN).values(), ids=PLANS | DRAWN)
def test_draft_logits_that_are_not_numbers_cost_drafts_and_nothing_else(tiny, plan):
    target, drafter = tiny.models()
    drafter.final_norm.fill_(float("nan"))
    engine = Engine(target, drafter, plan, max_tokens=64)
    for sampling in (SamplingParams(), SamplingParams(1.0, seed=2)):
        plain, speculative = both(engine, PROMPTS[0], 12, sampling=sampling)
        assert speculative.tokens == plain.tokens


def test_speculation_needs_a_drafter(tiny):
    target, _ = tiny.models()
    engine = Engine(target, max_tokens=64)
    assert engine.generate(PROMPTS[0], 4, speculative=False).result().tokens
    with pytest.raises(ValueError, match="expected a drafter"):
        engine.generate(PROMPTS[0], 4)


def test_bfloat16_decodes_losslessly(tiny):
    target, drafter = tiny.models(dtype=torch.bfloat16)
    engine = Engine(target, drafter, PLANS["chain"], max_tokens=64)
    plain, speculative = both(engine, PROMPTS[0])
    assert plain.tokens == speculative.tokens
