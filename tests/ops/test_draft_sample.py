"""``draft_sample``: tokens, draws, q and confidence; the same bits everywhere; bad input."""

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels import Purpose, _library, chain_tree, draft_sample, tree_verify
from spec_kernels.ops.draft_sample.reference import draft_coins, draw
from spec_kernels.ops.tree_verify.reference import coin
from spec_kernels.testing.compare import (
    assert_same_bits,
    poisoned,
    raw_op,
    value_checks,
    value_out_of_range,
)

BACKENDS = ("reference", "cpu", "cuda_on_host")


def randn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def outputs(batch, rows, drafts):
    tokens = poisoned(batch, rows, drafts, dtype=torch.int64)
    return {"tokens": tokens, "confidence": poisoned(batch, rows, drafts, dtype=torch.float32)}


def drawing(batch, rows, columns, temperature=1.0, seed=1):
    """What makes every request draw."""
    return {
        "temperature": torch.full((batch,), temperature),
        "seeds": torch.arange(batch) + seed,
        "probs": torch.zeros(batch, rows, columns),
    }


def lens(*values):
    return torch.tensor(values)


# ------------------------------------------------------------------------------- the likeliest


@pytest.mark.parametrize("num_drafts", [1, 2, 7, 40])
@pytest.mark.parametrize("vocab", [40, 129, 5000])
def test_the_likeliest_come_best_first(backend, dtype, int_dtype, num_drafts, vocab):
    logits = randn(2, 3, vocab, scale=3).to(dtype)
    context = lens(4, 0).to(int_dtype)
    tokens, confidence = draft_sample(logits, None, context, 1, num_drafts, backend=backend)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[..., :num_drafts]
    assert tokens.dtype == torch.int64 and tokens.equal(order)
    exact = logits.double().softmax(-1).gather(-1, order)
    torch.testing.assert_close(confidence.double(), exact, rtol=2e-6, atol=0)


