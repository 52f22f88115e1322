"""``tree_verify``: the walk, the target's choice, its distribution, bad links and parameters."""

import dataclasses
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_kernels import (
    Purpose,
    Verified,
    VerifyStatus,
    _library,
    chain_tree,
    link_tree,
    tree_verify,
)
from spec_kernels.ops.tree_verify.reference import (
    coin,
    exp_weights,
    philox4x32,
    sample,
    token_weights,
    values_of,
)
from spec_kernels.testing.compare import poisoned, raw_op, value_checks, value_out_of_range

BACKENDS = ("reference", "cpu", "cuda_on_host")

GOLDEN = {
    "tokens": torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]),
    "first_child": torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]),
    "next_sibling": torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]),
    "context_lens": torch.tensor([9, 0]),
}
GOLDEN_CHOICES = torch.tensor([[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]])


def one_hot(choices, vocab):
    return torch.nn.functional.one_hot(choices, vocab).float()


def poisoned_out(batch, columns, dtype=torch.int32):
    return Verified(
        accept_index=poisoned(batch, columns, dtype=dtype),
        num_accepted=poisoned(batch, dtype=dtype),
        tokens=poisoned(batch, columns, dtype=torch.int64),
        status=poisoned(batch, dtype=dtype),
    )


def fields(v):
    return [getattr(v, f.name) for f in dataclasses.fields(v)]


def assert_equal(a, b):
    for f in dataclasses.fields(a):
        assert getattr(a, f.name).long().equal(getattr(b, f.name).long()), f.name


def roots_only(logits, **kwargs):
    """The target's choice for each row of ``logits [B, V]``: trees that are nothing but a root."""
    links = torch.full((logits.shape[0], 1), -1)
    kwargs.setdefault("context_lens", torch.full((logits.shape[0],), 5))
    return tree_verify(logits[:, None], links, links, links, **kwargs)


def links_of(tree):
    return {n: getattr(tree, n) for n in ("tokens", "first_child", "next_sibling")}


def per_request(batch, **values):
    kinds = {"top_k": torch.int64, "seeds": torch.int64}
    return {n: torch.full((batch,), v, dtype=kinds.get(n)) for n, v in values.items()}


def test_philox_known_answers():
    """The vectors published with Random123."""
    ones = 0xFFFFFFFF
    known = {
        ((0, 0, 0, 0), (0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ((ones,) * 4, (ones,) * 2): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
        ): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (counter, key), words in known.items():
        assert " ".join(f"{w:08x}" for w in philox4x32(counter, key)) == words


def test_coins_differ_by_purpose_and_position():
    coins = {coin(3, position, purpose) for position in range(50) for purpose in Purpose}
    assert len(coins) == 50 * len(Purpose)
    assert all(0 <= c < 1 << 24 for c in coins)
    assert coin(-1, 2**40 + 1) != coin(-1, 1)


def test_exp_is_accurate():
    x = torch.linspace(-29.9, 0.0, 100_001)
    exact = x.double().exp()
    assert ((exp_weights(x).double() - exact).abs() / exact).max() < 2 * torch.finfo(x.dtype).eps
    assert exp_weights(torch.zeros(1)).item() == 1.0


@pytest.mark.parametrize("max_accepted", [3, 5])
def test_golden_walk(backend, dtype, int_dtype, max_accepted):
    links = {n: t.to(int_dtype) for n, t in GOLDEN.items()}
    out = poisoned_out(2, max_accepted + 1, int_dtype)
    got = tree_verify(one_hot(GOLDEN_CHOICES, 19).to(dtype), **links, out=out, backend=backend)
    assert got is out
    pad = [-1] * (max_accepted - 3)
    assert got.accept_index.tolist() == [[0, 3, 4, 5, *pad], [0, 4, 5, -1, *pad]]
    assert got.num_accepted.tolist() == [3, 2]
    assert got.tokens.tolist() == [[3, 4, 5, 18, *pad], [11, 12, 18, -1, *pad]]
    assert got.status.tolist() == [0, 0]


@pytest.mark.parametrize("room", [0, 1, 2])
def test_walk_stops_where_room_ends(backend, room):
    got = tree_verify(one_hot(GOLDEN_CHOICES, 19), **GOLDEN, max_accepted=room, backend=backend)
    assert got.accept_index.tolist() == [[0, 3, 4, 5][: room + 1], [0, 4, 5][: room + 1]]
    assert got.tokens.tolist() == [[3, 4, 5][: room + 1], [11, 12, 18][: room + 1]]
    assert got.num_accepted.tolist() == [room] * 2


def test_case_01_probability_zero_is_never_chosen(backend):
    # At position 6 these seeds give the smallest and the greatest coin there are.
    extremes = torch.tensor([1337225, 3629370])
    assert [coin(s, 6) for s in extremes.tolist()] == [0, 2**24 - 1]
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf, -100.0, math.nan])
    got = roots_only(
        logits.repeat(2, 1), **per_request(2, temperature=1.0), seeds=extremes, backend=backend
    )
    assert got.tokens.tolist() == [[1], [3]]
    many = roots_only(
        logits.repeat(500, 1),
        **per_request(500, temperature=1.0),
        seeds=torch.arange(500),
        backend=backend,
    )
    assert set(many.tokens.flatten().tolist()) == {1, 3}


