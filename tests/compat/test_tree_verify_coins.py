"""``tree_verify_choices``, ``tree_verify_coins``: the walk, what is written, the distribution."""

import dataclasses
import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_kernels import (
    FlatVerified,
    VerifyStatus,
    link_tree,
    tree_verify_choices,
    tree_verify_coins,
)
from spec_kernels.ops.tree_verify import coins_reference
from spec_kernels.testing.compare import poisoned, raw_op

BACKENDS = ("reference", "cpu", "cuda_on_host")

GOLDEN = {
    "tokens": torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]),
    "first_child": torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]),
    "next_sibling": torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]),
    "slots": torch.arange(12).view(2, 6),
}
GOLDEN_CHOICES = torch.tensor([[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]])
POISON = torch.iinfo(torch.int32).max // 2


def poisoned_out(batch, num_slots, columns, dtype=torch.int32):
    return FlatVerified(
        predictions=poisoned(num_slots, dtype=dtype),
        accept_index=poisoned(batch, columns, dtype=dtype),
        num_accepted=poisoned(batch, dtype=dtype),
        status=poisoned(batch, dtype=dtype),
    )


def assert_equal(a, b):
    for f in dataclasses.fields(a):
        assert getattr(a, f.name).long().equal(getattr(b, f.name).long()), f.name


def run_op(name, tree, given, out, backend=None, **options):
    if name == "choices":
        return tree_verify_choices(**tree, choices=given, out=out, backend=backend)
    target, coins, final = given
    return tree_verify_coins(
        **tree, target_probs=target, coins=coins, final_coins=final, out=out, backend=backend,
        **options,
    )  # fmt: skip


def certain(choices, vocab=19):
    """Probabilities and coins by which each node's token is settled."""
    batch, nodes = choices.shape
    target = torch.nn.functional.one_hot(choices, vocab).float()
    return target, torch.full((batch, nodes), 0.5), torch.full((batch,), 0.5)


def flat(tree, slots=None):
    links = {n: getattr(tree, n) for n in ("tokens", "first_child", "next_sibling")}
    if slots is None:
        slots = torch.arange(tree.tokens.numel()).view(tree.tokens.shape)
    return {**links, "slots": slots}


def given_golden(name):
    return GOLDEN_CHOICES.flatten() if name == "choices" else certain(GOLDEN_CHOICES)


@pytest.mark.parametrize("name", ["choices", "coins"])
@pytest.mark.parametrize("columns", [4, 6])
def test_golden_walk(backend, int_dtype, name, columns):
    tree = {n: t.to(int_dtype) for n, t in GOLDEN.items()}
    out = poisoned_out(2, 12, columns, int_dtype)
    poison = torch.iinfo(int_dtype).max // 2
    assert run_op(name, tree, given_golden(name), out, backend) is out
    rest = [poison] * (columns - 4)
    assert out.accept_index.tolist() == [[0, 3, 4, 5, *rest], [6, 10, 11, poison, *rest]]
    assert out.num_accepted.tolist() == [3, 2]
    expected = [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]
    assert out.predictions.tolist() == [poison if p == -1 else p for p in expected]
    assert out.status.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["choices", "coins"])
def test_walk_stops_where_room_ends(backend, name):
    for columns in (1, 2, 3):
        out = poisoned_out(2, 12, columns)
        run_op(name, GOLDEN, given_golden(name), out, backend)
        assert out.num_accepted.tolist() == [columns - 1] * 2
        assert out.accept_index.tolist() == [[0, 3, 4][:columns], [6, 10, 11][:columns]]
        last = [[0, 3, 4], [6, 10, 11]]
        tokens = [[3, 4, 5], [11, 12, 18]]
        written = {row[i]: ids[i] for row, ids in zip(last, tokens) for i in range(columns)}  # noqa: B905
        assert out.predictions.tolist() == [written.get(slot, POISON) for slot in range(12)]