def test_ties_go_to_the_lower_draft_id(backend):
    logits = torch.zeros(1, 2, 300)
    logits[0, 0, [7, 150, 151]] = 1.0
    logits[0, 1] = torch.where(torch.arange(300) % 2 == 0, 0.0, -0.0)
    tokens, _ = draft_sample(logits, None, lens(0), 1, 5, backend=backend)
    assert tokens[0].tolist() == [[7, 150, 151, 0, 1], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("num_drafts", [2, 60, 1024])
def test_more_ties_than_any_list_takes(backend, num_drafts):
    """And more drafts than threads have greatest values; the last one has fewer values still."""
    logits = torch.full((1, 3, 5000), -3.0)
    logits[0, 0, 4990] = 7.0
    logits[0, 1] = torch.where(torch.arange(5000) % 3 == 0, -math.inf, 1.0)
    logits[0, 2, 20:] = math.nan
    tokens, _ = draft_sample(logits, None, lens(0), 1, num_drafts, backend=backend)
    assert tokens[0, 0].tolist() == [4990, *range(num_drafts - 1)]
    assert tokens[0, 1].tolist() == [i for i in range(5000) if i % 3][:num_drafts]
    assert tokens[0, 2].tolist() == list(range(num_drafts))


def test_many_draws(backend):
    """As many as there are tokens: each is drawn once."""
    logits = randn(1, 1, 70, scale=2)
    chosen = drawing(1, 1, 70)
    tokens, confidence = draft_sample(logits, None, lens(0), 1, 70, **chosen, backend=backend)
    assert sorted(tokens[0, 0].tolist()) == list(range(70))
    assert (confidence[0, 0].diff() <= 0).all()
    assert confidence[0, 0, -1] == chosen["probs"][0, 0, tokens[0, 0, -1]]


def test_target_ids_name_the_tokens(backend):
    logits, ids = randn(1, 2, 50), torch.randperm(1000)[:50]
    drafts, _ = draft_sample(logits, None, lens(3), 1, 4, backend=backend)
    tokens, _ = draft_sample(logits, ids, lens(3), 1, 4, backend=backend)
    assert tokens.equal(ids[drafts])


def test_log_of_confidence_serves_as_a_score(backend):
    logits = randn(1, 4, 2000, scale=4)
    _, confidence = draft_sample(logits, None, lens(3), 1, 10, backend=backend)
    exact = logits.double().log_softmax(-1).topk(10).values
    torch.testing.assert_close(confidence.double().log(), exact, rtol=0, atol=1e-6)


def test_confidence_far_below_the_greatest(backend):
    """Down to e^-30 of it, and no lower; nothing is held of what cannot be."""
    logits = torch.tensor([[[0.0, -20.0, -29.0, -31.0, -500.0, -math.inf]]])
    _, confidence = draft_sample(logits, None, lens(3), 1, 6, backend=backend)
    logs = confidence.log()[0, 0]
    torch.testing.assert_close(logs[:3], logits[0, 0, :3], rtol=0, atol=1e-6)
    assert logs[3] == logs[4] == pytest.approx(-30, abs=1e-5) and confidence[0, 0, 5] == 0


def test_case_04_nan_and_infinities(backend):
    logits = torch.full((1, 4, 20), -math.inf)
    logits[0, 1] = math.nan
    logits[0, 2, :3] = torch.tensor([math.nan, 4.0, 2.0])
    logits[0, 3, [3, 9]] = math.inf
    options = [{}, drawing(1, 4, 20)]
    for chosen in options:
        tokens, confidence = draft_sample(logits, None, lens(3), 1, 3, **chosen, backend=backend)
        assert ((tokens >= 0) & (tokens < 20)).all() and confidence.isfinite().all()
        assert (confidence[0, :2] == 0).all()
        assert tokens[0, 2, :2].sort().values.tolist() == [1, 2]
        assert tokens[0, 3, :2].sort().values.tolist() == [3, 9]
        assert confidence[0, 3, :2].tolist() == [0.5, 0.5]
    assert (chosen["probs"][0, :2] == 0).all()
    assert chosen["probs"][0, 3].nonzero().flatten().tolist() == [3, 9]
    tokens, _ = draft_sample(logits, None, lens(3), 1, 3, backend=backend)
    assert tokens[0].tolist() == [[0, 1, 2], [0, 1, 2], [1, 2, 0], [3, 9, 0]]


# ----------------------------------------------------------------------------------------- draws


def test_coins_are_those_of_the_counter():
    """24 of their bits are ``coin``'s, at every position, draw and seed."""
    positions = [0, 5, 2**32 - 1, 2**32, 2**40 + 3]
    for seed in (0, 5, -1, 2**63 - 1, -(2**63)):
        coins = draft_coins(torch.full((5,), seed), torch.tensor(positions), 3)
        for i, position in enumerate(positions):
            expected = [coin(seed, position, Purpose.DRAFT, k) for k in range(3)]
            assert (coins[i] >> 8).tolist() == expected
        assert coins.min() >= 0 and coins.max() < 2**32


def test_draws_are_without_replacement_and_follow_the_weights():
    """Every ordered pair, by a grid of coins: the shares are those of the textbook rule."""
    weights = torch.tensor([50, 0, 30, 20])
    grid = (torch.arange(100) * 2 + 1) * 2**32 // 200
    coins = torch.cartesian_prod(grid, grid)
    pairs = draw(weights.expand(len(coins), -1), coins)
    share = torch.zeros(4, 4, dtype=torch.float64)
    for first, second in pairs.tolist():
        share[first, second] += 1 / len(coins)
    p = weights.double() / 100
    exact = p[:, None] * p / (1 - p[:, None])
    exact.fill_diagonal_(0)
    torch.testing.assert_close(share, exact, rtol=0, atol=6e-3)
    assert not share[1].any() and not share[:, 1].any()


def test_extreme_coins_draw_what_is_possible():
    weights = torch.tensor([[0, 1 << 39, 1 << 39, 0]])
    last = 2**32 - 1
    for first, second in ((0, last), (last, 0), (1 << 31, 1 << 31)):
        drawn = draw(weights, torch.tensor([[first, second, 1 << 31]]))
        assert sorted(drawn[0, :2].tolist()) == [1, 2] and drawn[0, 2] == 3  # nothing is left


def test_the_coin_is_compared_exactly():
    """floor(coin * total / 2^32), against integers without bounds."""
    rng = random.Random(0)
    for _ in range(200):
        total, bits = rng.randrange(1, 2**41), rng.randrange(2**32)
        below = bits * total >> 32
        weights = torch.tensor([below, 1, max(0, total - below - 1)])
        if weights.sum() == total:
            assert draw(weights, torch.tensor([bits])).item() == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_q_is_the_softmax_at_the_target_ids(backend, dtype, temperature):
    logits, ids = randn(2, 3, 300, scale=2).to(dtype), torch.randperm(400)[:300]
    chosen = drawing(2, 3, 400, temperature)
    chosen["probs"].fill_(-7.0)
    tokens, confidence = draft_sample(logits, ids, lens(8, 0), 2, 4, **chosen, backend=backend)
    q = chosen["probs"]
    outside = torch.ones(400, dtype=torch.bool).index_fill(0, ids, False)
    assert (q[..., outside] == -7.0).all()
    exact = (logits.double() / temperature).softmax(-1)
    torch.testing.assert_close(q[..., ids].double(), exact, rtol=4e-6, atol=2e-12)
    assert (q.gather(-1, tokens) > 0).all()
    assert all(len(set(row)) == 4 for rows in tokens.tolist() for row in rows)
    assert confidence[..., 0].equal(q.amax(-1))


def num_trials(backend):
    """An emulated thread takes longer than a kernel."""
    return 2000 if backend == "cuda_on_host" else 20000


def test_draws_follow_q(backend):
    """Over seeds, each ordered pair of two draws as often as the rule without replacement has."""
    num = num_trials(backend)
    row = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1]).log()
    chosen = drawing(num, 1, 5)
    tokens, _ = draft_sample(
        row.expand(num, 1, 5), None, torch.zeros(num, dtype=torch.int64), 1, 2, **chosen,
        backend=backend,
    )  # fmt: skip
    share = torch.zeros(5, 5, dtype=torch.float64)
    pairs, counts = tokens[:, 0].unique(dim=0, return_counts=True)
    share[pairs[:, 0], pairs[:, 1]] = counts.double() / num
    p = row.double().exp()
    exact = p[:, None] * p / (1 - p[:, None])
    exact.fill_diagonal_(0)
    # Five standard deviations of a share.
    assert ((share - exact).abs() <= 5 * (exact / num).sqrt()).all()