def test_case_01_sampling_is_half_open():
    weights = torch.tensor([0, 3, 0, 1, 0])
    assert [sample(weights, bits << 22) for bits in range(4)] == [1, 1, 1, 3]
    assert sample(weights, (3 << 22) - 1) == 1 and sample(weights, 2**24 - 1) == 3


CYCLES = {
    "sibling cycle": ({"next_sibling": [-1, 2, 1, -1]}, VerifyStatus.SIBLING_CYCLE),
    "self sibling": ({"next_sibling": [-1, 1, -1, -1]}, VerifyStatus.SIBLING_CYCLE),
    "child beyond the tree": ({"first_child": [4, -1, -1, -1]}, VerifyStatus.BAD_LINK),
    "huge child": ({"first_child": [2**62, -1, -1, -1]}, VerifyStatus.BAD_LINK),
    "negative child": ({"first_child": [-2, -1, -1, -1]}, VerifyStatus.BAD_LINK),
    "root as its own child": ({"first_child": [0, -1, -1, -1]}, VerifyStatus.BAD_LINK),
    "sibling beyond the tree": ({"next_sibling": [-1, 2**40, -1, -1]}, VerifyStatus.BAD_LINK),
}


@pytest.mark.parametrize("name", CYCLES)
def test_case_02_broken_links_end_the_walk(backend, name):
    change, bit = CYCLES[name]
    links = {
        "tokens": torch.tensor([[0, 5, 6, 7]] * 3),
        "first_child": torch.tensor([[1, -1, -1, -1]] * 3),
        "next_sibling": torch.tensor([[-1, 2, 3, -1]] * 3),
    }
    for key, value in change.items():
        links[key][1] = torch.tensor(value)
    logits = one_hot(torch.full((3, 4), 9), 12)
    logits[[0, 2], 0] = one_hot(torch.tensor(7), 12) * 2
    got = tree_verify(logits, **links, context_lens=torch.zeros(3).int(), backend=backend)
    assert got.status.tolist() == [0, int(bit), 0]
    assert got.num_accepted.tolist() == [1, 0, 1]
    assert got.tokens[:, :2].tolist() == [[7, 9], [9, -1], [7, 9]]


def test_case_02_links_upwards_cannot_go_round(backend):
    tokens = torch.tensor([[5, 5, 5, 5]])
    first_child = torch.tensor([[1, 2, 0, -1]])
    none = torch.full((1, 4), -1)
    logits = one_hot(torch.full((1, 4), 5), 6)
    got = tree_verify(logits, tokens, first_child, none, torch.tensor([0]), 9, backend=backend)
    assert got.accept_index[0, :4].tolist() == [0, 1, 2, -1]
    assert got.status.tolist() == [int(VerifyStatus.BAD_LINK)]


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 63, 64, 65, 128, 200, 1024])
def test_case_03_long_chains(backend, num_nodes):
    tokens = torch.arange(num_nodes)[None]
    tree = link_tree(tokens, torch.arange(-1, num_nodes - 1))
    logits = one_hot((tokens + 1) % num_nodes, num_nodes)
    got = tree_verify(logits, **links_of(tree), context_lens=torch.tensor([3]), backend=backend)
    assert got.accept_index.tolist() == tokens.tolist()
    assert got.tokens.tolist() == ((tokens + 1) % num_nodes).tolist()
    assert got.num_accepted.tolist() == [num_nodes - 1]


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 8191, 8193, 33000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_04_ids_stay_within_the_vocabulary(backend, dtype, vocab, temperature):
    logits = torch.full((4, vocab), -5.0, dtype=dtype)
    logits[0, -1] = 50.0  # the last id
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[3, :-1] = math.nan  # only the last id is there
    sampling = per_request(4, temperature=temperature, seeds=8)
    got = roots_only(logits, **sampling, out=poisoned_out(4, 1), backend=backend)
    assert got.tokens.flatten().tolist() == [vocab - 1, 0, 0, vocab - 1]
    bad = int(VerifyStatus.NO_TOKEN)
    assert got.status.tolist() == [0, bad, bad, 0]


def test_case_04_a_row_without_tokens_ends_the_walk(backend):
    logits = one_hot(GOLDEN_CHOICES, 19)
    logits[0, 3] = math.nan
    got = tree_verify(logits, **GOLDEN, backend=backend)
    assert got.accept_index[0].tolist() == [0, 3, -1, -1, -1, -1]
    assert got.tokens[0].tolist() == [3, 0, -1, -1, -1, -1]
    assert got.status.tolist() == [int(VerifyStatus.NO_TOKEN), 0]
    assert got.num_accepted.tolist() == [1, 2]