@pytest.mark.parametrize("name", ["choices", "coins"])
def test_slots_may_stand_anywhere(backend, name):
    """Slots are a permutation into a larger array, and choices follow them."""
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:12].view(2, 6)
    tree = {**GOLDEN, "slots": slots}
    given = certain(GOLDEN_CHOICES)
    if name == "choices":
        given = torch.full((20,), 2**60)
        given[slots] = GOLDEN_CHOICES
    out = poisoned_out(2, 20, 4)
    run_op(name, tree, given, out, backend)
    assert out.accept_index.tolist() == [
        slots[0, [0, 3, 4, 5]].tolist(),
        [*slots[1, [0, 4, 5]].tolist(), POISON],
    ]
    assert out.predictions[slots[0, [0, 3, 4, 5]]].tolist() == [3, 4, 5, 18]
    assert int((out.predictions == POISON).sum()) == 20 - 7


def root_with_children(tokens):
    """One request: a root and one child for each of ``tokens``."""
    tree = link_tree(torch.tensor([[9, *tokens]]), torch.tensor([-1] + [0] * len(tokens)))
    return flat(tree)


def once(row, tokens, coin, final=0.0, backend=None, columns=2, **options):
    """Children ``tokens`` under one root whose row is ``row``: (drafts accepted, token, status)."""
    tree = root_with_children(tokens)
    nodes = len(tokens) + 1
    target = torch.full((1, nodes, len(row)), 1.0 / len(row))
    target[0, 0] = torch.tensor(row)
    if "draft_row" in options:
        options["draft_probs"] = torch.zeros_like(target)
        options["draft_probs"][0, 0] = torch.tensor(options.pop("draft_row"))
    coins = torch.full((1, nodes), coin)
    out = poisoned_out(1, nodes, columns)
    run_op("coins", tree, (target, coins, torch.tensor([final])), out, backend, **options)
    return int(out.num_accepted), int(out.predictions[0]), int(out.status)


def test_case_01_probability_zero_is_never_accepted(backend):
    for thresholds in ({}, {"threshold_single": 0.0}, {"threshold_acc": 0.0}):
        assert once([0.0, 1.0], [0], 0.0, backend=backend, **thresholds) == (0, 1, 0)
        assert once([0.0, 0.5, 0.5], [0, 2], 0.0, backend=backend, **thresholds) == (1, 2, 0)
    # A sibling before it has left a sum above the coin's reach.
    assert once([0.5, 0.0, 0.5], [0, 1], 0.5, backend=backend) == (0, 2, 0)
    for final in (0.0, 0.5, 1.0 - 2**-24):
        assert once([0.0, 0.0, 1.0, 0.0], [0], 0.0, final, backend=backend) == (0, 2, 0)


def test_case_01_coins_are_half_open(backend):
    below = float(torch.nextafter(torch.tensor(0.25), torch.tensor(0.0)))
    assert once([0.25, 0.75], [0], below, backend=backend) == (1, 0, 0)
    assert once([0.25, 0.75], [0], 0.25, backend=backend) == (0, 1, 0)
    assert once([0.25, 0.25, 0.5], [0, 1], 0.25, backend=backend) == (1, 1, 0)
    # The same on the last token's coin: left are 1/4 and 1/2 of ids 1 and 2.
    third = 5592405 / 2**24  # the greatest coin below 1/3
    assert once([0.25, 0.25, 0.5], [0], 0.25, third, backend=backend) == (0, 1, 0)
    assert once([0.25, 0.25, 0.5], [0], 0.25, third + 2**-24, backend=backend) == (0, 2, 0)


@pytest.mark.parametrize("coin", [1.0, 7.0, math.inf])
def test_coins_of_one_and_above_count_as_the_greatest_below(backend, coin):
    assert once([0.5, 0.5], [0, 1], coin, backend=backend) == (1, 1, 0)
    assert once([0.5, 0.25, 0.25, 0.0], [0], coin, coin, backend=backend) == (0, 2, 0)


@pytest.mark.parametrize("coin", [-1.0, math.nan, -math.inf])
def test_coins_below_zero_count_as_zero(backend, coin):
    assert once([0.5, 0.5], [1], coin, backend=backend) == (1, 1, 0)
    assert once([0.0, 0.25, 0.75], [0], coin, coin, backend=backend) == (0, 1, 0)