def test_case_01_a_token_of_probability_zero_is_never_drawn(backend):
    logits = torch.full((64, 1, 33), -math.inf)
    logits[:, 0, 20] = 0.0
    logits[:, 0, 25] = -10.0
    chosen = drawing(64, 1, 33, 0.5)
    context = torch.zeros(64, dtype=torch.int64)
    tokens, confidence = draft_sample(logits, None, context, 1, 3, **chosen, backend=backend)
    assert tokens[:, 0, :2].sort(-1).values.tolist() == [[20, 25]] * 64
    assert (tokens[:, 0, 2] == 32).all()  # nothing is left: the last id, of q = 0
    assert (confidence[:, 0, 2] == 0).all()


def test_the_tokens_are_those_of_the_rule(backend):
    """Written out for one row: coins, weights of the q that was written, first above."""
    logits, depth = randn(3, 2, 500, scale=2), 3
    chosen = drawing(3, 2, 500, 0.8, seed=77)
    context = lens(10, 2**33, 0)
    tokens, confidence = draft_sample(logits, None, context, depth, 4, **chosen, backend=backend)
    coins = draft_coins(chosen["seeds"], context + depth, 4)
    for b in range(3):
        for p in range(2):
            left = chosen["probs"][b, p].double()
            for i in range(4):
                assert float(confidence[b, p, i]) == float(left.max())
                weights = (left * 2**40).long()
                below = int(coins[b, i]) * int(weights.sum()) >> 32
                token = int((weights.cumsum(0) > below).nonzero()[0])
                assert tokens[b, p, i] == token
                left[token] = 0.0


