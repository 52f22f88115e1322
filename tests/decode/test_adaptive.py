"""The adaptive rule, on requests that are simulated: seeded, no model and no clock."""

import heapq
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels.decode.adaptive import Adapter, Calibration, Choice, CostTable, isotonic

RUNGS = [1, 2, 4, 6, 8]
BUCKETS = [1, 2, 4, 8]
# Gigabytes that a forward of so many tokens reads on a large MoE split over eight GPUs.
GIGABYTES = {1: 6.03, 3: 8.91, 4: 10.31, 8: 15.6, 16: 24.95, 32: 39.52, 64: 57.35}


def moe_ms(num_tokens: int) -> float:
    points = sorted(GIGABYTES.items())
    for (a, low), (b, high) in zip(points, points[1:], strict=False):
        if a <= num_tokens <= b:
            return (low + (high - low) * (num_tokens - a) / (b - a)) / 1.79 + 1.4
    raise ValueError(num_tokens)


def draft_ms(nodes: int) -> float:
    return 0.3 * (nodes - 1)


MOE = CostTable.from_curve(moe_ms, BUCKETS, RUNGS, draft_ms)


class Chain:
    """A request whose drafts are right as often as ``rates`` says, given that their parents are.

    Luck belongs to positions of the text, so that policies meet the same. ``stated`` makes of a
    draft's probability what the drafter says of it.
    """

    def __init__(self, rates, seed, stated=lambda p: p):
        self.rates, self.rng, self.stated, self.luck = rates, random.Random(seed), stated, []

    def draft(self, position, num_drafts):
        while len(self.luck) < position + num_drafts:
            self.luck.append((self.rng.uniform(-0.25, 0.25), self.rng.random()))
        rates = self.rates(position) if callable(self.rates) else self.rates
        probs, right = [], []
        luck = self.luck[position : position + num_drafts]
        for rate, (shift, coin) in zip(rates[:num_drafts], luck, strict=True):
            probs.append(rate + 4 * shift * min(0.25, rate, 1 - rate))
            right.append(coin < probs[-1])
        return [self.stated(p) for p in probs], right


class Tree:
    """Two candidates a node; nodes best first, each with the probability of its whole path."""

    def __init__(self, rates, seed, stated=lambda p: p):
        self.rates, self.rng, self.stated = rates, random.Random(seed), stated

    def draft(self, position, num_drafts):
        first = self.rates(position) if callable(self.rates) else self.rates
        ranks = (first, (1 - first) / 2)
        pool, nodes = [(-p, (rank,)) for rank, p in enumerate(ranks)], []
        heapq.heapify(pool)
        while len(nodes) < num_drafts:
            score, path = heapq.heappop(pool)
            nodes.append((path, -score))
            for rank, p in enumerate(ranks):
                heapq.heappush(pool, (score * p, (*path, rank)))
        right, draw = (), self.rng.random
        while (coin := draw()) < sum(ranks):
            right += (0 if coin < ranks[0] else 1,)
        return [self.stated(p) for _, p in nodes], [path == right[: len(path)] for path, _ in nodes]


class Result:
    def __init__(self, num_requests):
        self.ms, self.tokens, self.choices = 0.0, [0] * num_requests, []
        # (milliseconds, tokens of all requests) of each cycle.
        self.steps = []

    @property
    def rate(self):
        return sum(self.tokens) / self.ms