def test_thresholds_accept_more(backend):
    row = [0.25, 0.25, 0.5]
    assert once(row, [0, 1], 0.9, 0.9, backend=backend) == (0, 2, 0)
    assert once(row, [0, 1], 0.9, backend=backend, threshold_single=0.25) == (1, 0, 0)
    assert once(row, [0, 1], 0.9, backend=backend, threshold_acc=0.5) == (1, 1, 0)
    assert once(row, [0, 1], 0.45, backend=backend, threshold_acc=0.5) == (1, 0, 0)
    assert once(row, [0, 1], 0.999, backend=backend, threshold_acc=0.0) == (1, 0, 0)
    for bad in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="threshold_acc: expected 0 to 1"):
            once(row, [0], 0.5, backend=backend, threshold_acc=bad)


def test_draft_probs_are_taken_from_the_last_row_only(backend):
    row, draft = [0.5, 0.25, 0.25], [0.5, 0.25, 0.0]
    assert once(row, [], 0.5, 0.0, backend=backend, draft_row=draft) == (0, 2, 0)
    assert once(row, [], 0.5, 0.0, backend=backend, columns=9, draft_row=draft) == (0, 2, 0)
    # A full path draws from the plain row.
    assert once(row, [], 0.5, 0.0, backend=backend, columns=1, draft_row=draft) == (0, 0, 0)
    # Nothing above the drafter's: the plain row, too.
    assert once(row, [], 0.5, 0.6, backend=backend, draft_row=[1.0, 1.0, 1.0]) == (0, 1, 0)
    assert once(row, [], 0.5, 0.6, backend=backend, draft_row=[math.nan] * 3) == (0, 1, 0)


def test_rounding_that_leaves_nothing_falls_back_to_the_row(backend):
    """All tokens of the support are rejected, since their fp32 sum stays below the coin."""
    assert once([0.5, 0.25, 0.0], [0, 1], 0.9, 0.9, backend=backend) == (0, 1, 0)


def test_case_04_rows_without_probability_are_reported(backend):
    bad = int(VerifyStatus.NO_TOKEN)
    for row in ([0.0, 0.0], [math.nan, math.nan], [-1.0, math.nan]):
        assert once(row, [1], 0.0, backend=backend) == (0, 0, bad)
    assert once([math.nan, 0.5, -1.0], [0, 2], 0.0, backend=backend) == (0, 1, 0)
    assert once([1.0, math.inf, 1.0], [], 0.0, 0.99, backend=backend) == (0, 1, 0)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 8193])
def test_case_04_ids_stay_within_the_vocabulary(backend, vocab):
    row = torch.full((vocab,), 1.0 / vocab)
    for final in (0.0, 0.5, 1.0 - 2**-24, 1.0):
        accepted, token, status = once(row.tolist(), [], 0.0, final, backend=backend)
        assert (accepted, status) == (0, 0)
        assert token == min(vocab - 1, int(min(final, 1.0 - 2**-24) * vocab))


def test_candidates_outside_the_vocabulary_have_no_probability(backend):
    for token in (-1, 2, 2**31, 2**62):
        options = {"threshold_single": 0.0, "threshold_acc": 0.0}
        tree = root_with_children([0, 1])
        tree["tokens"] = torch.tensor([[9, token, 1]])
        out = poisoned_out(1, 3, 2, torch.int64)
        given = torch.full((1, 3, 2), 0.5), torch.zeros(1, 3), torch.zeros(1)
        run_op("coins", tree, given, out, backend, **options)
        assert out.accept_index.tolist() == [[0, 2]] and out.status.tolist() == [0]