def test_confidence_does_not_look_at_the_draw_itself(backend):
    """Of draw j it is the same whatever draw j is, for the same draws before."""
    logits = randn(1, 1, 12).expand(200, 1, 12)
    chosen = drawing(200, 1, 12)
    context = torch.zeros(200, dtype=torch.int64)
    tokens, confidence = draft_sample(logits, None, context, 1, 3, **chosen, backend=backend)
    seen = {}
    for row, held in zip(tokens[:, 0].tolist(), confidence[:, 0].tolist(), strict=True):
        for j in range(3):
            assert seen.setdefault((j, *row[:j]), held[j]) == held[j]
    assert len({tuple(r) for r in tokens[:, 0].tolist()}) > 50


def test_case_14_verification_of_what_was_drawn_leaves_the_targets_distribution(backend):
    """One draft drawn from q, accepted by p / q: the emitted token follows p."""
    num, vocab = num_trials(backend), 4
    p, q = torch.tensor([0.6, 0.2, 0.1, 0.1]), torch.tensor([0.7, 0.2, 0.05, 0.05])
    probs = torch.zeros(num, 2, vocab)
    context, seeds, warm = torch.zeros(num, dtype=torch.int64), torch.arange(num), torch.ones(num)
    tokens = torch.zeros(num, 2, dtype=torch.int64)
    draft_sample(
        q.log().expand(num, 1, vocab), None, context, 1, temperature=warm, seeds=seeds,
        tokens=tokens[:, 1:].unsqueeze(1), probs=probs[:, :1], backend=backend,
    )  # fmt: skip
    tree = chain_tree(tokens)
    got = tree_verify(
        p.log().expand(num, 2, vocab), tree.tokens, tree.first_child, tree.next_sibling, context,
        temperature=warm, seeds=seeds, draft_probs=probs,
    )  # fmt: skip
    assert float(got.num_accepted.double().mean()) == pytest.approx(0.9, abs=1.5 / num**0.5)
    share = got.tokens[:, 0].bincount(minlength=vocab) / num
    assert ((share - p).abs() <= 5 * (p / num).sqrt()).all()


# -------------------------------------------------------------------------------------- company