def simulate(requests, num_cycles, policy, delay=1, costs=MOE):
    """Runs an ``Adapter``, or always the rung of a number; results come ``delay`` cycles later."""
    rungs = policy.rungs if isinstance(policy, Adapter) else costs.nodes
    num, unread = len(requests), []
    ids, result = list(range(num)), Result(num)
    if isinstance(policy, Adapter):
        for i in ids:
            policy.join(i)
    for _ in range(num_cycles):
        if isinstance(policy, Adapter):
            choice = policy.choose(ids, num)
        else:
            choice = Choice(policy, [rungs[policy]] * num)
        result.choices.append(choice)
        ms, before = (
            costs.cycle(num, rungs[choice.rung], sum(choice.max_nodes) - num),
            result.tokens,
        )
        seen, result.tokens = [], list(before)
        for i, request in enumerate(requests):
            confidences, right = request.draft(result.tokens[i], rungs[choice.rung] - 1)
            right = right[: choice.max_nodes[i] - 1]
            accepted = sum(right) if isinstance(request, Tree) else (right + [False]).index(False)
            result.tokens[i] += accepted + 1
            seen.append((i, choice.rung, choice.max_nodes[i], confidences, accepted))
        result.ms += ms
        result.steps.append((ms, sum(result.tokens) - sum(before)))
        unread.append(seen)
        if isinstance(policy, Adapter) and len(unread) >= delay:
            for row in unread.pop(0):
                policy.observe(*row)
    return result


# ---------------------------------------------------------------------------------------- costs


def test_isotonic_pools_what_falls():
    assert isotonic([1, 2, 4]) == [1, 2, 4]
    assert isotonic([3, 1]) == [2, 2]
    assert isotonic([1, 5, 3, 4, 6]) == [1, 4, 4, 4, 6]
    assert isotonic([]) == []


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12))
def test_isotonic_rises_and_keeps_the_sum(values):
    smooth = isotonic(values)
    assert all(a <= b + 1e-9 for a, b in zip(smooth, smooth[1:], strict=False))
    assert sum(smooth) == pytest.approx(sum(values))


def test_costs_are_interpolated_between_requests_nodes_and_kept_drafts():
    full = {(1, 1): 2.0, (1, 2): 5.0, (1, 5): 6.0, (3, 1): 4.0, (3, 2): 10.0, (3, 5): 16.0}
    evicted = {(1, 1): 2.0, (1, 2): 2.0, (1, 5): 3.0, (3, 1): 4.0, (3, 2): 4.0, (3, 5): 7.0}
    costs = CostTable(full, evicted)
    for (bucket, nodes), ms in full.items():
        assert costs.cycle(bucket, nodes, bucket * (nodes - 1)) == pytest.approx(ms)
        assert costs.copies(bucket, nodes) == evicted[bucket, nodes]
    # Two of twelve drafts add as much in a cycle of five nodes as in one of two.
    assert costs.cycle(3, 5, 2) == pytest.approx(7.0 + 6.0 * 2 / 3)
    assert costs.copies(2, 2) == pytest.approx(3.0)
    assert costs.cycle(2, 5, 8) == pytest.approx(11.0)
    assert CostTable(full).copies(3, 5) == 4.0


def test_measured_costs_are_the_least_and_rise():
    noise = {(1, 1, 1): [5, 9, 1], (1, 4, 4): [2, 2, 9], (1, 4, 1): [3, 3, 3]}
    calls = []

    def clock(*key):
        calls.append(key)
        return noise[key][calls.count(key) - 1]

    costs = CostTable.measure(clock, [1], [1, 4], num_repeats=3)
    # Copies of the root measured dearer than real drafts are a fault of the measurement.
    assert costs.copies(1, 4) == costs.cycle(1, 4, 3) == 2.0
    assert costs.cycle(1, 1, 0) == 1.0
    assert calls[:3] == [(1, 1, 1), (1, 4, 1), (1, 4, 4)] and calls[3:6] == calls[:3]


def test_noise_in_costs_is_smoothed():
    full = {(1, 1): 5.0, (1, 2): 7.0, (1, 3): 6.0, (2, 1): 4.0, (2, 2): 9.0, (2, 3): 12.0}
    evicted = {(b, n): 5.0 + 2 * (n == 2) for b, n in full}
    costs = CostTable(full, evicted)
    cycles = [costs.cycle(1, n, n - 1) for n in (1, 2, 3)]
    assert cycles == sorted(cycles) and cycles[0] == 5.0
    assert costs.cycle(2, 1, 0) == 5.0
    for bucket in (1, 2):
        assert costs.added(bucket) == sorted(costs.added(bucket))
        assert costs.added(bucket)[0] == 0
        assert costs.copies(bucket, 3) >= costs.copies(bucket, 2) >= costs.copies(bucket, 1)