def test_choices_that_do_not_fit_are_no_tokens(backend):
    bad = int(VerifyStatus.NO_TOKEN)
    for choice, expected in ((-1, bad), (2**31, bad), (2**31 - 1, 0)):
        choices = GOLDEN_CHOICES.flatten().clone()
        choices[3] = choice
        out = poisoned_out(2, 12, 4)
        run_op("choices", GOLDEN, choices, out, backend)
        assert out.status.tolist() == [expected, 0]
        assert out.accept_index[0].tolist() == [0, 3, POISON, POISON]
        assert out.predictions[[0, 3]].tolist() == [3, 0 if expected else choice]
        assert out.num_accepted.tolist() == [1, 2]


BROKEN = {
    "child above": ("first_child", 3, 2),
    "child is itself": ("first_child", 3, 3),
    "child beyond": ("first_child", 3, 6),
    "child far beyond": ("first_child", 3, 2**40),
    "child below -1": ("first_child", 3, -2),
}


@pytest.mark.parametrize("name", ["choices", "coins"])
@pytest.mark.parametrize("fault", BROKEN)
def test_case_02_broken_links_end_the_walk(backend, name, fault):
    field, node, value = BROKEN[fault]
    tree = {**GOLDEN, field: GOLDEN[field].clone()}
    tree[field][0, node] = value
    out = poisoned_out(2, 12, 4)
    run_op(name, tree, given_golden(name), out, backend)
    assert out.status.tolist() == [int(VerifyStatus.BAD_LINK), 0]
    assert out.num_accepted.tolist() == [1, 2]
    assert out.accept_index.tolist() == [[0, 3, POISON, POISON], [6, 10, 11, POISON]]
    assert out.predictions.tolist()[:6] == [3, POISON, POISON, 4, POISON, POISON]


@pytest.mark.parametrize("name", ["choices", "coins"])
def test_case_02_a_circle_of_siblings_is_walked_once(backend, name):
    tree = {**GOLDEN, "next_sibling": GOLDEN["next_sibling"].clone()}
    tree["next_sibling"][0, 3] = 1
    choices = GOLDEN_CHOICES.clone()
    choices[0, 0] = 17
    given = choices.flatten() if name == "choices" else certain(choices)
    out = poisoned_out(2, 12, 4)
    run_op(name, tree, given, out, backend)
    assert out.status.tolist() == [int(VerifyStatus.SIBLING_CYCLE), 0]
    assert out.predictions[0] == 17 and out.num_accepted.tolist() == [0, 2]


@pytest.mark.parametrize("name", ["choices", "coins"])
@pytest.mark.parametrize("slot", [-1, 12, 2**40])
def test_nodes_without_a_slot_are_absent(backend, name, slot):
    tree = {**GOLDEN, "slots": GOLDEN["slots"].clone()}
    tree["slots"][0, 3] = slot
    out = poisoned_out(2, 12, 4)
    run_op(name, tree, given_golden(name), out, backend)
    assert out.status.tolist() == [int(VerifyStatus.BAD_LINK), 0]
    assert out.accept_index[0].tolist() == [0, POISON, POISON, POISON]
    assert out.predictions.tolist()[:6] == [3, *[POISON] * 5]
    assert out.num_accepted.tolist() == [0, 2]


@pytest.mark.parametrize("name", ["choices", "coins"])
def test_case_05_padded_requests_write_nothing(backend, name):
    tree = {n: torch.cat((t, torch.full((2, 6), 2**60))) for n, t in GOLDEN.items()}
    tree["slots"][2, 0] = -1
    given = given_golden(name)
    if name == "coins":
        given = [torch.cat((t, torch.full_like(t, math.nan))) for t in given]
    out = poisoned_out(4, 12, 4)
    run_op(name, tree, given, out, backend)
    assert out.num_accepted.tolist() == [3, 2, 0, 0]
    assert out.status.tolist() == [0, 0, 0, int(VerifyStatus.BAD_LINK)]
    assert out.accept_index[2:].eq(POISON).all()
    alone = run_op(name, GOLDEN, given_golden(name), poisoned_out(2, 12, 4), backend)
    assert out.predictions.equal(alone.predictions)


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 64, 65, 200, 1024])
@pytest.mark.parametrize("name", ["choices", "coins"])
def test_case_03_long_chains(backend, name, num_nodes):
    tokens = torch.arange(num_nodes)[None] % 50
    tree = flat(link_tree(tokens, torch.arange(-1, num_nodes - 1)))
    choices = (torch.arange(num_nodes)[None] + 1) % 50
    given = choices.flatten() if name == "choices" else certain(choices, 50)
    out = run_op(name, tree, given, poisoned_out(1, num_nodes, num_nodes), backend)
    assert out.accept_index.tolist() == [list(range(num_nodes))]
    assert out.predictions.tolist() == choices[0].tolist()