def mixed(seed=0, vocab=300, num_ids=310):
    """Greedy, drawing and padded requests in one batch."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(5, 3, vocab, generator=generator) * 2,
        "target_ids": torch.randperm(num_ids, generator=generator)[:vocab],
        "context_lens": torch.tensor([4, -1, 9, 0, 2**40]),
        "depth": 2,
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.5, 0.0]),
        "seeds": torch.tensor([1, 2, 3, -4, 5]),
        "probs": torch.full((5, 3, num_ids), 0.125),
    }


@pytest.mark.parametrize("length, temperature", [(-1, 1.0), (-(2**63), math.nan)])
def test_case_05_padded_and_greedy_requests_leave_probs(length, temperature, backend):
    case = mixed()
    case["logits"][1], case["temperature"][1] = math.nan, temperature
    case["context_lens"][1] = length
    tokens, confidence = draft_sample(**case, **outputs(5, 3, 4), backend=backend)
    assert (tokens[1] == 0).all() and (confidence[1] == 0).all()
    assert (case["probs"][[0, 1, 4]] == 0.125).all()
    torch.testing.assert_close(case["probs"][[2, 3]].sum(-1), torch.full((2, 3), 1 + 10 / 8))
    greedy, held = draft_sample(*(case[n] for n in ("logits", "target_ids", "context_lens")), 1, 4)
    assert tokens[[0, 4]].equal(greedy[[0, 4]]) and confidence[[0, 4]].equal(held[[0, 4]])


def test_case_12_without_probs_or_temperature_the_likeliest(backend):
    case = mixed()
    expected = draft_sample(case["logits"], case["target_ids"], case["context_lens"], 2, 3)
    for missing in ("temperature", "probs"):
        tokens, confidence = draft_sample(**{**case, missing: None}, num_drafts=3, backend=backend)
        assert tokens.equal(expected[0]) and confidence.equal(expected[1])


def test_case_11_a_row_does_not_depend_on_its_company(backend):
    case = mixed()
    tokens, confidence = draft_sample(**case, num_drafts=4, backend=backend)
    for b in (0, 2, 3):
        for p in range(3):
            alone = {
                n: t[b : b + 1] if isinstance(t, torch.Tensor) and n != "target_ids" else t
                for n, t in case.items()
            }
            alone["logits"] = alone["logits"][:, p : p + 1]
            alone["probs"] = torch.full((1, 1, 310), 0.125)
            own = draft_sample(**alone, num_drafts=4, backend=backend)
            assert own[0][0, 0].equal(tokens[b, p]) and own[1][0, 0].equal(confidence[b, p])
            assert_same_bits(alone["probs"][0, 0], case["probs"][b, p])


def test_rows_of_a_request_share_their_coins_and_depths_do_not(backend):
    logits = randn(1, 1, 1000).expand(1, 3, 1000)

    def tokens(depth, context):
        chosen = drawing(1, 3, 1000)
        return draft_sample(logits, None, lens(context), depth, 2, **chosen, backend=backend)[0]

    first = tokens(1, 7)
    assert first[0, 0].equal(first[0, 1]) and first[0, 0].equal(first[0, 2])
    assert not first.equal(tokens(2, 7))
    assert tokens(3, 6).equal(tokens(2, 7))  # one position


# ------------------------------------------------------------------------------- the same bits


def random_case(rng):
    """Sizes around blocks and vectors, NaN, infinities, ties, every kind of request."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    batch, rows = rng.randint(1, 4), rng.choice([1, 2, 5])
    vocab = rng.choice([1, 2, 7, 16, 100, 128, 129, 1000, 8193])
    drafts = rng.randint(1, min(vocab, rng.choice([1, 3, 8, 40])))
    num_ids = vocab + rng.choice([0, 5])
    logits = torch.randn(batch, rows, vocab, generator=generator) * rng.choice([0.01, 1, 5, 50])
    if rng.random() < 0.3:
        logits = logits.round()
    for value, share in ((math.nan, 0.1), (-math.inf, 0.3), (-math.inf, 1.0), (math.inf, 0.05)):
        if rng.random() < 0.15:
            logits[torch.rand(logits.shape, generator=generator) < share] = value
    if rng.random() < 0.5:
        logits = logits.bfloat16()
    warmth = rng.choice([1e-40, 0.1, 1.0, 2.0, 100.0, 3e38])
    temperature = torch.rand(batch, generator=generator) * warmth
    temperature[torch.rand(batch, generator=generator) < 0.3] = 0.0
    case = {
        "logits": logits,
        "target_ids": torch.randperm(num_ids, generator=generator)[:vocab],
        "context_lens": torch.randint(-1, 2**40, (batch,), generator=generator),
        "depth": rng.choice([1, 3, 2**33]),
        "temperature": temperature,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        "probs": torch.rand(batch, rows, num_ids, generator=generator),
    }
    for name, share in (("target_ids", 0.3), ("temperature", 0.1), ("probs", 0.1)):
        if rng.random() < share:
            case[name] = None
    return case, (batch, rows, drafts)


def result(case, shape, backend):
    case = {n: t.clone() if n == "probs" and t is not None else t for n, t in case.items()}
    got = draft_sample(**case, **outputs(*shape), backend=backend)
    return (*got, case["probs"])