def test_a_table_from_another_rank_is_the_same_to_the_bit():
    there = CostTable.from_dict(json.loads(json.dumps(MOE.as_dict())))
    for bucket in range(1, 9):
        for nodes in range(1, 9):
            assert there.copies(bucket, nodes) == MOE.copies(bucket, nodes)
        assert there.added(bucket) == MOE.added(bucket)


@pytest.mark.parametrize(
    "full, evicted, message",
    [
        ({}, None, "full: expected costs"),
        ({(1, 2): 1.0}, None, "of 1 and more nodes, got"),
        ({(1, 1): 1.0, (2, 1): 1.0, (2, 3): 1.0}, None, r"surplus at \(1, 3\)"),
        ({(1, 1): 1.0}, {}, "evicted: expected a cost for each"),
        ({(1, 1): 0.0}, None, "positive milliseconds"),
        ({(1, 1): float("nan")}, None, "positive milliseconds"),
        ({(1, 1): 10**400}, None, "positive milliseconds"),
    ],
)
def test_bad_tables_are_refused(full, evicted, message):
    with pytest.raises(ValueError, match=f"cost table: .*{message}"):
        CostTable(full, evicted)


def test_sizes_without_a_cost_are_refused():
    with pytest.raises(ValueError, match="requests: expected 1 to 8"):
        MOE.copies(9, 1)
    with pytest.raises(ValueError, match="nodes: expected 1 to 8"):
        MOE.copies(1, 9)
    with pytest.raises(ValueError, match="num_drafts: expected 0 to 14"):
        MOE.cycle(2, 8, 15)


# ------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize(
    "rates",
    [[0.0] * 7, [0.3] * 7, [0.45] * 7, [0.742, 0.63, 0.62, 0.52, 0.65, 0.6, 0.6], [0.93] * 7],
    ids=["never", "low", "middle", "real", "high"],
)
def test_a_steady_request_gets_what_the_best_fixed_rung_gets(rates, delay):
    best = max(simulate([Chain(rates, 1)], 1500, rung).rate for rung in range(len(RUNGS)))
    result = simulate([Chain(rates, 2)], 1500, Adapter(RUNGS, MOE), delay)
    print(f"adaptive / best fixed: {result.rate / best:.3f}")
    assert result.rate > 0.95 * best


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("stated", [0.3, 0.99])
def test_a_request_that_is_never_right_goes_off_and_loses_little(delay, stated):
    request = Chain([0.0] * 7, 1, lambda p: stated)
    result = simulate([request], 400, Adapter(RUNGS, MOE), delay)
    plain = MOE.cycle(1, 1, 0) * sum(result.tokens)
    print(f"time / plain: {result.ms / plain:.3f}")
    assert result.ms < 1.05 * plain
    assert all(choice.rung <= 1 for choice in result.choices[20:])


def rungs_of(result):
    return [choice.rung for choice in result.choices]


def nodes_of(result, request):
    return [choice.max_nodes[request] for choice in result.choices]


@pytest.mark.parametrize("delay", [1, 2])
def test_a_request_that_turns_is_followed(delay):
    def rates(position):
        return [0.95] * 7 if position // 300 % 2 else [0.05] * 7

    best = max(simulate([Chain(rates, 1)], 1500, rung).rate for rung in range(len(RUNGS)))
    result = simulate([Chain(rates, 2)], 1500, Adapter(RUNGS, MOE), delay)
    print(f"adaptive / best fixed: {result.rate / best:.3f}")
    assert result.rate > 1.05 * best
    assert {0, len(RUNGS) - 1} <= set(rungs_of(result))