def test_rows_off_the_path_are_not_read(backend):
    target, coins, final = certain(GOLDEN_CHOICES)
    draft = torch.zeros_like(target)
    for b, path in enumerate(([0, 3, 4, 5], [0, 4, 5])):
        off = [i for i in range(6) if i not in path]
        target[b, off] = math.nan
        coins[b, off] = math.nan
        draft[b, [i for i in range(6) if i != path[-1]]] = math.nan
    out = run_op("coins", GOLDEN, (target, coins, final), poisoned_out(2, 12, 6), backend,
                 draft_probs=draft)  # fmt: skip
    assert out.predictions.tolist()[0] == 3 and out.num_accepted.tolist() == [3, 2]
    assert out.status.tolist() == [0, 0]


def test_strided_arguments(backend):
    def spread(t):
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), -9, dtype=t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]

    tree = {n: spread(t) for n, t in GOLDEN.items()}
    target, coins, final = certain(GOLDEN_CHOICES)
    rows = torch.full((2, 6, 25), math.nan)
    rows[..., :19] = target
    out = FlatVerified(
        spread(torch.full((12,), -1)),
        spread(torch.full((2, 4), -1)),
        spread(torch.zeros(2, dtype=torch.int32)),
        spread(torch.zeros(2, dtype=torch.int32)),
    )
    given = rows[..., :19], spread(coins), spread(final)
    for name, what in (("coins", given), ("choices", spread(GOLDEN_CHOICES.flatten()))):
        run_op(name, tree, what, out, backend)
        assert out.accept_index.tolist() == [[0, 3, 4, 5], [6, 10, 11, -1]]
        assert out.predictions.tolist() == [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]


# ---- Exactness: every outcome of the coins, counted.

# Parents, tokens, and rows in units of 1/4: two siblings, one of them with a child; a chain; a
# drafted token of probability zero beside one that carries everything.
TREES = {
    "siblings": (
        [-1, 0, 0, 1, 1],
        [9, 0, 1, 2, 3],
        [[1, 1, 1, 1], [0, 1, 1, 2], [2, 2, 0, 0], [4, 0, 0, 0], [1, 0, 3, 0]],
    ),
    "chain": (
        [-1, 0, 1],
        [9, 2, 0],
        [[2, 0, 1, 1], [1, 0, 2, 1], [0, 1, 1, 2]],
    ),
    "zeros": (
        [-1, 0, 0, 2],
        [9, 3, 1, 1],
        [[2, 2, 0, 0], [1, 1, 1, 1], [0, 4, 0, 0], [0, 0, 2, 2]],
    ),
}
UNIT = 4
NUM_FINAL = 12  # a multiple of every number of units that can be left


def emitted(tree, out, b, num_nodes):
    path = [s - b * num_nodes for s in out.accept_index[b, : int(out.num_accepted[b]) + 1].tolist()]
    return tuple(out.predictions[b * num_nodes + node].item() for node in path)