def check_bits(seed, backend):
    case, shape = random_case(random.Random(seed))
    expected = result(case, shape, "reference")
    for mine, right in zip(result(case, shape, backend), expected, strict=True):
        if right is not None:
            assert_same_bits(mine, right)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_compiled_kernels_have_the_references_bits(seed):
    check_bits(seed, None)


@pytest.mark.parametrize("seed", range(25))
def test_every_backend_has_the_references_bits(seed, backend):
    check_bits(seed, backend)


@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_every_instruction_set_gives_the_same_bits(isa):
    """The suite itself runs on the best set; the lesser ones need a process of their own."""
    if _library.cpu_isa() in ("none", "plain"):
        pytest.skip(f"the kernels here run on {_library.cpu_isa()!r} only")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_draft_sample as suite; "
        "assert suite._library.cpu_isa() == sys.argv[2]; "
        "suite.test_compiled_kernels_have_the_references_bits()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent), isa],
        env={**os.environ, "SPEC_KERNELS_CPU_ISA": isa},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_large_vocabulary_whatever_the_thread_count(backend, num_drafts):
    """Several chunks of a row."""
    vocab = 70_003
    logits = randn(2, 1, vocab, scale=4)
    case = {
        "logits": logits,
        "target_ids": None,
        "context_lens": lens(5, 9),
        "depth": 1,
        **drawing(2, 1, vocab, 0.9),
    }
    case["temperature"][0] = 0.0
    expected = result(case, (2, 1, num_drafts), "reference")
    threads = torch.get_num_threads()
    try:
        for num in (1, threads):
            torch.set_num_threads(num)
            got = result(case, (2, 1, num_drafts), backend)
            for mine, right in zip(got, expected, strict=True):
                assert_same_bits(mine, right)
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------- strides


def test_case_18_strides_are_honoured(backend, dtype):
    case = mixed(vocab=40, num_ids=50)
    case["logits"] = case["logits"].to(dtype)
    expected = result(case, (5, 3, 4), "reference")
    strided = dict(case)
    wide = torch.zeros(5, 6, 60, dtype=dtype)
    wide[:, ::2, 7:47] = case["logits"]
    strided["logits"] = wide[:, ::2, 7:47]
    for name in ("target_ids", "context_lens", "temperature", "seeds"):
        strided[name] = torch.stack((case[name], case[name] * 0), 1)[:, 0]
    probs = torch.full((3, 5, 53), 0.125)
    strided["probs"] = probs.transpose(0, 1)[..., 1:51]
    tokens = poisoned(5, 3 * 4 + 5, dtype=torch.int64)
    confidence = poisoned(4, 3, 5, dtype=torch.float32)
    out = {
        "tokens": tokens[:, 2:14].view(5, 3, 4),
        "confidence": confidence.permute(2, 1, 0),
    }
    got = draft_sample(**strided, **out, backend=backend)
    for mine, right in zip((*got, strided["probs"]), expected, strict=True):
        assert_same_bits(mine, right)
    assert (probs[..., 0] == 0.125).all() and (probs[..., 51:] == 0.125).all()
    assert (tokens[:, :2] == poisoned(1, dtype=torch.int64)).all()


def test_case_08_offsets_beyond_32_bits(backend):
    vocab, stride = 500, 2**31 + 7
    # Untouched pages of these storages are never mapped.
    logits = torch.empty(stride + vocab, dtype=torch.bfloat16).as_strided(
        (1, 2, vocab), (0, stride, 1)
    )
    logits.copy_(randn(1, 2, vocab))
    probs = torch.empty(2**30 + vocab).as_strided((1, 2, vocab), (0, 2**30, 1)).zero_()
    chosen = {**drawing(1, 2, vocab), "probs": probs}
    got = draft_sample(logits, None, lens(3), 1, 2, **chosen, backend=backend)
    dense = drawing(1, 2, vocab)
    right = draft_sample(logits.contiguous(), None, lens(3), 1, 2, **dense, backend="reference")
    assert got[0].equal(right[0]) and got[1].equal(right[1])
    assert_same_bits(probs.contiguous(), dense["probs"])