def test_case_05_padded_and_shrunk_batches(backend):
    logits = one_hot(GOLDEN_CHOICES, 19)
    both = tree_verify(logits, **GOLDEN, backend=backend)
    nothing = float("nan")
    padded = {
        "tokens": torch.cat((GOLDEN["tokens"], torch.full((1, 6), 2**60))),
        "first_child": torch.cat((GOLDEN["first_child"], torch.full((1, 6), 2**60))),
        "next_sibling": torch.cat((GOLDEN["next_sibling"], torch.full((1, 6), 2**60))),
        "context_lens": torch.tensor([9, 0, -1]),
        "temperature": torch.tensor([0.0, 0.0, nothing]),
        "top_p": torch.tensor([1.0, 1.0, nothing]),
        "seeds": torch.tensor([1, 2, 3]),
    }
    logits = torch.cat((logits, torch.full((1, 6, 19), nothing)))
    out = poisoned_out(3, 6)
    tree_verify(logits, **padded, out=out, backend=backend)
    assert_equal(Verified(*(t[:2] for t in fields(out))), both)
    assert out.accept_index[2].tolist() == out.tokens[2].tolist() == [-1] * 6
    assert out.num_accepted[2] == 0 and out.status[2] == 0


def test_case_06_zero_drafts_accepted_still_emit_the_bonus(backend):
    logits = one_hot(torch.full((2, 6), 18), 19)
    got = tree_verify(logits, **GOLDEN, max_accepted=3, backend=backend)
    assert got.accept_index.tolist() == [[0, -1, -1, -1]] * 2
    assert got.num_accepted.tolist() == [0, 0]
    assert got.tokens.tolist() == [[18, -1, -1, -1]] * 2


def test_case_08_offsets_beyond_32_bits(backend):
    vocab, stride = 1000, 2**31 + 7
    # Untouched pages of this storage are never mapped.
    storage = torch.empty(stride + vocab, dtype=torch.bfloat16)
    logits = storage.as_strided((1, 2, vocab), (0, stride, 1))
    logits[0] = -1.0
    logits[0, 0, 5] = 1.0
    logits[0, 1, 999] = 1.0
    tree = link_tree(torch.tensor([[3, 5]]), torch.tensor([-1, 0]))
    got = tree_verify(logits, **links_of(tree), context_lens=torch.tensor([2]), backend=backend)
    assert got.tokens.tolist() == [[5, 999]]


def random_tree(rng, num_nodes, vocab):
    """Parents and tokens; siblings carry distinct tokens."""
    parents, tokens, taken = [-1], [rng.randrange(vocab)], set()
    while len(parents) < num_nodes:
        parent, token = rng.randrange(len(parents)), rng.randrange(vocab)
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    return parents, tokens


def target_logits(parents, tokens, vocab):
    """Logits that depend on the path alone, as a target's do."""
    rows, paths = [], []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
        generator = torch.Generator().manual_seed(hash(paths[-1]) % 2**31)
        rows.append(torch.randn(vocab, generator=generator) * 2)
    return torch.stack(rows)


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    num_nodes=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7]),
)
def test_case_09_a_superset_tree_accepts_at_least_as_much(backend, seed, num_nodes, temperature):
    rng, vocab = random.Random(seed), 4
    parents, tokens = random_tree(rng, num_nodes, vocab)
    kept = {0}
    for i in range(1, num_nodes):
        if parents[i] in kept and rng.random() < 0.7:
            kept.add(i)
    kept = sorted(kept)
    logits = target_logits(parents, tokens, vocab)
    sampling = per_request(1, temperature=temperature, seeds=seed)
    context = torch.tensor([rng.randrange(100)])
    emitted = []
    for nodes in (kept, range(num_nodes)):
        place = {node: i for i, node in enumerate(nodes)}
        tree = link_tree(
            torch.tensor([[tokens[i] for i in nodes]]),
            torch.tensor([place.get(parents[i], -1) for i in nodes]),
        )
        got = tree_verify(
            logits[list(nodes)][None],
            **links_of(tree),
            context_lens=context,
            **sampling,
            backend=backend,
        )
        emitted.append(got.tokens[0, : int(got.num_accepted[0]) + 1].tolist())
    small, large = emitted
    assert large[: len(small)] == small


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_10_bias_mask_and_min_p_apply_at_every_node(backend, temperature):
    sampling = per_request(1, temperature=temperature, seeds=4)
    tree = link_tree(torch.tensor([[0, 7, 8]]), torch.tensor([-1, 0, 1]))
    logits = one_hot(torch.tensor([[1, 1, 1]]), 40) * 30  # the target alone would say 1

    def verify(**kwargs):
        got = tree_verify(
            logits, **links_of(tree), context_lens=torch.tensor([3]), **sampling, **kwargs,
            backend=backend,
        )  # fmt: skip
        return got.tokens.tolist()[0]

    assert verify() == [1, -1, -1]
    # The mask of a node is its own: 7 after the root, 8 after 7, 39 after 8.
    allowed = torch.zeros(1, 3, 2, dtype=torch.int32)
    allowed[0, 0, 0] = 1 << 7
    allowed[0, 1, 0] = 1 << 8
    allowed[0, 2, 1] = 1 << 7
    assert verify(allowed=allowed) == [7, 8, 39]
    bias = torch.zeros(1, 40)
    bias[0, 7] = 60.0
    assert verify(logit_bias=bias) == [7, 7, -1]
    assert verify(logit_bias=bias[0]) == [7, 7, -1]
    logits[0, 1, 8] = 90.0
    assert verify(logit_bias=bias) == [7, 8, 7]
    # min-p leaves one token at every node, however warm.
    if temperature:
        sampling["temperature"].fill_(30.0)
        assert verify(logit_bias=bias, **per_request(1, min_p=0.9)) == [7, 8, 7]