def outcomes(name, backend):
    """Exact probability of each emitted sequence, over the middles of equal cells of all coins."""
    parents, tokens, rows = TREES[name]
    num_nodes = len(parents)
    inner = sorted({p for p in parents if p >= 0})
    cells = list(itertools.product(*[range(UNIT)] * len(inner), range(NUM_FINAL)))
    batch = len(cells)
    tree = link_tree(torch.tensor([tokens]).expand(batch, -1), torch.tensor(parents))
    target = (torch.tensor(rows) / UNIT).expand(batch, -1, -1)
    coins = torch.full((batch, num_nodes), math.nan)
    for b, cell in enumerate(cells):
        for node, c in zip(inner, cell[:-1], strict=True):
            coins[b, node] = (c + 0.5) / UNIT
    final = torch.tensor([(cell[-1] + 0.5) / NUM_FINAL for cell in cells])
    out = FlatVerified.allocate(batch, batch * num_nodes, num_nodes - 1)
    draft = torch.zeros_like(target)
    run_op("coins", flat(tree), (target, coins, final), out, backend, draft_probs=draft)
    assert not out.status.any()
    counts = Counter(emitted(tree, out, b, num_nodes) for b in range(batch))
    return {ids: Fraction(n, batch) for ids, n in counts.items()}


def wanted(name):
    """The target's own probability of each sequence that the walk can emit."""
    parents, tokens, rows = TREES[name]
    found = {}

    def descend(node, ids, p):
        for token, units in enumerate(rows[node]):
            if not units:
                continue
            share = p * Fraction(units, UNIT)
            children = [c for c, up in enumerate(parents) if up == node and tokens[c] == token]
            if children:
                descend(children[0], (*ids, token), share)
            else:
                found[(*ids, token)] = share

    descend(0, (), Fraction(1))
    return found


@pytest.mark.parametrize("name", TREES)
def test_distribution_is_exactly_the_targets(backend, name):
    got, exact = outcomes(name, backend), wanted(name)
    assert sum(exact.values()) == 1
    assert got == exact


def test_a_bonus_from_the_plain_row_would_be_biased(monkeypatch):
    """Control: the enumeration sees it when the rejected children are left in."""
    whole = coins_reference.sample_residual
    monkeypatch.setattr(
        coins_reference,
        "sample_residual",
        lambda target, draft, rejected, coin: whole(target, draft, [], coin),
    )
    got, exact = outcomes("siblings", "reference"), wanted("siblings")
    assert sum(abs(got.get(ids, 0) - p) for ids, p in exact.items()) > Fraction(1, 10)


# ---- Backends agree.


def random_case(rng):
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    batch, num_nodes, vocab = rng.randint(1, 4), rng.choice([1, 2, 7, 33]), rng.choice([2, 7, 200])
    parents = torch.tensor([-1] + [rng.randrange(i) for i in range(1, num_nodes)])
    tokens = torch.randint(0, vocab, (batch, num_nodes), generator=generator)
    tree = flat(link_tree(tokens, parents))
    num_slots = batch * num_nodes + rng.randint(0, 3)
    order = torch.randperm(num_slots, generator=generator)[: batch * num_nodes]
    tree["slots"] = order.view(batch, num_nodes)
    bad = {"first_child": [-1, -2, 0, num_nodes], "next_sibling": [-1, -2, 0, num_nodes]}
    bad["slots"] = [-1, -2, num_slots]  # one of another node's would be written twice
    for name, values in bad.items():
        if rng.random() < 0.3:
            tree[name][rng.randrange(batch), rng.randrange(num_nodes)] = rng.choice(values)
    logits = torch.randn(batch, num_nodes, vocab, generator=generator) * rng.choice([0.5, 4.0, 60])
    target = torch.softmax(logits, -1)
    if rng.random() < 0.3:
        target *= rng.choice([0.0, 1e-42, 1e-20, 3.0, 1e30])
    coins = torch.rand(batch, num_nodes, generator=generator)
    given = target, coins, torch.rand(batch, generator=generator)
    options = {
        "threshold_single": rng.choice([1.0, 1.0, 0.5]),
        "threshold_acc": rng.choice([1.0, 1.0, 0.7]),
        "draft_probs": rng.choice([None, torch.zeros_like(target), target.flip(-1) * 0.5]),
    }
    choices = torch.randint(-1, vocab, (num_slots,), generator=generator)
    return tree, given, choices, options, num_slots, rng.randint(1, num_nodes)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_backends_agree_bit_for_bit(backend, seed):
    tree, given, choices, options, num_slots, columns = random_case(random.Random(seed))
    batch = len(tree["tokens"])
    for name, what, extra in (("coins", given, options), ("choices", choices, {})):
        a, b = (
            run_op(name, tree, what, poisoned_out(batch, num_slots, columns), on, **extra)
            for on in ("reference", backend)
        )
        assert_equal(a, b)