# ------------------------------------------------------------------------------------ bad input


def sound():
    return {
        "logits": randn(2, 3, 20),
        "target_ids": torch.arange(20),
        "context_lens": lens(3, 4),
        "depth": 1,
        **drawing(2, 3, 30),
        **outputs(2, 3, 2),
    }


BAD = {
    "logits": [
        torch.zeros(2, 20),
        torch.zeros(2, 3, 20).double(),
        torch.zeros(2, 3, 0),
        torch.empty(1, 1, 2**22 + 1, dtype=torch.bfloat16),
        torch.zeros(2, 3, 40)[..., ::2],
        None,
    ],
    "target_ids": [torch.arange(19), torch.arange(20).int(), torch.zeros(20)],
    "context_lens": [torch.zeros(3).long(), torch.zeros(2)],
    "depth": [0, -1],
    "temperature": [torch.ones(3), torch.ones(2).double(), 1.0],
    "seeds": [torch.zeros(2).int(), torch.zeros(3).long(), None],
    "tokens": [
        torch.zeros(2, 3, 0).long(),
        torch.zeros(2, 3, 21).long(),
        torch.zeros(2, 2, 2).long(),
        torch.zeros(2, 3, 2).int(),
    ],
    "confidence": [torch.zeros(2, 3, 1), torch.zeros(2, 3, 2).double()],
    "probs": [
        torch.zeros(2, 2, 30),
        torch.zeros(2, 3, 30).double(),
        torch.zeros(2, 3, 60)[..., ::2],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(backend, name):
    for value in BAD[name]:
        with pytest.raises(
            ValueError, match=f"spec_kernels::draft_sample: {name}: expected .*, got"
        ):
            draft_sample(**{**sound(), name: value}, backend=backend)


def test_a_number_of_drafts_is_needed_and_agrees(backend):
    case = {n: t for n, t in sound().items() if n not in ("tokens", "confidence")}
    for num_drafts in (None, 0, 21):
        with pytest.raises(ValueError, match="num_drafts: expected"):
            draft_sample(**case, num_drafts=num_drafts, backend=backend)
    with pytest.raises(ValueError, match=r"tokens: expected shape \[2, 3, 3\]"):
        draft_sample(**sound(), num_drafts=3, backend=backend)
    with pytest.raises(ValueError, match="probs: expected at least 20 columns, got 19"):
        draft_sample(
            **{**sound(), "target_ids": None, "probs": torch.zeros(2, 3, 19)}, backend=backend
        )


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_temperatures_out_of_range_are_refused(backend, value):
    """Before anything is written; on a device such a request counts as padded."""
    for raises in value_checks(backend):
        case = sound()
        case["temperature"][1] = value
        match = rf"draft_sample: temperature\[1\]: expected a finite number >= 0, got -?{value}"
        with value_out_of_range(match, raises):
            draft_sample(**case, backend=backend)
        if backend in ("reference", "cpu"):
            assert case["confidence"].isnan().all() and not case["probs"].any()
        else:
            right = sound()
            draft_sample(**right, backend="reference")
            assert (case["tokens"][1] == 0).all() and (case["confidence"][1] == 0).all()
            assert not case["probs"][1].any()
            for name in ("tokens", "confidence", "probs"):
                assert_same_bits(case[name][0], right[name][0])


@pytest.mark.parametrize("value", [-1, 30, 2**40, -(2**63)])
def test_target_ids_out_of_range_are_refused(backend, value):
    """Where q is written; on a device that entry of q is left out."""
    for raises in value_checks(backend):
        case = sound()
        case["target_ids"][7] = value
        with value_out_of_range(
            rf"draft_sample: target_ids\[7\]: expected 0 <= id < 30, got {value}", raises
        ):
            draft_sample(**case, backend=backend)
        if backend in ("reference", "cpu"):
            assert case["confidence"].isnan().all() and not case["probs"].any()
        else:
            right = sound()
            draft_sample(**right, backend="reference")
            right["probs"][..., 7] = 0.0
            assert_same_bits(case["probs"], right["probs"])
            assert_same_bits(case["confidence"], right["confidence"])
            kept = right["tokens"] != 7
            assert case["tokens"][kept].equal(right["tokens"][kept])
    nowhere = {**sound(), "probs": torch.zeros(2, 3, 0)}
    for raises in value_checks(backend):
        with value_out_of_range(r"draft_sample: target_ids\[.*\]: expected 0 <= id < 0", raises):
            draft_sample(**nowhere, backend=backend)
    greedy = {**sound(), "temperature": torch.zeros(2)}
    greedy["target_ids"] = greedy["target_ids"].index_fill(0, torch.tensor([7]), value)
    draft_sample(**greedy, backend=backend)  # nobody indexes with them


@pytest.mark.parametrize("empty", ["batch", "rows"])
def test_nothing_to_do(backend, empty):
    shape = (0, 3) if empty == "batch" else (2, 0)
    chosen = drawing(*shape, 20, temperature=-1.0)  # a call without rows reads no values
    context = torch.zeros(shape[0], dtype=torch.int64)
    tokens, confidence = draft_sample(
        torch.zeros(*shape, 20), None, context, 1, 2, **chosen, backend=backend
    )
    assert tokens.shape == confidence.shape == (*shape, 2)


def test_outputs_stand_apart(backend):
    case = sound()
    for name, view, message in (
        ("tokens", case["tokens"][:, :1].expand(2, 3, 2), "rows that do not overlap"),
        ("tokens", case["seeds"].expand(2, 3, 2), "rows that do not overlap|memory apart"),
        ("confidence", case["logits"][..., :2], "memory apart from logits"),
        ("probs", case["probs"][:1].expand(2, 3, 30), "rows that do not overlap"),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected {message}"):
            draft_sample(**{**case, name: view}, backend=backend)


def raw_arguments():
    case = sound()
    names = ("logits", "target_ids", "context_lens", "depth", "temperature", "seeds", "tokens")
    return tuple(case[n] for n in (*names, "confidence", "probs"))


def test_raw_op_refuses_what_the_api_would(backend):
    if backend == "reference":
        pytest.skip("the reference leaves shapes to the API")
    arguments, op = raw_arguments(), raw_op("draft_sample", backend)
    op(*arguments)
    for i, argument in enumerate(arguments):
        wrong = argument[:1] if isinstance(argument, torch.Tensor) else 0
        with pytest.raises(RuntimeError, match="spec_kernels::draft_sample: .*expected .*, got"):
            op(*arguments[:i], wrong, *arguments[i + 1 :])


def test_opcheck():
    torch.library.opcheck(torch.ops.spec_kernels.draft_sample.default, raw_arguments())


def test_compiles_without_graph_breaks():
    def step(logits, context_lens, temperature, seeds, probs):
        tokens, confidence = draft_sample(
            logits, None, context_lens, 1, 3, temperature=temperature, seeds=seeds, probs=probs
        )
        return tokens + 1, confidence, probs * 2

    chosen = drawing(2, 3, 20)
    arguments = (randn(2, 3, 20), lens(3, -1), *chosen.values())
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments)
    for x, y in zip(got, step(*arguments), strict=True):
        assert x.equal(y)


def test_the_reference_waits_for_no_device():
    """Meta tensors, which have no values, stand for a device's: asking for one would raise."""
    case = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in sound().items()}
    tokens, confidence = draft_sample(**case, backend="reference")
    assert tokens.device.type == confidence.device.type == "meta"


def test_a_depth_beyond_64_bits_is_refused(backend):
    with pytest.raises(ValueError, match="depth: expected an integer of 64 bits, got 9223372"):
        draft_sample(torch.zeros(1, 1, 4), None, torch.tensor([1]), 2**63, 2, backend=backend)