def test_allowed_bits_past_the_vocabulary_are_not_read(backend):
    allowed = torch.full((1, 1, 1), -1, dtype=torch.int32)
    allowed &= ~0b1111
    got = roots_only(torch.zeros(1, 4), allowed=allowed, backend=backend)
    assert got.status.tolist() == [int(VerifyStatus.NO_TOKEN)] and got.tokens.tolist() == [[0]]


def test_case_11_batch_order_does_not_matter(backend):
    generator = torch.Generator().manual_seed(1)
    batch, num_nodes, vocab = 6, 5, 50
    logits = torch.randn(batch, num_nodes, vocab, generator=generator)
    tree = link_tree(
        torch.randint(0, vocab, (batch, num_nodes), generator=generator),
        torch.tensor([-1, 0, 0, 1, 2]),
    )
    arguments = {
        **links_of(tree),
        "context_lens": torch.arange(batch) * 7,
        "temperature": torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 1.0]),
        "top_k": torch.tensor([0, 5, 0, 9, 1, 40]),
        "top_p": torch.tensor([1.0, 0.9, 0.8, 1.0, 1.0, 0.5]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0]),
        "seeds": torch.tensor([1, 2, 3, -4, 2**63 - 1, -(2**63)]),
        "logit_bias": torch.randn(batch, vocab, generator=generator),
    }
    whole = tree_verify(logits, **arguments, backend=backend)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    moved = {n: t[order] for n, t in arguments.items()}
    shuffled = tree_verify(logits[order], **moved, backend=backend)
    assert_equal(Verified(*(t[order] for t in fields(whole))), shuffled)
    for b in range(batch):
        alone = {n: t[b : b + 1] for n, t in arguments.items()}
        got = tree_verify(logits[b : b + 1], **alone, backend=backend)
        assert_equal(Verified(*(t[b : b + 1] for t in fields(whole))), got)


def test_case_11_speculative_sampling_equals_plain(backend):
    """Token for token: the same seed gives the same text with a tree and without."""
    vocab, temperature = 5, 1.3
    rng = random.Random(3)
    parents, tokens = random_tree(rng, 40, vocab)
    logits = target_logits(parents, tokens, vocab)
    tree = link_tree(torch.tensor([tokens]), torch.tensor(parents))
    lengths = []
    for seed in range(60):
        sampling = per_request(1, temperature=temperature, seeds=seed, top_k=4)
        got = tree_verify(
            logits[None], **links_of(tree), context_lens=torch.tensor([seed]), **sampling,
            backend=backend,
        )  # fmt: skip
        for depth in range(int(got.num_accepted[0]) + 1):
            row = logits[got.accept_index[0, depth]]
            plain = roots_only(
                row[None], **sampling, context_lens=torch.tensor([seed + depth]), backend=backend
            )
            assert plain.tokens.item() == got.tokens[0, depth]
        lengths.append(int(got.num_accepted[0]))
    assert max(lengths) >= 2


def test_case_12_sampling_is_never_silently_greedy(backend):
    logits = torch.zeros(200, 8)
    got = roots_only(
        logits, **per_request(200, temperature=1.0), seeds=torch.arange(200), backend=backend
    )
    assert len(got.tokens.unique()) == 8
    with pytest.raises(ValueError, match="spec_kernels::tree_verify: seeds"):
        roots_only(logits, **per_request(200, temperature=1.0), backend=backend)


def test_case_13_drafts_accepted_and_tokens_emitted_are_told_apart(backend):
    got = tree_verify(one_hot(GOLDEN_CHOICES, 19), **GOLDEN, backend=backend)
    assert got.num_accepted.tolist() == [3, 2]
    assert (got.tokens >= 0).sum(1).tolist() == [4, 3]
    assert (got.accept_index >= 0).sum(1).tolist() == [4, 3]