def test_case_11_requests_do_not_depend_on_each_other(backend):
    generator = torch.Generator().manual_seed(3)
    batch, num_nodes, vocab = 5, 9, 3001
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 5])
    tokens = torch.randint(0, vocab, (batch, num_nodes), generator=generator)
    target = torch.softmax(torch.randn(batch, num_nodes, vocab, generator=generator) * 4, -1)
    tokens[:, 1] = target[:, 0].argmax(-1)
    given = (
        target,
        torch.rand(batch, num_nodes, generator=generator),
        torch.rand(batch, generator=generator),
    )
    tree = flat(link_tree(tokens, parents))
    out = poisoned_out(batch, batch * num_nodes, 5)
    together = run_op("coins", tree, given, out, backend)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for b in (4, 0, 2, 1, 3):
            own = {n: t[b : b + 1] for n, t in tree.items()}
            own["slots"] = torch.arange(num_nodes)[None]
            own_given = tuple(t[b : b + 1] for t in given)
            out = poisoned_out(1, num_nodes, 5)
            alone = run_op("coins", own, own_given, out, backend)
            rows = slice(b * num_nodes, (b + 1) * num_nodes)
            assert alone.predictions.equal(together.predictions[rows])
            assert int(alone.num_accepted) == int(together.num_accepted[b])
    finally:
        torch.set_num_threads(threads)