@pytest.mark.parametrize("delay", [1, 2])
def test_in_a_mixed_batch_only_those_draft_whose_drafts_pay(delay):
    def batch():
        return [Chain([0.95] * 7, 1), Chain([0.0] * 7, 2)]

    best = max(simulate(batch(), 600, rung).rate for rung in range(len(RUNGS)))
    result = simulate(batch(), 600, Adapter(RUNGS, MOE), delay)
    print(f"adaptive / best fixed: {result.rate / best:.3f}")
    assert result.rate > 1.15 * best
    good, bad = (nodes_of(result, i)[100:] for i in (0, 1))
    assert sum(n > 4 for n in good) > 0.9 * len(good)
    assert sum(n > 1 for n in bad) < 0.05 * len(bad)


@pytest.mark.parametrize("num_requests", [1, 8])
def test_trials_grow_rare(num_requests):
    requests = [Chain([0.05] * 7, seed) for seed in range(num_requests)]
    result = simulate(requests, 800, Adapter(RUNGS, MOE))
    plain = MOE.cycle(num_requests, 1, 0) / num_requests * sum(result.tokens)
    print(f"time / plain: {result.ms / plain:.3f}")
    assert result.ms < 1.03 * plain
    halves = [sum(r > 0 for r in rungs_of(result)[i : i + 400]) for i in (0, 400)]
    assert 0 < halves[1] < halves[0]


def test_drafters_that_say_too_much_are_seen_through():
    """The same drafts, honest and boasting: the choices end up alike."""
    rates = [0.45] * 7
    boast = Chain(rates, 3, lambda p: 0.9 + 0.1 * p)
    adapter = Adapter(RUNGS, MOE)
    honest = simulate([Chain(rates, 3)], 1200, Adapter(RUNGS, MOE))
    boasting = simulate([boast], 1200, adapter)
    assert boasting.rate > 0.97 * honest.rate
    assert adapter.calibration(1, 0.95) == pytest.approx(0.45, abs=0.1)
    late = rungs_of(boasting)[400:]
    assert sum(rung <= 2 for rung in late) > 0.95 * len(late)


@pytest.mark.parametrize("first, stated", [(0.1, None), (0.5, None), (0.8, None), (0.1, 0.5)])
def test_trees_get_what_the_best_fixed_rung_gets(first, stated):
    rungs = [1, 4, 8, 16, 32]
    costs = CostTable.from_curve(moe_ms, [1], rungs, lambda nodes: 0.5 * (nodes > 1))

    def say(p):
        return p if stated is None else p**stated

    best = max(simulate([Tree(first, 1)], 800, i, costs=costs).rate for i in range(len(rungs)))
    adapter = Adapter(rungs, costs, form="cumulative")
    result = simulate([Tree(first, 2, say)], 800, adapter, 2, costs)
    print(f"adaptive / best fixed: {result.rate / best:.3f}")
    assert result.rate > 0.95 * best


def test_costs_of_copies_decide_who_keeps_drafts():
    """Where evicting a node saves nothing, whoever may be right keeps all."""
    full = {(b, n): 10.0 + n for b in (1, 2) for n in RUNGS}
    result = simulate(
        [Chain([0.9] * 7, 1), Chain([0.2] * 7, 2)],
        50,
        Adapter(RUNGS, CostTable(full, full)),
        costs=CostTable(full, full),
    )
    assert result.choices[-1].max_nodes == [8, 8]


def test_a_request_that_is_not_speculative_counts_and_never_drafts():
    alone, beside = Adapter(RUNGS, MOE), Adapter(RUNGS, MOE)
    num_nodes = []
    for adapter, active in ((alone, [0]), (beside, [0, 1])):
        request, position = Chain([0.8] * 7, 1), 0
        num_nodes.append(0)
        for i in active:
            adapter.join(i, speculative=i == 0)
        for _ in range(200):
            choice = adapter.choose(active, 2)
            rung, nodes = choice.rung, choice.max_nodes[0]
            assert choice.max_nodes[1:] == [1] * (len(active) - 1)
            confidences, right = request.draft(position, nodes - 1)
            accepted = (right + [False]).index(False)
            adapter.observe(0, rung, nodes, confidences, accepted)
            for i in active[1:]:
                adapter.observe(i, rung, 1, [], 0)
            position += accepted + 1
            num_nodes[-1] += nodes
    # The other waits for its drafts and gains nothing.
    assert num_nodes[0] > 1.1 * num_nodes[1] > 220
    assert beside.choose([1], 1) == Choice(0, [1])


