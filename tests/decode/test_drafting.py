"""Drafts: chains, static and dynamic trees, and the plan that chooses among them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from spec_kernels.decode.batch import Batch, Request
from spec_kernels.decode.drafting import DraftPlan, StaticDraft, pool_size, static_paths
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.ops.draft_sample import draft_sample
from spec_kernels.ops.tree_build import tree_from_paths
from spec_kernels.testing.tiny_models import DRAWN, PLANS, PROMPTS

GREEDY = SamplingParams()


def joined(batch, prompt, sampling=GREEDY):
    """Where a draft would start, of one request that has just joined."""
    batch.join(Request(prompt, 20, sampling))
    return int(batch.state.start.root_tokens[0])


def drafted(batch, prompt, sampling=GREEDY, proposal=None):
    """The tree that the first cycle after ``prompt`` would verify, and the confidences beside."""
    joined(batch, prompt, sampling)
    proposal = proposal or batch.cycle(draws=sampling.temperature > 0).proposal
    proposal.draft()
    confidence = torch.full(proposal.tree.tokens.shape, float("nan"))
    return proposal.build(confidence), confidence


def paths(tree):
    """Token paths from the root of request 0, by node."""
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    found = {0: ()}
    for node in range(1, len(parents)):
        found[node] = (*found[parents[node]], tokens[node])
    return found


def brute_force(batch, prompt, root, path, sampling=GREEDY):
    """Draft logits ``[Vd]`` after each prefix of ``path``, from a chain drafted by itself on a
    cache of its own and teacher-forced: whatever is best, the path's next token is taken."""
    drafter = batch.drafter
    alone = Batch(batch.target, drafter, DraftPlan("chain", 8), max_tokens=80)
    assert joined(alone, prompt, sampling) == root
    proposal, target_ids, logits_of = alone.cycle().proposal, drafter.target_ids, drafter.logits
    seen, choices = [], iter([*path, *[0] * 8])

    def force():
        drafter.target_ids = torch.full_like(target_ids, next(choices))

    def forced(normed):
        logits = logits_of(normed)
        seen.append(logits[0].clone())
        force()
        return logits

    seen.append(alone.state.start.logits[0].clone())
    drafter.logits = forced
    force()
    try:
        proposal.draft()
    finally:
        drafter.target_ids = target_ids
        del drafter.logits
    return [logits.float() for logits in seen[: len(path) + 1]]


@pytest.mark.parametrize(
    "plan", [PLANS["static"], PLANS["dynamic"], DraftPlan("dynamic", 4, 2, 15)]
)
def test_case_21_a_chain_inside_a_tree_equals_the_chain_alone(tiny, plan):
    """Every node of the tree is among the best successors of its own path, drafted by itself."""
    batch = tiny.batch(plan)
    tree, _ = drafted(batch, PROMPTS[0])
    root = int(tree.tokens[0, 0])
    found = paths(tree)
    leaves = set(found) - set(tree.parents[0].tolist())
    ids = batch.drafter.target_ids.tolist()
    for leaf in leaves:
        path = found[leaf]
        for depth, logits in enumerate(brute_force(batch, PROMPTS[0], root, path)[:-1]):
            best = [ids[i] for i in logits.topk(plan.topk).indices.tolist()]
            assert path[depth] in best


def test_the_chain_takes_the_best_each_time(tiny):
    batch = tiny.batch(DraftPlan("chain", 5))
    tree, confidence = drafted(batch, PROMPTS[1])
    root, path = int(tree.tokens[0, 0]), tuple(tree.tokens[0, 1:].tolist())
    ids = batch.drafter.target_ids
    for depth, logits in enumerate(brute_force(batch, PROMPTS[1], root, path)[:-1]):
        assert int(ids[logits.argmax()]) == path[depth]
        sure = float(logits.softmax(-1).max())
        assert confidence[0, depth + 1] == pytest.approx(sure, rel=1e-4)
    assert confidence[0, 0] == 1


