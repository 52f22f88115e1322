"""Drafts: chains, static and dynamic trees, and the plan that chooses among them."""

from __future__ import annotations

import itertools

import pytest
import torch

from spec_kernels.decode.cycle import PhaseClock
from spec_kernels.decode.drafting import DraftPlan, DraftStart, StaticDraft, pool_size, static_paths
from spec_kernels.decode.engine import Engine
from spec_kernels.decode.sampling import SamplingParams, draft_coins, draw
from spec_kernels.ops.tree_build import tree_from_paths
from spec_kernels.testing.tiny_models import PLANS, PROMPTS


def drafted(engine, prompt, sampling=None):
    """The tree that the first cycle after ``prompt`` would verify."""
    engine.begin(0, prompt, 20, sampling)
    proposal = engine.speculative.proposal
    start = DraftStart(*(t.clone() for t in vars(engine.start).values()))
    proposal.draft(start)
    return proposal.build(start)


def paths(tree):
    """Token paths from the root of request 0, by node."""
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    found = {0: ()}
    for node in range(1, len(parents)):
        found[node] = (*found[parents[node]], tokens[node])
    return found


def brute_force(engine, prompt, root, path, sampling=None):
    """Draft logits after ``path``, from a chain drafted by itself on a cache of its own."""
    alone = Engine(engine.target, engine.drafter, DraftPlan("chain", 8), max_tokens=80)
    assert alone.begin(0, prompt, 20, sampling) == root
    proposal, start = alone.speculative.proposal, alone.start
    seen = [start.logits[0].clone()]
    logits_of = alone.drafter.logits

    def forced(normed):
        logits = logits_of(normed)
        seen.append(logits[0].clone())
        return logits

    target_ids = alone.drafter.target_ids
    choices = iter(path)

    class Choose:
        """Teacher-forces the chain: whatever is best, the path's next token is taken."""

        def take(self, best):
            return torch.full_like(best, next(choices, 0))

    alone.drafter.logits, alone.drafter.target_ids = forced, Choose()
    try:
        proposal.draft(start)
    finally:
        alone.drafter.target_ids = target_ids
        del alone.drafter.logits
    return [logits.float().log_softmax(-1) for logits in seen[: len(path) + 1]]


@pytest.mark.parametrize(
    "plan", [PLANS["static"], PLANS["dynamic"], DraftPlan("dynamic", 4, 2, 15)]
)
def test_case_21_a_chain_inside_a_tree_equals_the_chain_alone(tiny, plan):
    """Every node of the tree is among the best successors of its own path, drafted by itself."""
    engine = tiny.engine(plan)
    tree = drafted(engine, PROMPTS[0])
    root = int(tree.tokens[0, 0])
    found = paths(tree)
    leaves = set(found) - set(tree.parents[0].tolist())
    ids = engine.drafter.target_ids.tolist()
    for leaf in leaves:
        path = found[leaf]
        for depth, log_probs in enumerate(brute_force(engine, PROMPTS[0], root, path)[:-1]):
            best = [ids[i] for i in log_probs.topk(plan.topk).indices.tolist()]
            assert path[depth] in best


def test_the_chain_takes_the_best_each_time(tiny):
    engine = tiny.engine(DraftPlan("chain", 5))
    tree = drafted(engine, PROMPTS[1])
    path = tuple(tree.tokens[0, 1:].tolist())
    ids = engine.drafter.target_ids
    for depth, log_probs in enumerate(
        brute_force(engine, PROMPTS[1], int(tree.tokens[0, 0]), path)[:-1]
    ):
        assert int(ids[log_probs.argmax()]) == path[depth]


def test_the_dynamic_tree_is_eagle_2s(tiny):
    """Expansion and rerank redone with dictionaries over chains that are drafted alone."""
    steps, k, nodes = 3, 3, 9
    engine = tiny.engine(DraftPlan("dynamic", steps, k, nodes))
    tree = drafted(engine, PROMPTS[0])
    root, ids = int(tree.tokens[0, 0]), engine.drafter.target_ids.tolist()
    pool: list[tuple[float, tuple]] = []
    live = [(0.0, ())]
    for _ in range(steps):
        level = []
        for score, path in live:
            log_probs = brute_force(engine, PROMPTS[0], root, path)[-1]
            best = log_probs.topk(k)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            level += [(score + gain, (*path, ids[i])) for gain, i in pairs]
        pool += level
        live = sorted(level, key=lambda x: -x[0])[:k]
    assert len(pool) == pool_size(steps, k)
    wanted = {path for _, path in sorted(pool, key=lambda x: -x[0])[: nodes - 1]}
    assert set(paths(tree).values()) - {()} == wanted


