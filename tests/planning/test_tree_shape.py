"""Tree shapes: accept lengths against Monte Carlo, best trees against all there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels.decode.drafting import DraftPlan, static_paths
from spec_kernels.ops.tree_build import tree_from_paths
from spec_kernels.planning.tree_shape import (
    accept_length,
    best_chain,
    best_chain_length,
    best_shape,
    best_tree,
    choices,
)

RATES = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.4, 0.1, 0.1]]
# Second draws that are accepted more often than first ones: the likeliest paths are no tree then.
UNORDERED = [[0.1, 0.6, 0.2], [0.3, 0.45], [0.05, 0.7]]


def all_trees(num_nodes, depth, ranks, first_draws=False):
    """Every prefix-closed set of num_nodes - 1 paths, as sets grown one node at a time."""
    found = {frozenset()}
    for _ in range(num_nodes - 1):
        grown = set()
        for tree in found:
            for parent in [(), *tree]:
                if len(parent) == depth:
                    continue
                for rank in range(ranks[len(parent)]):
                    path = (*parent, rank)
                    held_back = first_draws and rank and (*parent, rank - 1) not in tree
                    if path not in tree and not held_back:
                        grown.add(tree | {path})
        found = grown
    return found


def value(paths, rates):
    return accept_length(*tree_from_paths(paths), rates)


def test_a_chain_and_a_tree_by_hand():
    assert accept_length([-1], [0], RATES) == 1
    assert accept_length([-1, 0, 1], [0, 0, 0], RATES) == pytest.approx(1 + 0.6 + 0.3)
    # Root's second-best child, and the best child of that.
    assert accept_length([-1, 0, 1], [0, 1, 0], RATES) == pytest.approx(1 + 0.2 + 0.1)


def test_accept_length_is_what_walks_find():
    """Monte Carlo: a right candidate is drawn at every depth, and the walk ends where none is."""
    parents, ranks = tree_from_paths(static_paths(3, 3, 12))
    node_of = {(p, r): n for n, (p, r) in enumerate(zip(parents, ranks, strict=True)) if n}
    generator, lengths = np.random.default_rng(0), []
    for _ in range(20000):
        node, length = 0, 1
        for row in RATES:
            right = generator.choice(4, p=[*row, 1 - sum(row)])
            node = node_of.get((node, int(right)))
            if node is None:
                break
            length += 1
        lengths.append(length)
    error = np.std(lengths) / len(lengths) ** 0.5
    assert abs(np.mean(lengths) - accept_length(parents, ranks, RATES)) < 4 * error


@pytest.mark.parametrize("num_nodes", range(1, 7))
@pytest.mark.parametrize("rates", [RATES, UNORDERED], ids=["ordered", "unordered"])
@pytest.mark.parametrize("first_draws", [False, True])
def test_the_best_tree_of_all(num_nodes, rates, first_draws):
    ranks = [len(row) for row in rates]
    best = max(value(t, rates) for t in all_trees(num_nodes, len(rates), ranks, first_draws))
    shape = best_tree(rates, num_nodes, first_draws=first_draws)
    assert shape.num_nodes == num_nodes
    assert shape.accept_length == pytest.approx(best)
    assert accept_length(*shape.nodes(), rates) == pytest.approx(best)
    if first_draws:
        for path in shape.paths:
            assert not path[-1] or (*path[:-1], path[-1] - 1) in shape.paths


@pytest.mark.parametrize("depth, children", [(0, 3), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("first_draws", [False, True])
def test_limits_are_kept(depth, children, first_draws):
    limits = {"max_depth": depth, "max_children": children, "first_draws": first_draws}
    ranks = [min(children, len(row)) for row in UNORDERED]
    most = 1 + sum(int(np.prod(ranks[:d])) for d in range(1, depth + 1))
    for num_nodes in range(1, min(most, 6) + 1):
        best = max(value(t, UNORDERED) for t in all_trees(num_nodes, depth, ranks, first_draws))
        shape = best_tree(UNORDERED, num_nodes, **limits)
        assert shape.accept_length == pytest.approx(best)
        assert shape.depth <= depth and shape.num_children <= children
    with pytest.raises(ValueError, match="best_tree: num_nodes: expected no more nodes"):
        best_tree(UNORDERED, most + 1, **limits)


def test_rates_may_depend_on_the_parent():
    """The second-best child of the root is rare, but what follows it is sure."""

    def rates(path):
        return {(): [0.5, 0.3], (0,): [0.2, 0.1], (1,): [0.9, 0.1]}.get(path, ())

    assert best_tree(rates, 4).paths == ((0,), (1,), (1, 0))
    assert accept_length([-1, 0, 0, 2], [0, 0, 1, 0], rates) == pytest.approx(1 + 0.5 + 0.3 + 0.27)


def test_every_leading_part_is_a_tree():
    for first_draws in (False, True):
        paths = best_tree(UNORDERED, 20, first_draws=first_draws).paths
        for count in range(len(paths) + 1):
            tree_from_paths(paths[:count])


@st.composite
def some_rates(draw):
    depths = draw(st.integers(1, 4))
    rows = []
    for _ in range(depths):
        row = draw(st.lists(st.floats(0, 1), min_size=1, max_size=4))
        total = max(1.0, sum(row))
        rows.append([x / total for x in row])
    return rows


@given(some_rates(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_more_nodes_never_give_less_and_their_gains_fall(rates, first_draws):
    most = 1 + sum(int(np.prod([len(r) for r in rates[:d]])) for d in range(1, len(rates) + 1))
    lengths = [
        best_tree(rates, n, first_draws=first_draws).accept_length
        for n in range(1, min(most, 12) + 1)
    ]
    gains = np.diff(lengths)
    assert (gains >= -1e-12).all()
    if not first_draws:
        assert (np.diff(gains) <= 1e-12).all()


@given(some_rates(), st.data())
@settings(max_examples=60, deadline=None)
def test_better_rates_never_give_less(rates, data):
    better = [list(row) for row in rates]
    row = data.draw(st.sampled_from(better))
    rank = data.draw(st.integers(0, len(row) - 1))
    row[rank] += data.draw(st.floats(0, 1)) * max(0.0, 1 - sum(row))
    for num_nodes in range(1, 2 + len(rates[0])):
        worse = best_tree(rates, num_nodes).accept_length
        assert best_tree(better, num_nodes).accept_length >= worse - 1e-12


@given(some_rates())
@settings(max_examples=60, deadline=None)
def test_first_draws_of_falling_rates_are_the_likeliest(rates):
    falling = [sorted(row, reverse=True) for row in rates]
    for count in range(1, 2 + len(falling[0])):
        free = best_tree(falling, count).accept_length
        assert best_tree(falling, count, first_draws=True).accept_length == pytest.approx(free)


def brute_choice(rates, cost_ms, draft_ms, **limits):
    """Tokens a second of the fastest of all trees."""
    speeds = []
    for num_nodes, ms in cost_ms.items():
        for tree in all_trees(num_nodes, len(rates), [len(row) for row in rates], **limits):
            depth = max(map(len, tree), default=0)
            speeds.append(1e3 * value(tree, rates) / (ms + depth * draft_ms))
    return max(speeds)


@pytest.mark.parametrize("draft_ms", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("slope", [0.1, 2.0, 20.0])
@pytest.mark.parametrize("first_draws", [False, True])
def test_the_fastest_shape_of_all(draft_ms, slope, first_draws):
    cost_ms = {n: 10.0 + slope * (n - 1) for n in range(1, 6)}
    choice = best_shape(UNORDERED, cost_ms, draft_ms, first_draws=first_draws)
    expected = brute_choice(UNORDERED, cost_ms, draft_ms, first_draws=first_draws)
    assert choice.tok_s == pytest.approx(expected)
    assert choice.cycle_ms == cost_ms[choice.shape.num_nodes] + draft_ms * choice.shape.depth


def test_what_costs_decide():
    free = {n: 10.0 for n in range(1, 9)}
    assert best_shape(RATES, free).shape.num_nodes == 8
    dear = {n: 10.0 * n for n in range(1, 9)}
    assert best_shape(RATES, dear).shape.paths == ()
    # A dear drafter makes the tree wide, a cheap one lets it be deep.
    assert best_shape(RATES, free, 8.0).shape.depth < best_shape(RATES, free).shape.depth
    # A step in the curve is taken just before it.
    steps = {n: 10.0 if n <= 4 else 16.0 for n in range(1, 9)}
    assert best_shape(RATES, steps).shape.num_nodes == 4


def test_the_best_chain():
    cost_ms = {n: 10.0 + 0.1 * n for n in range(1, 5)}
    choice = best_chain_length(RATES, cost_ms)
    assert choice.shape == best_chain(RATES, 3) and choice.shape.is_chain
    speeds = [1e3 * best_chain(RATES, k).accept_length / cost_ms[k + 1] for k in range(4)]
    assert choice.tok_s == pytest.approx(max(speeds))
    assert best_chain_length(RATES, cost_ms, 100.0).shape.depth == 0


def test_constant_conditional_accuracy_is_the_bounded_formula():
    """(1 - p^(k+1)) / (1 - p), FACTS: 0.64 with two drafts gives 2.05."""
    assert round(best_chain([[0.64]] * 2, 2).accept_length, 2) == 2.05


def test_the_published_sizes_of_bandwidth():
    """On bytes alone (FACTS section 2) a chain of few drafts is the default at batch 1."""
    gigabytes = {1: 6.03, 3: 8.91, 4: 10.31, 8: 15.60, 16: 24.95, 32: 39.52, 64: 57.35}
    rates = [[0.742, 0.1, 0.04]] + [[0.63, 0.1, 0.04]] * 6
    choice = best_shape(rates, gigabytes)
    assert choice.shape.num_nodes in (3, 4)


def test_choices_leave_out_what_does_not_exist():
    found = choices([[0.5, 0.2]], {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 9: 1.0})
    assert [c.shape.num_nodes for c in found] == [1, 2, 3]


def test_the_loop_takes_the_shape():
    shape = best_tree(RATES, 8)
    parents, ranks = shape.nodes()
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    assert depths == sorted(depths) and len(parents) == 8
    assert DraftPlan("static", shape.depth, shape.num_children, 8).num_nodes == 8
    assert str(shape).startswith("tree of 8 (") and str(best_chain(RATES, 2)) == "chain of 2"
    assert str(best_chain(RATES, 0)) == "no drafts"


@pytest.mark.parametrize(
    "call, wrong",
    [
        (lambda: accept_length([-1, 0], [0, 0], [[1.2]]), r"rates\[0\]: expected probabilities"),
        (lambda: accept_length([-1], [0], [[float("nan")]]), r"rates\[0\]: expected probabilities"),
        (lambda: accept_length([-1], [0], [[0.7, 0.4]]), r"rates\[0\]: expected a sum of at most"),
        (lambda: accept_length([-1], [0], []), "rates: expected at least one depth"),
        (lambda: accept_length([], [], RATES), "ranks: expected one for each of 0 >= 1"),
        (lambda: accept_length([-1, 0], [0], RATES), "ranks: expected one for each of 2"),
        (lambda: accept_length([-1, 1], [0, 0], RATES), r"parents\[1\]: expected an earlier"),
        (lambda: accept_length([-1, 0], [0, 3], RATES), r"ranks\[1\]: expected one of the 3"),
        (lambda: accept_length([-1, 0, 0], [0, 1, 1], RATES), r"ranks\[2\]: expected different"),
        (lambda: best_tree(RATES, 0), "num_nodes: expected at least 1"),
        (lambda: best_tree(RATES, 2, max_depth=-1), "max_depth: expected at least 0"),
        (lambda: best_tree(lambda p: [0.5], 2, first_draws=True), "rates: expected rates by depth"),
        (lambda: best_tree(lambda p: [2.0], 2), r"rates\(\): expected probabilities"),
        (lambda: best_chain(RATES, 4), "steps: expected no more steps"),
        (lambda: best_chain(RATES, -1), "steps: expected at least 0"),
        (lambda: best_shape(RATES, {}), "cost_ms: expected at least one"),
        (lambda: best_shape(RATES, {0: 1.0}), "cost_ms: expected nodes >= 1"),
        (lambda: best_shape(RATES, {1: 0.0}), "cost_ms: expected nodes >= 1 and finite"),
        (lambda: best_shape(RATES, {1: float("nan")}), "cost_ms: expected nodes >= 1 and finite"),
        (lambda: best_shape(RATES, {1: 1.0}, -1.0), "draft_ms: expected finite"),
    ],
)
def test_bad_input(call, wrong):
    with pytest.raises(ValueError, match=wrong):
        call()


def test_every_set_of_paths_is_tried():
    """The enumeration itself: Catalan-like counts of small binary trees."""
    assert [len(all_trees(n, 9, [2] * 9)) for n in range(1, 6)] == [1, 2, 5, 14, 42]
    assert set(itertools.chain(*all_trees(2, 1, [3]))) == {(0,), (1,), (2,)}