def test_a_new_request_is_expected_to_be_like_the_others():
    adapter = Adapter(RUNGS, MOE)
    simulate([Chain([0.0] * 7, 1)], 100, adapter)
    adapter.join("new")
    assert adapter.choose(["new"], 1) == Choice(0, [1])
    adapter = Adapter(RUNGS, MOE)
    simulate([Chain([0.95] * 7, 1)], 100, adapter)
    adapter.join("new")
    assert adapter.choose(["new"], 1) == Choice(len(RUNGS) - 1, [RUNGS[-1]])


def test_a_rung_is_not_left_for_one_hardly_better():
    def num_switches(margin):
        adapter = Adapter(RUNGS, MOE, margin=margin)
        rungs = rungs_of(simulate([Chain([0.68] * 7, 1)], 800, adapter))
        return sum(a != b for a, b in zip(rungs, rungs[1:], strict=False))

    assert 2 * num_switches(0.02) < num_switches(0.0)


def test_a_request_that_left_is_forgotten():
    adapter = Adapter(RUNGS, MOE)
    simulate([Chain([0.0] * 7, 1)], 60, adapter, delay=2)
    adapter.leave(0)
    with pytest.raises(ValueError, match="observe: request 0 has not joined"):
        adapter.observe(0, 0, 1, [], 0)
    adapter.join(0)
    with pytest.raises(ValueError, match="as chosen, None"):
        adapter.observe(0, 0, 1, [], 0)


class Adversary:
    """Is right in the first cycles after a pause, then wrong until the next; says the same."""

    def __init__(self, num_good, says):
        self.num_good, self.says, self.cycle = num_good, says, 0

    def draft(self, position, num_drafts):
        self.cycle = self.cycle + 1 if num_drafts else 0
        return [self.says] * num_drafts, [self.cycle <= self.num_good] * num_drafts


def most_lost(result, overhead=0.05):
    """Over any stretch of cycles, in tokens of rung 0: what the bound says is bounded."""
    num = len(result.tokens)
    token = MOE.cycle(num, 1, 0) / num
    most = lost = 0.0
    for ms, tokens in result.steps:
        lost = max(0.0, lost + ms / token - (1 + overhead) * tokens)
        most = max(most, lost)
    return most


def bound(num, credit, delay):
    plain, dearest = MOE.cycle(num, 1, 0), MOE.cycle(num, RUNGS[-1], num * (RUNGS[-1] - 1))
    return num * (credit + delay * (dearest / plain - 1))


@settings(max_examples=30, deadline=None)
@given(
    delay=st.integers(1, 3),
    credit=st.sampled_from([0.0, 2.0, 8.0]),
    memory=st.sampled_from([8.0, 32.0, 400.0]),
    good=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    says=st.sampled_from([0.1, 0.6, 1.0]),
)
def test_the_bound_on_what_is_lost_holds_against_an_adversary(delay, credit, memory, good, says):
    requests, num = [Adversary(num_good, says) for num_good in good], len(good)
    adapter = Adapter(RUNGS, MOE, credit=credit, memory=memory)
    result = simulate(requests, 250, adapter, delay)
    assert most_lost(result) <= bound(num, credit, delay) + 1e-9


@pytest.mark.parametrize("num_good", [20, 60])
def test_without_the_account_the_adversary_wins(num_good):
    """So the bound above is the account's doing, and neither empty nor the estimates'."""
    kept, lost = (
        most_lost(simulate([Adversary(num_good, 1.0)], 500, adapter))
        for adapter in (
            Adapter(RUNGS, MOE, credit=2.0, memory=400.0),
            Adapter(RUNGS, MOE, credit=1e9, memory=400.0),
        )
    )
    assert bound(1, 2.0, 1) / 2 < kept <= bound(1, 2.0, 1) < lost / 2