@pytest.mark.parametrize("top_k", [0, 200])
def test_case_11_a_cut_at_one_node_does_not_show_at_the_next(top_k, backend):
    """A chain of what plain decoding chooses is accepted whole, with every parameter in use."""
    num_nodes, vocab, start = 4, 300, 7
    logits = 1.5 * torch.randn(num_nodes, vocab, generator=torch.Generator().manual_seed(1))
    for seed in range(12):
        sampling = per_request(1, temperature=1.0, seeds=seed, top_k=top_k, top_p=0.9, min_p=0.15)
        plain = [
            roots_only(
                row[None], **sampling, context_lens=torch.tensor([start + i]), backend=backend
            ).tokens.item()
            for i, row in enumerate(logits)
        ]
        tree = chain_tree(torch.tensor([[0, *plain[:-1]]]))
        got = tree_verify(
            logits[None], **links_of(tree), context_lens=torch.tensor([start]), **sampling,
            backend=backend,
        )  # fmt: skip
        assert got.tokens.tolist() == [plain]


def exact_probabilities(values, temperature, top_k, top_p, min_p):
    """The textbook rule in float64, one filter after the other."""
    p = (values.double() / temperature).softmax(0)
    order = sorted(range(len(p)), key=lambda i: (-values[i].item(), i))
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0
    p = p / p.sum()
    if top_p < 1.0:
        before = 0.0
        for i in order:
            mass = p[i].item()
            if before >= top_p:
                p[i] = 0
            before += mass
    p = p / p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("seed", range(40))
def test_distribution_is_exactly_the_targets(seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rng.choice([2, 9, 60, 300]), generator=generator) * rng.choice([0.5, 2, 8])
    parameters = {
        "temperature": rng.choice([0.3, 1.0, 1.7]),
        "top_k": rng.choice([0, 1, 5, 50]),
        "top_p": rng.choice([1.0, 0.9, 0.35]),
        "min_p": rng.choice([0.0, 0.02, 0.3]),
    }
    weights = token_weights(values, **parameters).double()
    exact = exact_probabilities(values, **parameters)
    assert (weights / weights.sum() - exact).abs().sum() < 1e-6


def test_empirical_distribution(backend):
    """Many requests: every frequency and the total variation within what that many draws allow."""
    values = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.1, -0.5, 1.1, 0.0])
    parameters = {"temperature": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.05}
    num = 4000 if backend == "cpu" else 500
    got = roots_only(
        values.repeat(num, 1), **per_request(num, **parameters), seeds=torch.arange(num),
        backend=backend,
    )  # fmt: skip
    counts = got.tokens.flatten().bincount(minlength=len(values)).double()
    exact = exact_probabilities(values, **parameters)
    assert not counts[exact == 0].any()
    sigma = (exact * (1 - exact) / num).sqrt()
    assert ((counts / num - exact).abs() <= 4 * sigma + 1e-12).all()
    assert (counts / num - exact).abs().sum() / 2 < 3 * sigma.sum() / 2


def test_coins_are_independent_along_positions(backend):
    """One request decoding on: consecutive choices neither repeat nor alternate."""
    num = 3000 if backend == "cpu" else 500
    got = roots_only(
        torch.zeros(num, 2), **per_request(num, temperature=1.0, seeds=77),
        context_lens=torch.arange(num), backend=backend,
    )  # fmt: skip
    x = got.tokens.flatten().double()
    assert abs(x.mean() - 0.5) < 4 * 0.5 / num**0.5
    assert abs((x[1:] == x[:-1]).double().mean() - 0.5) < 4 * 0.5 / num**0.5


def test_ties_go_to_the_lower_id(backend):
    logits = torch.zeros(1, 300)
    logits[0, [40, 200, 299]] = 2.0
    assert roots_only(logits, backend=backend).tokens.item() == 40
    for k in (1, 2):
        seen = {
            roots_only(
                logits, **per_request(1, temperature=1.0, seeds=s, top_k=k), backend=backend
            ).tokens.item()
            for s in range(30)
        }
        assert seen == {40, 200} if k == 2 else {40}
    signed = torch.tensor([[-1.0, -0.0, 0.0]])
    assert roots_only(signed, backend=backend).tokens.item() == 1


def test_plus_infinity(backend):
    logits = torch.tensor([[3.0, math.inf, -math.inf, math.inf, math.nan]])
    assert roots_only(logits, backend=backend).tokens.item() == 1
    got = roots_only(
        logits.repeat(200, 1), **per_request(200, temperature=1.0), seeds=torch.arange(200),
        backend=backend,
    )  # fmt: skip
    counts = got.tokens.flatten().bincount(minlength=5).tolist()
    assert counts[1] + counts[3] == 200 and 60 < counts[1] < 140


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_tiny_temperatures_are_greedy_in_the_limit(backend, temperature):
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    got = roots_only(
        logits, **per_request(20, temperature=temperature), seeds=torch.arange(20), backend=backend
    )
    assert got.tokens.flatten().equal(logits.argmax(1))