def test_case_08_offsets_beyond_32_bits(backend):
    """Rows 2^31 elements apart: virtual memory of which only the rows are touched."""
    store = torch.empty(2**31 + 64)
    target = store.as_strided((1, 2, 4), (2**31 + 60, 2**31 + 60, 1))
    target[0, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    target[0, 1] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    tree = flat(link_tree(torch.tensor([[9, 1]]), torch.tensor([-1, 0])))
    given = target, torch.zeros(1, 2), torch.zeros(1)
    out = run_op("coins", tree, given, poisoned_out(1, 2, 2), backend)
    assert out.predictions.tolist() == [1, 3]


# ---- Refusals and the op itself.

BAD = {
    "tokens": [torch.zeros(2, 0).long(), torch.zeros(2, 6), torch.zeros(12).long(), None],
    "first_child": [torch.zeros(2, 6, 1).long(), torch.zeros(1, 6).long()],
    "next_sibling": [torch.zeros(2, 6).to(torch.int16)],
    "slots": [torch.zeros(2, 5).long(), torch.zeros(12).long()],
    "choices": [torch.zeros(11).long(), torch.zeros(12), torch.zeros(2, 6).long()],
    "target_probs": [
        torch.zeros(2, 6),
        torch.zeros(2, 6, 19).double(),
        torch.zeros(2, 6, 0),
        torch.zeros(1, 1, 2**22 + 1).expand(2, 6, -1),
        torch.zeros(2, 6, 38)[..., ::2],
    ],
    "draft_probs": [torch.zeros(2, 6, 18), torch.zeros(2, 6, 19).bfloat16()],
    "coins": [torch.zeros(2, 6).double(), torch.zeros(12)],
    "final_coins": [torch.zeros(1), torch.zeros(2).long()],
    "out.predictions": [torch.zeros(2, 6).int(), torch.zeros(12)],
    "out.accept_index": [torch.zeros(2, 0).int(), torch.zeros(3, 4).int()],
    "out.num_accepted": [torch.zeros(2)],
    "out.status": [torch.zeros(3).int()],
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments(backend, argument):
    ops = {"choices": {"choices": GOLDEN_CHOICES.flatten()}}
    target, coins, final = certain(GOLDEN_CHOICES)
    ops["coins"] = {"target_probs": target, "coins": coins, "final_coins": final}
    ops["coins"]["draft_probs"] = torch.zeros_like(target)
    functions = {"choices": tree_verify_choices, "coins": tree_verify_coins}
    for name, own in ops.items():
        out = poisoned_out(2, 12, 4)
        arguments = {**GOLDEN, **own, "out": out}
        place = argument.partition("out.")[2]
        if not place and argument not in arguments:
            continue
        for value in BAD[argument]:
            if place:
                changed = {**arguments, "out": dataclasses.replace(out, **{place: value})}
            else:
                changed = {**arguments, argument: value}
            with pytest.raises(
                ValueError, match=f"spec_kernels::tree_verify_{name}: [a-z_.]+: expected .*, got"
            ):
                functions[name](**changed, backend=backend)
        assert out.predictions.eq(POISON).all() and out.num_accepted.eq(POISON).all()
    with pytest.raises(ValueError, match="max_accepted"):
        FlatVerified.allocate(2, 12, -1)


def raw_arguments(name, out):
    if name == "tree_verify_choices":
        return (*GOLDEN.values(), GOLDEN_CHOICES.flatten(), *out.tensors())
    target, coins, final = certain(GOLDEN_CHOICES)
    draft = torch.zeros_like(target)
    return (*GOLDEN.values(), target, draft, coins, final, 1.0, 1.0, *out.tensors())


OPS = ["tree_verify_choices", "tree_verify_coins"]


@pytest.mark.parametrize("name", OPS)
def test_raw_op_refuses_what_the_api_would(backend, name):
    if backend == "reference":
        pytest.skip("the reference leaves shapes to the API")
    arguments = raw_arguments(name, poisoned_out(2, 12, 4))
    op = raw_op(name, backend)
    op(*arguments)
    for i, argument in enumerate(arguments):
        bad = argument[:1] if isinstance(argument, torch.Tensor) else 2.0
        if isinstance(argument, torch.Tensor) and argument.shape == (12,):
            bad = argument.float()
        with pytest.raises(RuntimeError, match=f"spec_kernels::{name}: .*expected .*, got"):
            op(*arguments[:i], bad, *arguments[i + 1 :])


@pytest.mark.parametrize("name", OPS)
def test_outputs_stand_apart(backend, name):
    if backend == "reference":
        pytest.skip("covered through backend='reference' below")
    function = raw_op(name, backend)
    arguments = list(raw_arguments(name, FlatVerified.allocate(2, 12, 3)))
    shared = torch.zeros(2, dtype=torch.int32)
    arguments[-2:] = [shared, shared]
    with pytest.raises(RuntimeError, match="num_accepted: expected memory apart from status"):
        function(*arguments)


def test_outputs_stand_apart_for_the_reference():
    out = FlatVerified.allocate(2, 12, 3)
    out.status = out.num_accepted
    with pytest.raises(ValueError, match="num_accepted: expected memory apart from status"):
        run_op("choices", GOLDEN, GOLDEN_CHOICES.flatten(), out, "reference")


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    arguments = raw_arguments(name, FlatVerified.allocate(2, 12, 3))
    op = getattr(torch.ops.spec_kernels, name).default
    op(*arguments)
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("name", ["choices", "coins"])
def test_compiles_without_graph_breaks(name):
    def step(tree, given):
        out = FlatVerified.allocate(2, 12, 3)
        got = run_op(name, tree, given, out)
        return got.predictions + 1, got.accept_index, got.num_accepted

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, y in zip(
        compiled(GOLDEN, given_golden(name)), step(GOLDEN, given_golden(name)), strict=True
    ):
        assert x.equal(y)


@pytest.mark.parametrize("name", ["choices", "coins"])
def test_empty_batch(backend, name):
    tree = {n: t[:0] for n, t in GOLDEN.items()}
    given = GOLDEN_CHOICES.flatten()
    if name == "coins":
        given = [t[:0] for t in certain(GOLDEN_CHOICES)]
    out = run_op(name, tree, given, poisoned_out(0, 12, 4), backend)
    assert out.predictions.eq(POISON).all()