def test_a_trial_goes_on_while_it_pays():
    adapter = Adapter(RUNGS, MOE, memory=400.0)
    simulate([Chain([0.0] * 7, 1)], 200, adapter)
    in_a_row = most = 0
    for _ in range(adapter.max_interval + 20):
        choice = adapter.choose([0], 1)
        nodes = choice.max_nodes[0]
        adapter.observe(0, choice.rung, nodes, [0.9] * (nodes - 1), nodes - 1)
        in_a_row = in_a_row + 1 if nodes > 1 else 0
        most = max(most, in_a_row)
    assert most > 4 * adapter.trial_cycles


@pytest.mark.parametrize("form", ["conditional", "cumulative"])
def test_replicas_choose_alike(form):
    """Ranks: one with the table that it measured, one with the table that it was sent."""
    sent = CostTable.from_dict(json.loads(json.dumps(MOE.as_dict())))
    one, other = Adapter(RUNGS, MOE, form=form), Adapter(RUNGS, sent, form=form)
    rng, active, unread, joined = random.Random(1), [], [], 0
    for _ in range(300):
        if len(active) < 8 and rng.random() < 0.2:
            active.append(joined)
            joined += 1
            one.join(active[-1])
            other.join(active[-1])
        if len(active) > 1 and rng.random() < 0.1:
            gone = active.pop(rng.randrange(len(active)))
            unread = [row for row in unread if row[0] != gone]
            one.leave(gone)
            other.leave(gone)
        if not active:
            continue
        bucket = next(b for b in BUCKETS if b >= len(active))
        choice = one.choose(active, bucket)
        assert other.choose(active, bucket) == choice
        for i, nodes in zip(active, choice.max_nodes, strict=True):
            p = i % 4 / 4
            kept = [p + rng.random() / 4 for _ in range(nodes - 1)]
            accepted = ([rng.random() < p for _ in kept] + [False]).index(False)
            unread.append((i, choice.rung, nodes, kept, accepted))
        while len(unread) > 12:
            row = unread.pop(0)
            one.observe(*row)
            other.observe(*row)
    assert joined > 8


# ------------------------------------------------------------------------- the distribution


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_said_of_drafts_behind_the_first_wrong_one_changes_nothing(seed):
    rng = random.Random(seed)
    one, other = Adapter(RUNGS, MOE, memory=2.0), Adapter(RUNGS, MOE, memory=2.0)
    one.join(0)
    other.join(0)
    for _ in range(40):
        choice = one.choose([0], 1)
        assert other.choose([0], 1) == choice
        confidences = [rng.random() for _ in range(RUNGS[choice.rung] - 1)]
        accepted = min(rng.randint(0, 3), choice.max_nodes[0] - 1)
        behind = [rng.random() for _ in confidences[accepted + 1 :]]
        row = (0, choice.rung, choice.max_nodes[0])
        one.observe(*row, confidences, accepted)
        other.observe(*row, [*confidences[: accepted + 1], *behind], accepted)


def test_a_choice_by_a_draft_whose_coin_is_used_again_would_bend_the_distribution():
    """Why it must not: one position, two tokens, each as likely as the other to the target.

    The drafter gives token 1 nine tenths, in this cycle and in the one before, where the draft at
    this position stood behind a wrong one and was drawn with the same coin.
    """
    drawn, judged, plain = np.random.default_rng(1).random((3, 200_000))
    draft = drawn < 0.9
    q = np.where(draft, 0.9, 0.1)
    # A refused draft leaves the other token.
    verified = np.where(judged < 0.5 / q, draft, ~draft)
    undrafted = plain < 0.5
    assert verified.mean() == pytest.approx(0.5, abs=0.005)
    assert np.where(q > 0.5, verified, undrafted).mean() > 0.54