def test_the_dynamic_tree_is_eagle_2s(tiny):
    """Expansion and rerank redone with dictionaries over chains that are drafted alone."""
    steps, k, nodes = 3, 3, 9
    batch = tiny.batch(DraftPlan("dynamic", steps, k, nodes))
    tree, confidence = drafted(batch, PROMPTS[0])
    root, ids = int(tree.tokens[0, 0]), batch.drafter.target_ids.tolist()
    pool: list[tuple[float, tuple]] = []
    live = [(0.0, ())]
    for _ in range(steps):
        level = []
        for score, path in live:
            log_probs = brute_force(batch, PROMPTS[0], root, path)[-1].log_softmax(-1)
            best = log_probs.topk(k)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            level += [(score + gain, (*path, ids[i])) for gain, i in pairs]
        pool += level
        live = sorted(level, key=lambda x: -x[0])[:k]
    assert len(pool) == pool_size(steps, k)
    best = sorted(pool, key=lambda x: -x[0])[: nodes - 1]
    found = paths(tree)
    assert set(found.values()) - {()} == {path for _, path in best}
    # Of a node and its ancestors together.
    sure = {path: math.exp(score) for score, path in best}
    for node in range(1, nodes):
        assert confidence[0, node] == pytest.approx(sure[found[node]], rel=1e-3)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_static_tree_of_any_shape(tiny, num_rows):
    """Branches below nodes that are not the best, gaps in ranks, leaves at every depth."""
    batch = tiny.batch(PLANS["static"], max_requests=num_rows)
    shape = [(0,), (2,), (0, 1), (2, 0), (2, 3), (2, 0, 0), (2, 3, 1)]
    parents, ranks = tree_from_paths(shape)
    proposal = StaticDraft(batch.drafter, batch.state, parents, ranks)
    tree, confidence = drafted(batch, PROMPTS[0], proposal=proposal)
    found, ids = paths(tree), batch.drafter.target_ids.tolist()
    root = int(tree.tokens[0, 0])
    for node in range(1, len(parents)):
        logits = brute_force(batch, PROMPTS[0], root, found[parents[node]])[-1]
        best = int(logits.topk(ranks[node] + 1).indices[-1])
        assert found[node][-1] == ids[best]
        sure = float(logits.softmax(-1)[best])
        assert confidence[0, node] == pytest.approx(sure, rel=1e-4)


@pytest.mark.parametrize("plan", DRAWN.values(), ids=DRAWN)
def test_drawn_drafts_come_from_the_q_that_is_noted(tiny, plan):
    """q of every node with children is its own path's, and its children are q's first draws: what
    ``draft_sample`` gives for the logits of that path, drafted by itself."""
    batch, sampling = tiny.batch(plan), SamplingParams(0.8, seed=5)
    tree, _ = drafted(batch, PROMPTS[0], sampling)
    noted = batch.cycle(draws=True).proposal.draft_probs[0].clone()
    ids = batch.drafter.target_ids
    root, parents = int(tree.tokens[0, 0]), tree.parents[0].tolist()
    found, greedy = paths(tree), paths(drafted(tiny.batch(plan), PROMPTS[0])[0])
    assert found != greedy
    for node in set(parents[1:]):
        path = found[node]
        children = [n for n, parent in enumerate(parents) if n and parent == node]
        logits = brute_force(batch, PROMPTS[0], root, path, sampling)[-1]
        torch.testing.assert_close(
            noted[node][ids], (logits / 0.8).softmax(-1), rtol=1e-3, atol=1e-5
        )
        assert noted[node].sum() == pytest.approx(1.0, abs=1e-5)
        wanted, _ = draft_sample(
            logits[None, None],
            ids,
            torch.tensor([len(PROMPTS[0])]),
            len(path) + 1,
            len(children),
            temperature=torch.tensor([0.8]),
            seeds=torch.tensor([5]),
            probs=torch.zeros(1, 1, noted.shape[1]),
        )
        assert [found[n][-1] for n in children] == wanted.flatten().tolist()