@pytest.mark.parametrize("top_p", [0.0, 1e-30])
def test_top_p_always_keeps_the_best(backend, top_p):
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    got = roots_only(
        logits, **per_request(20, temperature=5.0, top_p=top_p, seeds=3), backend=backend
    )
    assert got.tokens.flatten().equal(logits.argmax(1))


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("min_p", math.nan),
    ],
)
def test_parameters_out_of_range_are_refused(backend, name, value):
    """Before anything is written; on a device the request emits nothing, and its status tells."""
    parameters = per_request(3, temperature=1.0, top_p=1.0, min_p=0.0, seeds=1)
    logits = torch.zeros(3, 3)
    sound = roots_only(logits, **parameters)
    parameters[name][1] = value
    for raises in value_checks(backend):
        out = poisoned_out(3, 2)
        before = [t.clone() for t in fields(out)]
        match = f"spec_kernels::tree_verify: {name}: expected .*, got {value}"
        with value_out_of_range(match, raises):
            roots_only(logits, **parameters, out=out, backend=backend)
        if backend in ("reference", "cpu"):
            assert all(a.equal(b) for a, b in zip(fields(out), before, strict=True))
        else:
            assert out.status.tolist() == [0, int(VerifyStatus.BAD_PARAMETER), 0]
            assert out.num_accepted.tolist() == [0, 0, 0]
            assert out.accept_index.tolist() == [[0, -1], [-1, -1], [0, -1]]
            assert out.tokens[::2, 0].equal(sound.tokens[::2, 0])
            assert out.tokens[1].tolist() == [-1, -1]


def test_rows_off_the_path_are_not_read(backend):
    """A row that is not walked may hold anything; here it would turn the walk if it were read."""
    logits = one_hot(GOLDEN_CHOICES, 19)
    expected = tree_verify(logits, **GOLDEN, backend=backend)
    logits[0, [1, 2]] = math.nan
    logits[1, [1, 2, 3]] = math.nan
    assert_equal(tree_verify(logits, **GOLDEN, backend=backend), expected)


def test_strided_arguments(backend, dtype):
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(2, 12, 30, generator=generator).to(dtype)
    logits = wide[:, ::2, 3:22]
    links = {n: torch.stack((t, t + 1), -1)[..., 0] for n, t in GOLDEN.items()}
    bias = torch.randn(1, 60, generator=generator)[:, :19].expand(2, -1)
    temperature = torch.tensor([[1.0, 9.0], [0.5, 9.0]])[:, 0]
    sampling = {"temperature": temperature, "seeds": torch.tensor([1, 1, 5])[::2]}
    got = tree_verify(logits, **links, logit_bias=bias, **sampling, backend=backend)
    dense = {n: t.contiguous() for n, t in {**links, **sampling}.items()}
    expected = tree_verify(
        logits.contiguous(), **dense, logit_bias=bias.contiguous(), backend="reference"
    )
    assert_equal(got, expected)


def random_drafts(rng, generator, logits, tokens):
    """q near the target's distribution or far from it, of any scale, with zeros or unsound."""
    shape = logits.shape
    warmth = rng.choice([0.3, 1.0, 3.0])
    noise = torch.randn(shape, generator=generator) * rng.choice([0.0, 0.5, 5.0])
    q = (logits.float().nan_to_num(0.0, 50.0, -50.0) / warmth + noise).softmax(-1)
    if rng.random() < 0.3:
        q *= rng.choice([1e-8, 1e-3, 1.9])
    if rng.random() < 0.3:
        q[torch.rand(shape, generator=generator) < 0.3] = 0.0
    if rng.random() < 0.2:
        for value in (math.nan, -1.0, math.inf, 2.0):
            q[torch.rand(shape, generator=generator) < 0.02] = value
    if rng.random() < 0.3:  # ids that no row has
        away = torch.rand(tokens.shape, generator=generator) < 0.1
        tokens[away] = rng.choice([-1, shape[-1], 2**40, -(2**62)])
    if rng.random() < 0.6:  # likely drafts, so that the walk goes on
        tokens[:] = torch.where(tokens >= 0, q.nan_to_num(0.0).argmax(-1), tokens)
    if rng.random() < 0.5:
        q = q.bfloat16()
    if rng.random() < 0.3:
        q = torch.cat((q, torch.full_like(q, math.nan)), -1)[..., : shape[-1]]
    return q