def test_a_wrong_call_is_refused():
    adapter = Adapter(RUNGS, MOE)
    adapter.join("a")
    with pytest.raises(ValueError, match="join: request 'a' is here already"):
        adapter.join("a")
    with pytest.raises(ValueError, match="leave: request 'b' has not joined"):
        adapter.leave("b")
    with pytest.raises(ValueError, match="choose: request 'b' has not joined"):
        adapter.choose(["b"], 1)
    for active, bucket in (([], 1), (["a", "a"], 2), (["a"], 0)):
        with pytest.raises(ValueError, match="choose: active"):
            adapter.choose(active, bucket)
    with pytest.raises(ValueError, match=r"as chosen, None, got \(0, 1\)"):
        adapter.observe("a", 0, 1, [], 0)
    choice = adapter.choose(["a"], 1)
    rung, nodes = choice.rung, choice.max_nodes[0]
    assert nodes > 1
    confidences = [0.5] * (RUNGS[rung] - 1)
    with pytest.raises(ValueError, match="as chosen"):
        adapter.observe("a", rung, nodes + 1, confidences, 0)
    with pytest.raises(ValueError, match="accepted: expected 0 to"):
        adapter.observe("a", rung, nodes, confidences, nodes)
    with pytest.raises(ValueError, match="confidences: expected"):
        adapter.observe("a", rung, nodes, [], 0)
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="probabilities"):
            adapter.observe("a", rung, nodes, [bad] * len(confidences), 0)
    adapter.observe("a", rung, nodes, confidences, 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rungs": []}, "rungs"),
        ({"rungs": [2, 4]}, "rungs"),
        ({"rungs": [1, 4, 4]}, "rungs"),
        ({"rungs": [1, 9]}, "at most 8 nodes"),
        ({"form": "tree"}, "form"),
        ({"overhead": -0.1}, "overhead"),
        ({"margin": float("nan")}, "margin"),
        ({"memory": 1.0}, "memory"),
        ({"interval": 0}, "interval"),
        ({"max_interval": 3}, "max_interval"),
        ({"trial_cycles": 0}, "trial_cycles"),
        ({"credit": float("inf")}, "credit"),
        ({"prior": 1.0}, "prior"),
    ],
)
def test_bad_options_are_refused(options, message):
    options = {"rungs": RUNGS, "costs": MOE} | options
    with pytest.raises(ValueError, match=f"adapter: .*{message}"):
        Adapter(**options)


def test_calibration_starts_from_the_confidence_and_learns_what_it_is_worth():
    calibration = Calibration(3)
    assert calibration(1, 0.85) == pytest.approx(0.85)
    for i in range(400):
        calibration.update(1, 0.85, i % 4 == 0)
    assert calibration(1, 0.85) == pytest.approx(0.25, abs=0.05)
    # Another depth starts from all depths; another confidence is another matter.
    assert calibration(2, 0.85) == pytest.approx(0.25, abs=0.05)
    assert calibration(1, 0.35) == pytest.approx(0.35)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_choices_are_in_range_whatever_happens(data):
    form = data.draw(st.sampled_from(["conditional", "cumulative"]))
    adapter = Adapter(RUNGS, MOE, form=form)
    num, unread = data.draw(st.integers(1, 4)), []
    for i in range(num):
        adapter.join(i)
    rng = random.Random(data.draw(st.integers(0, 99)))
    for _ in range(30):
        active = sorted(rng.sample(range(num), rng.randint(1, num)))
        choice = adapter.choose(active, 4)
        assert 0 <= choice.rung < len(RUNGS)
        assert len(choice.max_nodes) == len(active)
        assert all(1 <= n <= RUNGS[choice.rung] for n in choice.max_nodes)
        assert (choice.rung == 0) == (max(choice.max_nodes) == 1)
        for gains in adapter._gains(list(adapter._requests.values())):
            assert gains == sorted(gains, reverse=True) and 0 < gains[-1] <= gains[0] < 1
        for i, n in zip(active, choice.max_nodes, strict=True):
            confidences = [rng.choice([0.0, rng.random(), 1.0]) for _ in range(n - 1)]
            unread.append((i, choice.rung, n, confidences, rng.randint(0, n - 1)))
        while len(unread) > 2 * num or (unread and rng.random() < 0.7):
            adapter.observe(*unread.pop(0))