def test_siblings_must_be_the_first_draws(tiny):
    batch = tiny.batch(PLANS["static"])
    parents, ranks = tree_from_paths([(0,), (2,)])
    shared = (batch.drafter, batch.state, parents, ranks)
    StaticDraft(*shared)
    with pytest.raises(ValueError, match="ranks: expected the children .* got rank 2 after 1"):
        StaticDraft(*shared, draws=True)


def test_case_09_a_superset_tree_accepts_at_least_as_much(tiny):
    accepted = {}
    for nodes in (2, 4, 8, 16, 31):
        batch = tiny.batch(DraftPlan("dynamic", 3, 4, nodes))
        joined(batch, PROMPTS[1])
        accepted[nodes] = int(batch.cycle().run().verified.num_accepted)
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
        (("chain", 1.5), r"draft-steps, topk: expected integers, got \(1.5, 1\)"),
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
        tiny.batch(DraftPlan("dynamic", 2, 33, 8))


def test_default_sizes():
    assert DraftPlan().num_nodes == 4
    assert DraftPlan("dynamic", 3, 4).num_nodes == 16
    assert DraftPlan("dynamic", 1, 3).num_nodes == 4
    assert DraftPlan("static", 2, 2).num_nodes == 7


def test_a_plan_of_given_paths_is_that_tree(tiny):
    shape = [(0,), (2,), (0, 1), (2, 0), (2, 3)]
    plan = DraftPlan.of_paths(shape)
    assert (plan.kind, plan.steps, plan.topk, plan.num_nodes) == ("static", 2, 4, 6)
    engine = tiny.engine(plan)
    assert engine.batch.cycle().proposal.tree.parents[0].tolist() == tree_from_paths(shape)[0]
    plain = engine.generate(PROMPTS[0], 12, speculative=False).result()
    assert engine.generate(PROMPTS[0], 12).result().tokens == plain.tokens
    for paths, message in (([], "expected at least one"), ([(0, 1)], "paths")):
        with pytest.raises(ValueError, match=message):
            DraftPlan.of_paths(paths)


def test_a_dynamic_tree_can_come_best_first(tiny):
    """The same nodes, and the first of them are the best tree of so many: what eviction keeps."""
    plan = DraftPlan("dynamic", 4, 4, 16)
    batch = tiny.batch(plan)
    batch.join(Request(PROMPTS[0], 20))
    differs = False
    for _ in range(4):
        trees, confidences = [], []
        for options in ({}, {"best_first": True}, {"num_nodes": 6}):
            draft = plan.make(batch.drafter, batch.state, **options)
            confidence = torch.full((1, draft.num_nodes), math.nan)
            with torch.inference_mode():
                draft.draft()
                trees.append(list(paths(draft.build(confidence)).values()))
            assert not draft.tree.status.any()
            confidences.append(confidence[0, 1:].tolist())
        levels, best, few = trees
        assert sorted(levels) == sorted(best) and sorted(few) == sorted(best[:6])
        assert confidences[1] == sorted(confidences[0], reverse=True)
        differs |= levels != best
        batch.step()
    assert differs


def test_paths_beside_numbers_that_are_not_theirs_are_refused():
    """Caches are sized by the numbers: a larger tree would not fit in them."""
    paths = tuple((0,) * n for n in range(1, 6))
    assert DraftPlan("static", 5, 1, 6, paths=paths) == DraftPlan.of_paths(paths)
    for numbers in (("static", 5, 1), ("static", 3, 1, 4), ("static", 5, 2, 6), ("dynamic", 5)):
        with pytest.raises(ValueError, match="drafting: paths: expected a static tree whose"):
            DraftPlan(*numbers, paths=paths)


@pytest.mark.parametrize(
    "plan", (DraftPlan.of_paths([(0,), (2,), (0, 1)]), DraftPlan("static", 3, 3, 9))
)
def test_fewer_nodes_of_a_static_tree_are_its_first(tiny, plan):
    batch = tiny.batch(plan)
    drafter, state = batch.drafter, batch.state
    whole = plan.make(drafter, state).tree.parents[0].tolist()
    for count in range(1, plan.num_nodes + 1):
        fewer = plan.make(drafter, state, num_nodes=count)
        assert fewer.tree.parents[0].tolist() == whole[:count]