def random_case(rng):
    """Anything at all: sizes around blocks and vectors, NaN, infinities, ties, every parameter."""
    seed = rng.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    batch, num_nodes = rng.randint(1, 3), rng.choice([1, 2, 5, 33])
    vocab = rng.choice([1, 2, 7, 16, 100, 128, 129, 1000, 8193])
    scale = rng.choice([0.01, 1, 5, 50])

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    logits = torch.randn(batch, num_nodes, vocab, generator=generator) * scale
    if rng.random() < 0.3:
        logits = logits.round()
    for value, share in ((math.nan, 0.1), (-math.inf, 0.3), (math.inf, 0.05)):
        if rng.random() < 0.2:
            logits[uniform(*logits.shape) < share] = value
    if rng.random() < 0.5:
        logits = logits.bfloat16()
    arguments = {}
    if rng.random() < 0.9:
        warmth = rng.choice([1e-40, 0.1, 1.0, 2.0, 100.0, 3e38])
        arguments["temperature"] = torch.where(uniform(batch) < 0.1, 0.0, uniform(batch) * warmth)
        arguments["seeds"] = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
        if rng.random() < 0.6:
            high = rng.choice([vocab + 3, 60])
            arguments["top_k"] = torch.randint(-1, high, (batch,), generator=generator)
        if rng.random() < 0.6:
            arguments["top_p"] = rng.choice([uniform(batch) * 1.1, 1 - uniform(batch) * 1e-6])
        if rng.random() < 0.5:
            arguments["min_p"] = uniform(batch) ** 4 - 0.05
    if rng.random() < 0.3:
        arguments["logit_bias"] = torch.randn(vocab, generator=generator) * scale
    if rng.random() < 0.3:
        shape = (batch, num_nodes, (vocab + 31) // 32)
        words = torch.randint(-(2**31), 2**31, shape, generator=generator)
        arguments["allowed"] = words.to(torch.int32)
    tokens = torch.randint(0, vocab, (batch, num_nodes), generator=generator)
    rule = rng.choice(["target-only", "draft", "draft", "typical"])
    if rule == "typical":
        arguments["typical"] = rng.choice([0.01, 0.09, 0.5, 1.0]), rng.choice([0.1, 0.3, 2.0])
    elif rule == "draft":
        arguments["draft_probs"] = random_drafts(rng, generator, logits, tokens)
    parents = [-1] + [rng.randrange(i) for i in range(1, num_nodes)]
    arguments.update(links_of(link_tree(tokens, torch.tensor(parents))))
    for name in ("first_child", "next_sibling"):
        if rng.random() < 0.1:
            broken = torch.randint(-3, num_nodes + 3, (batch, num_nodes), generator=generator)
            arguments[name] = torch.where(uniform(batch, num_nodes) < 0.3, broken, arguments[name])
    arguments["context_lens"] = torch.randint(-1, 2**40, (batch,), generator=generator)
    return logits, arguments


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_backends_agree_bit_for_bit(seed):
    logits, arguments = random_case(random.Random(seed))
    expected = tree_verify(logits, **arguments, backend="reference")
    out = poisoned_out(*expected.accept_index.shape)
    assert_equal(tree_verify(logits, **arguments, out=out), expected)


@pytest.mark.parametrize("scale", [0.1, 6.0])
def test_large_vocabulary_whatever_the_thread_count(backend, scale):
    """Several chunks of a row; the nucleus is a handful of tokens, or tens of thousands."""
    vocab = 70_003
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0)) * scale
    arguments = {
        "temperature": torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 2.0]),
        "top_k": torch.tensor([0, 0, 40, 0, 30_000, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.9, 0.95, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.01]),
        "seeds": torch.arange(6),
    }
    expected = roots_only(logits, **arguments, backend="reference")
    assert_equal(roots_only(logits, **arguments, backend=backend), expected)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [
            roots_only(
                logits[b : b + 1],
                **{n: t[b : b + 1] for n, t in arguments.items()},
                backend=backend,
            )
            for b in range(6)
        ]
    finally:
        torch.set_num_threads(threads)
    assert expected.tokens.flatten().tolist() == [a.tokens.item() for a in alone]
    weights = token_weights(values_of(logits[3], None, None), 1.0, top_p=0.9)
    assert ((weights > 0).sum() > 1000) == (scale == 0.1)


@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_every_instruction_set_gives_the_same_bits(isa):
    """The suite itself runs on the best set; the lesser ones need a process of their own."""
    if _library.cpu_isa() in ("none", "plain"):
        pytest.skip(f"the kernels here run on {_library.cpu_isa()!r} only")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_tree_verify as suite; "
        "assert suite._library.cpu_isa() == sys.argv[2]; suite.test_backends_agree_bit_for_bit()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent), isa],
        env={**os.environ, "SPEC_KERNELS_CPU_ISA": isa},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_empty_batch(backend):
    links = torch.zeros(0, 3, dtype=torch.int64)
    lengths = torch.zeros(0, dtype=torch.int64)
    got = tree_verify(torch.zeros(0, 3, 5), links, links, links, lengths, backend=backend)
    assert got.tokens.shape == (0, 3) and got.status.shape == (0,)