@pytest.mark.parametrize("batch", [1, 2])
def test_a_static_tree_of_any_shape(tiny, batch):
    """Branches below nodes that are not the best, gaps in ranks, leaves at every depth."""
    engine = tiny.engine(PLANS["static"], batch=batch)
    shape = [(0,), (2,), (0, 1), (2, 0), (2, 3), (2, 0, 0), (2, 3, 1)]
    parents, ranks = tree_from_paths(shape)
    proposal = StaticDraft(engine.drafter, engine.cache, batch, parents, ranks)
    engine.speculative.proposal = proposal
    tree = drafted(engine, PROMPTS[0])
    found, ids = paths(tree), engine.drafter.target_ids.tolist()
    root = int(tree.tokens[0, 0])
    for node in range(1, len(parents)):
        before = found[parents[node]]
        log_probs = brute_force(engine, PROMPTS[0], root, before)[-1]
        best = log_probs.topk(ranks[node] + 1).indices.tolist()
        assert found[node][-1] == ids[best[-1]]


@pytest.mark.parametrize(
    "plan",
    [DraftPlan("chain", 4, sampled=True), DraftPlan("static", 3, 3, 14, sampled=True)],
    ids=["chain", "static"],
)
def test_drawn_drafts_come_from_the_q_that_is_noted(tiny, plan):
    """q of every node with children is its own path's, and its children are q's first draws."""
    engine, sampling = tiny.engine(plan), SamplingParams(0.8, seed=5)
    tree = drafted(engine, PROMPTS[0], sampling)
    noted = engine.speculative.proposal.draft_probs[0].clone()
    ids = engine.drafter.target_ids
    root, parents = int(tree.tokens[0, 0]), tree.parents[0].tolist()
    found, greedy = paths(tree), paths(drafted(tiny.engine(plan), PROMPTS[0]))
    assert found != greedy
    coins = draft_coins(5, range(30), plan.topk)
    for node in set(parents[1:]):
        path = found[node]
        children = [n for n, parent in enumerate(parents) if n and parent == node]
        log_probs = brute_force(engine, PROMPTS[0], root, path, sampling)[-1]
        q = noted[node][ids]
        torch.testing.assert_close(q, (log_probs / 0.8).softmax(-1), rtol=1e-3, atol=1e-5)
        assert noted[node].sum() == pytest.approx(1.0, abs=1e-5)
        position = len(PROMPTS[0]) + len(path) + 1
        drawn = draw(q[None], coins[position : position + 1, : len(children)])
        assert [found[n][-1] for n in children] == ids[drawn[0]].tolist()


def test_siblings_must_be_the_first_draws(tiny):
    engine = tiny.engine(PLANS["static"])
    parents, ranks = tree_from_paths([(0,), (2,)])
    shared = (engine.drafter, engine.cache, 1, parents, ranks)
    StaticDraft(*shared)
    with pytest.raises(ValueError, match="ranks: expected the children .* got rank 2 after 1"):
        StaticDraft(*shared, engine.sampling)


def test_a_superset_tree_accepts_at_least_as_much(tiny):
    accepted = {}
    for nodes in (2, 4, 8, 16, 31):
        engine = tiny.engine(DraftPlan("dynamic", 3, 4, nodes))
        engine.begin(0, PROMPTS[1], 20)
        verified = engine.speculative.run(PhaseClock(torch.device("cpu")))
        accepted[nodes] = int(verified.num_accepted[0])
    counts = list(accepted.values())
    assert counts == sorted(counts) and counts[-1] > 0


def test_static_paths_are_prefix_closed_and_likeliest_first():
    chosen = static_paths(4, 3, 20)
    assert len(chosen) == 19 == len(set(chosen))
    assert all(not path[:-1] or path[:-1] in chosen for path in chosen)
    assert chosen[:2] == [(0,), (0, 0)]
    every = [p for d in range(1, 5) for p in itertools.product(range(3), repeat=d)]

    def chance(path):
        return 0.6 ** len(path) * 0.4 ** sum(path)

    least = min(map(chance, chosen))
    assert all(chance(p) <= least * 1.02 for p in set(every) - set(chosen))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("ring",), "kind: expected one of"),
        (("chain", 0), "draft-steps: expected at least 1, got 0"),
        (("chain", 65), "draft-steps: expected at most 64"),
        (("chain", 3, 2), "topk: expected 1 for a chain, got 2"),
        (("dynamic", 3, 0), "topk: expected at least 1, got 0"),
        (("chain", 3, 1, 5), "num-nodes: expected 4 for a chain of 3, got 5"),
        (("dynamic", 2, 2, 8), "num-nodes: expected 2 to 7 for 2 steps of top-2, got 8"),
        (("static", 2, 2, 1), "num-nodes: expected 2 to 7"),
        (("dynamic", 3, 2, None, True), "draft-sampling: expected a chain or a static tree"),
        (("dynamic", 40, 40, 100), r"\(draft-steps - 1\) \* topk <= 1024"),
    ],
)
def test_impossible_plans_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DraftPlan(*arguments)


def test_topk_beyond_the_draft_vocabulary_is_refused(tiny):
    with pytest.raises(ValueError, match="at most the draft vocabulary of 32, got 33"):
        tiny.engine(DraftPlan("dynamic", 2, 33, 8))


def test_default_sizes():
    assert DraftPlan().num_nodes == 4
    assert DraftPlan("dynamic", 3, 4).num_nodes == 16
    assert DraftPlan("dynamic", 1, 3).num_nodes == 4
    assert DraftPlan("static", 2, 2).num_nodes == 7
