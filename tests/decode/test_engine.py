"""The loop as a whole: lossless, replayable, and equal however it is cut into steps and ranks."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.comm.launch import launch
from spec_kernels.decode.cycle import PHASES, PhaseClock
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.engine import Engine
from spec_kernels.decode.kv_cache import OutOfPages
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.testing.tiny_models import PLANS, PROMPTS
from spec_kernels.training import eagle, evaluate, export

NEW = 30
DRAWN = {
    "chain": DraftPlan("chain", 3, sampled=True),
    "static": DraftPlan("static", 3, 3, 10, sampled=True),
}


def both(engine, prompt, new=NEW, **options):
    plain = engine.generate(prompt, new, speculative=False, **options)
    return plain, engine.generate(prompt, new, **options)


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
        text = engine.generate(PROMPTS[1], 24, **options)
        texts.append((text.tokens, text.accepted))
        drawn += text.accepted
        best += likeliest.generate(PROMPTS[1], 24, **options).accepted
    assert texts[0] == texts[4]
    assert len({tuple(tokens) for tokens, _ in texts}) == 4
    assert sum(drawn) / len(drawn) > 1.1 * sum(best) / len(best)


def test_drawn_drafts_in_a_mixed_batch_equal_those_alone(tiny):
    """A greedy request beside a sampled one: each as if it were alone."""
    plan = DRAWN["static"]
    wanted = [SamplingParams(), SamplingParams(1.0, seed=4), SamplingParams(0.6, seed=4)]
    alone = [
        tiny.engine(plan).generate(p, 16, sampling=s).tokens
        for p, s in zip(PROMPTS, wanted, strict=True)
    ]
    engine = tiny.engine(plan, batch=3)
    texts = [[engine.begin(r, PROMPTS[r], 16, wanted[r])] for r in range(3)]
    clock = PhaseClock(torch.device("cpu"))
    while any(len(t) < 16 for t in texts):
        verified = engine.speculative.run(clock)
        for request, text in enumerate(texts):
            if len(text) < 16:
                text += engine.read(verified, request)[0]
                if len(text) >= 16:
                    engine.end(request)
    assert [t[:16] for t in texts] == alone


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
    alone = ranks_texts(None, tiny, DRAWN[kind], "replicated", sampling)
    assert any(sum(accepted) for _, _, accepted in alone)
    for texts in launch(ranks_texts, tp, tiny, DRAWN[kind], parallel, sampling):
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
    engine = tiny.engine(plan, max_tokens=16)
    prompt, temperature, num_texts = PROMPTS[0], 1.0, 800

    def probabilities(ids):
        return torch.softmax(engine.logits_after(ids).double() / temperature, -1)

    first = probabilities(prompt)
    exact = sum(
        first[token] * probabilities([*prompt, token])
        for token in range(len(first))
        if first[token] > 1e-4
    )
    counts = torch.zeros_like(exact)
    accepted = 0
    for seed in range(num_texts):
        sampled = engine.generate(prompt, 2, sampling=SamplingParams(temperature, seed=seed))
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
    layers = engine.drafter.captured_layers
    for prompt in PROMPTS[:2]:
        speculative = engine.generate(prompt, NEW)
        text = torch.tensor(
            [prompt + engine.generate(prompt, NEW + steps, speculative=False).tokens]
        )
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
    engine, fresh = tiny.engine(plan), tiny.engine(plan)
    prompt = PROMPTS[0]
    text = [*prompt, engine.begin(0, prompt, NEW)]
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(4):
        emitted, num_accepted = engine.read(engine.speculative.run(clock), 0)
        assert len(emitted) == num_accepted + 1
        text += emitted
        assert engine.cache.context_lens.tolist() == [len(text) - 1]
    following = fresh.begin(0, text[:-1], 8)
    assert following == text[-1]
    at = torch.arange(len(text) - 1).unsqueeze(0)
    for ours, theirs in ((engine.cache, fresh.cache),):
        kv = [c.draft.flatten(0, 1)[c.rows(at)[0]] for c in (ours, theirs)]
        torch.testing.assert_close(*kv, rtol=2e-4, atol=2e-5)
        latents = [c.target.flatten(1, 2)[:, c.rows(at)[0]] for c in (ours, theirs)]
        torch.testing.assert_close(*latents, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(engine.start.features, fresh.start.features, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(engine.start.logits, fresh.start.logits, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 4, 7, 16])
def test_case_29_chunked_prefill_equals_a_single_chunk(tiny, chunk):
    whole, parts = tiny.engine(chunk=64), tiny.engine(chunk=chunk)
    prompt = PROMPTS[1]
    assert whole.begin(0, prompt, 8) == parts.begin(0, prompt, 8)
    at = torch.arange(len(prompt)).unsqueeze(0)
    for name in ("draft", "target"):
        axis = 0 if name == "draft" else 1
        rows = [
            getattr(e.cache, name).flatten(axis, axis + 1).index_select(axis, e.cache.rows(at)[0])
            for e in (whole, parts)
        ]
        torch.testing.assert_close(*rows, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(whole.start.logits, parts.start.logits, rtol=2e-4, atol=2e-5)


def test_case_05_padding_writes_nothing_and_a_smaller_batch_equals_a_fresh_one(tiny):
    clock = PhaseClock(torch.device("cpu"))
    used, fresh = tiny.engine(batch=3), tiny.engine(batch=3)
    # Two other requests come, decode beside nothing, and go.
    used.begin(1, PROMPTS[1], NEW)
    used.begin(2, PROMPTS[2], NEW)
    used.speculative.run(clock)
    used.end(1)
    used.end(2)
    outputs = []
    for engine in (used, fresh):
        assert engine.cache.pool.num_free == fresh.cache.pool.num_free
        tokens = [engine.begin(0, PROMPTS[0], NEW)]
        mine = set(engine.cache.block_tables[0].tolist()) - {0}
        others = [p for p in range(engine.cache.draft.shape[0]) if p not in mine and p != 0]
        engine.cache.draft[others] = float("nan")
        engine.cache.target[:, others] = float("nan")
        for _ in range(5):
            tokens += engine.read(engine.speculative.run(clock), 0)[0]
        assert engine.cache.draft[others].isnan().all()
        assert engine.cache.target[:, others].isnan().all()
        assert engine.cache.context_lens.tolist() == [len(PROMPTS[0]) + len(tokens) - 1, 0, 0]
        at = torch.arange(len(PROMPTS[0]) + len(tokens) - 1).expand(3, -1)
        rows = engine.cache.rows(at)[0]
        outputs.append(
            (
                tokens,
                engine.cache.target.flatten(1, 2)[:, rows],
                engine.cache.draft.flatten(0, 1)[rows],
            )
        )
    assert outputs[0][0] == outputs[1][0]
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert torch.equal(outputs[0][2], outputs[1][2])


def test_requests_of_a_batch_do_not_touch_each_other(tiny):
    clock = PhaseClock(torch.device("cpu"))
    for plan in PLANS.values():
        alone = tiny.engine(plan)
        wanted = [alone.generate(p, NEW).tokens for p in PROMPTS]
        engine = tiny.engine(plan, batch=3)
        texts = [[engine.begin(r, p, NEW)] for r, p in enumerate(PROMPTS)]
        while any(len(t) < NEW for t in texts):
            verified = engine.speculative.run(clock)
            for request, text in enumerate(texts):
                if len(text) < NEW:
                    text += engine.read(verified, request)[0]
                    if len(text) >= NEW:
                        engine.end(request)
        assert [t[:NEW] for t in texts] == wanted


def test_case_06_no_accepted_draft_still_gives_the_bonus(tiny, monkeypatch):
    engine = tiny.engine()
    plain = engine.generate(PROMPTS[1], NEW, speculative=False)
    draft = engine.speculative.proposal.draft

    def wrong(start):
        draft(start)
        # The right token follows the text so far; any other is wrong.
        tree = engine.speculative.proposal.tree
        tree.tokens[:, 1:] = (tree.tokens[:, 1:] * 0) + 39

    monkeypatch.setattr(engine.speculative.proposal, "draft", wrong)
    assert 39 not in plain.tokens
    speculative = engine.generate(PROMPTS[1], NEW)
    assert speculative.tokens == plain.tokens
    assert speculative.accepted == [0] * (NEW - 1)
    assert engine.speculative.verified.accept_index.tolist() == [[0, -1, -1, -1]]


@pytest.mark.parametrize("right", [1, 2, 3])
def test_every_accept_count_is_lossless(tiny, monkeypatch, right):
    """Drafts copied from the plain text, wrong from draft ``right`` on."""
    engine = tiny.engine()
    prompt = PROMPTS[0]
    plain = engine.generate(prompt, NEW + 4, speculative=False).tokens
    tree = engine.speculative.proposal.tree

    def scripted(start):
        done = int(engine.cache.context_lens[0]) - len(prompt) + 1
        for i in range(1, 4):
            token = plain[done + i - 1] if done + i - 1 < len(plain) else 0
            tree.tokens[0, i] = token if i <= right else (token + 1) % 40

    monkeypatch.setattr(engine.speculative.proposal, "draft", scripted)
    speculative = engine.generate(prompt, NEW)
    assert speculative.tokens == plain[:NEW]
    assert set(speculative.accepted) == {right}


def test_case_22_replaying_a_cycle_refreshes_the_capture_buffer(tiny):
    engine, clock = tiny.engine(), PhaseClock(torch.device("cpu"))
    text = [*PROMPTS[0], engine.begin(0, PROMPTS[0], NEW)]
    dense = export.load_target(tiny.target, torch.float32)
    buffer = engine.speculative.capture.data_ptr()
    for _ in range(3):
        before = len(text) - 1
        text += engine.read(engine.speculative.run(clock), 0)[0]
        _, streams, _ = dense(torch.tensor([text[:-1]]), engine.drafter.captured_layers)
        rows = len(text) - 1 - before
        assert engine.speculative.capture.data_ptr() == buffer
        captured = engine.speculative.captured[0, :rows].flatten(1)
        torch.testing.assert_close(captured, streams[0, before:], rtol=1e-3, atol=1e-4)


def test_case_25_one_hidden_row_an_emitted_token(tiny):
    engine, clock = tiny.engine(), PhaseClock(torch.device("cpu"))
    engine.begin(0, PROMPTS[0], NEW)
    seen = []
    fuse = engine.drafter.fuse
    engine.drafter.fuse = lambda captured: seen.append(captured.shape[0]) or fuse(captured)
    for _ in range(6):
        before = engine.cache.context_lens.clone()
        emitted, num_accepted = engine.read(engine.speculative.run(clock), 0)
        grown = engine.cache.context_lens - before
        assert grown.item() == len(emitted) == num_accepted + 1
    assert seen == [4] * 6  # a static number of rows, enough for every accept length


def test_case_26_stale_rows_of_longer_prompts_are_inert(tiny):
    used, fresh = tiny.engine(), tiny.engine()
    used.generate(PROMPTS[1], NEW)  # leaves its positions, tokens and features in every buffer
    used.speculative.capture.fill_(1e4)
    used._prefill_capture.fill_(1e4)
    for prompt in (PROMPTS[0], PROMPTS[2]):
        a, b = used.generate(prompt, NEW), fresh.generate(prompt, NEW)
        assert (a.tokens, a.accepted) == (b.tokens, b.accepted)


def test_case_28_caches_end_together_and_an_abort_leaves_nothing(tiny):
    prompt = PROMPTS[1]
    engine = tiny.engine(max_tokens=len(prompt) + NEW, page_size=1)
    free = engine.cache.pool.num_free
    wanted = engine.generate(prompt, NEW)
    assert len(wanted.tokens) == NEW
    assert engine.cache.draft.shape[0] == engine.cache.target.shape[1]
    with pytest.raises(ValueError, match="at most"):
        engine.generate(prompt, NEW + 1)

    class Stop(Exception):
        pass

    def abort(tokens, num_accepted):
        raise Stop

    for _ in range(3):
        with pytest.raises(Stop):
            engine.generate(prompt, NEW, on_tokens=lambda t, n: abort(t, n) if n else None)
        assert engine.cache.pool.num_free == free
        assert engine.cache.context_lens.tolist() == [0]
        assert engine.generate(prompt, NEW).tokens == wanted.tokens


def test_a_full_pool_refuses_before_anything_is_written(tiny):
    engine = tiny.engine(batch=2, num_pages=6, page_size=16)
    engine.begin(0, PROMPTS[0], 40)
    before = [
        t.clone() for t in (engine.cache.target, engine.cache.draft, engine.cache.block_tables)
    ]
    with pytest.raises(OutOfPages, match="pages asked for"):
        engine.begin(1, PROMPTS[1], 40)
    after = (engine.cache.target, engine.cache.draft, engine.cache.block_tables)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    engine.end(0)
    assert engine.begin(1, PROMPTS[1], 40) >= 0


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_any_page_size(tiny, page_size):
    plan = PLANS["dynamic"]
    wanted = tiny.engine(plan).generate(PROMPTS[1], NEW)
    got = tiny.engine(plan, page_size=page_size).generate(PROMPTS[1], NEW)
    assert (got.tokens, got.accepted) == (wanted.tokens, wanted.accepted)


def test_stop_ids_end_the_text_within_a_cycle(tiny):
    engine = tiny.engine()
    plain = engine.generate(PROMPTS[0], NEW, speculative=False).tokens
    stop = plain[10]
    end = plain.index(stop) + 1
    for speculative in (False, True):
        parts = []
        result = engine.generate(
            PROMPTS[0],
            NEW,
            speculative=speculative,
            stop_ids=[stop],
            on_tokens=lambda tokens, accepted, parts=parts: parts.append((tokens, accepted)),
        )
        assert result.tokens == plain[:end]
        assert [t for tokens, _ in parts for t in tokens] == result.tokens
        assert all(0 <= accepted <= len(tokens) for tokens, accepted in parts)


def test_phases_and_streaming_add_up(tiny):
    engine = tiny.engine()
    result = engine.generate(PROMPTS[0], NEW)
    assert tuple(result.phase_seconds) == PHASES
    assert all(seconds > 0 for seconds in result.phase_seconds.values())
    assert sum(result.phase_seconds.values()) <= result.seconds
    assert 1 + sum(a + 1 for a in result.accepted) >= NEW


def test_the_first_difference_has_its_logits(tiny):
    engine = tiny.engine()
    plain = engine.generate(PROMPTS[0], 6, speculative=False).tokens
    for at in range(6):
        logits = engine.logits_after([*PROMPTS[0], *plain[:at]])
        assert int(logits.argmax()) == plain[at]
    assert engine.cache.context_lens.tolist() == [0]


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
    free = engine.cache.pool.num_free
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, new)
    assert engine.cache.pool.num_free == free


def test_logits_that_are_not_numbers_are_reported(tiny):
    target, drafter = tiny.models()
    target.final_norm.fill_(float("nan"))
    engine = Engine(target, drafter, PLANS["chain"], max_tokens=64)
    with pytest.raises(RuntimeError, match="not numbers"):
        engine.generate(PROMPTS[0], 8)
    assert engine.cache.context_lens.tolist() == [0]


def test_draft_logits_that_are_not_numbers_are_reported(tiny):
    engine = tiny.engine(DRAWN["chain"])
    engine.begin(0, PROMPTS[0], 8, SamplingParams(1.0))
    engine.start.logits.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="the drafter's logits are not numbers"):
        engine.read(engine.speculative.run(PhaseClock(torch.device("cpu"))), 0)


def test_speculation_needs_a_drafter(tiny):
    target, _ = tiny.models()
    engine = Engine(target, max_tokens=64)
    assert engine.generate(PROMPTS[0], 4, speculative=False).tokens
    with pytest.raises(ValueError, match="expected a drafter"):
        engine.generate(PROMPTS[0], 4)


def test_bfloat16_decodes_losslessly(tiny):
    target, drafter = tiny.models(dtype=torch.bfloat16)
    engine = Engine(target, drafter, PLANS["chain"], max_tokens=64)
    plain, speculative = both(engine, PROMPTS[0])
    assert plain.tokens == speculative.tokens