BAD = {
    "logits": [
        torch.zeros(2, 19),
        torch.zeros(2, 6, 19).double(),
        torch.zeros(2, 0, 19),
        torch.zeros(2, 6, 0),
        torch.empty(2, 6, 2**22 + 1, dtype=torch.bfloat16),
        torch.zeros(2, 6, 38)[..., ::2],
        None,
    ],
    "tokens": [torch.zeros(2, 5).long(), torch.zeros(2, 6)],
    "first_child": [torch.zeros(2, 6, 1).long()],
    "next_sibling": [torch.zeros(2, 6).to(torch.int16)],
    "context_lens": [torch.zeros(3).long(), torch.zeros(2)],
    "temperature": [torch.zeros(3), torch.zeros(2).double(), 1.0],
    "top_k": [torch.zeros(2)],
    "top_p": [torch.zeros(2, 1)],
    "min_p": [torch.zeros(2).bfloat16()],
    "seeds": [torch.zeros(2).int()],
    "logit_bias": [torch.zeros(2, 18), torch.zeros(2, 19).bfloat16(), torch.zeros(2, 38)[:, ::2]],
    "allowed": [torch.zeros(2, 6, 2).int(), torch.zeros(2, 6, 1).long()],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(backend, name):
    sound = {"logits": one_hot(GOLDEN_CHOICES, 19), **GOLDEN, **per_request(2, seeds=1)}
    for value in BAD[name]:
        with pytest.raises(
            ValueError, match=f"spec_kernels::tree_verify: {name}: expected .*, got"
        ):
            tree_verify(**{**sound, name: value}, backend=backend)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Verified)])
def test_bad_outputs(backend, field):
    out = Verified.allocate(2, 3)
    setattr(out, field, getattr(out, field)[:1])
    with pytest.raises(ValueError, match="spec_kernels::tree_verify: out."):
        tree_verify(one_hot(GOLDEN_CHOICES, 19), **GOLDEN, out=out, backend=backend)
    with pytest.raises(ValueError, match="max_accepted"):
        tree_verify(one_hot(GOLDEN_CHOICES, 19), **GOLDEN, max_accepted=-1, backend=backend)


def raw_arguments(out):
    logits = one_hot(GOLDEN_CHOICES, 19)
    sampling = per_request(2, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seeds=3)
    q = torch.full((2, 6, 19), 1 / 19)
    return (logits, *GOLDEN.values(), *sampling.values(), None, None, q, 0.0, 0.0, *fields(out))


def test_raw_op_refuses_what_the_api_would(backend):
    if backend == "reference":
        pytest.skip("the reference leaves shapes to the API")
    arguments = raw_arguments(Verified.allocate(2, 3))
    op = raw_op("tree_verify", backend)
    op(*arguments)
    for i, argument in enumerate(arguments):
        if not isinstance(argument, torch.Tensor):
            continue
        with pytest.raises(RuntimeError, match="spec_kernels::tree_verify: .*expected .*, got"):
            op(*arguments[:i], argument[:1], *arguments[i + 1 :])


def test_opcheck():
    out = Verified.allocate(2, 3)
    arguments = raw_arguments(out)
    torch.ops.spec_kernels.tree_verify.default(*arguments)
    torch.library.opcheck(torch.ops.spec_kernels.tree_verify.default, arguments)


def test_compiles_without_graph_breaks():
    def step(logits, tokens, first_child, next_sibling, context_lens, temperature, seeds):
        got = tree_verify(
            logits, tokens, first_child, next_sibling, context_lens, 3,
            temperature=temperature, seeds=seeds,
        )  # fmt: skip
        return got.tokens + 1, got.num_accepted, got.accept_index

    sampling = per_request(2, temperature=0.8, seeds=3)
    arguments = (one_hot(GOLDEN_CHOICES, 19), *GOLDEN.values(), *sampling.values())
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments)
    for x, y in zip(got, step(*arguments), strict=True):
        assert x.equal(y)


def test_endless_trees_are_refused(backend):
    """A view may repeat one node for ever, and a circle of siblings is walked once around."""
    logits = torch.zeros(1, 1, 5).expand(1, 2**40, 5)
    links = torch.ones((1, 1), dtype=torch.int32).expand(1, 2**40)
    with pytest.raises(ValueError, match="logits: expected 1 to 1024 nodes"):
        tree_verify(logits, links, links, links, torch.tensor([3]), 2, backend=backend)


def test_outputs_stand_apart(backend):
    logits = torch.zeros(1, 3, 5)
    links = torch.full((1, 3), -1, dtype=torch.int32)
    tokens = torch.zeros((1, 3), dtype=torch.int32)
    for path, message in (
        (links.clone()[:, :1].expand(1, 3), "accept_index: expected rows that do not overlap"),
        (links, "accept_index: expected memory apart from first_child"),
    ):
        out = Verified.allocate(1, 2)
        out.accept_index = path
        with pytest.raises(ValueError, match=message):
            tree_verify(
                logits, tokens, links, links.clone(), links[:, 0] + 4, out=out, backend=backend
            )
