"""The adaptive rule, on requests that are simulated: seeded, no model and no clock."""

import json
import random

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

    ``stated`` makes of a draft's probability what the drafter says of it.
    """

    def __init__(self, rates, seed, stated=lambda p: p):
        self.rates, self.rng, self.stated = rates, random.Random(seed), stated

    def draft(self, position, num_drafts):
        rates = self.rates(position) if callable(self.rates) else self.rates
        probs = []
        for rate in rates[:num_drafts]:
            spread = min(0.25, rate, 1 - rate)
            probs.append(rate + self.rng.uniform(-spread, spread))
        right = [self.rng.random() < p for p in probs]
        return [self.stated(p) for p in probs], right


class Result:
    def __init__(self, num_requests):
        self.ms, self.tokens, self.choices = 0.0, [0] * num_requests, []

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
        result.ms += costs.cycle(num, rungs[choice.rung], sum(choice.max_nodes) - num)
        seen = []
        for i, request in enumerate(requests):
            confidences, right = request.draft(result.tokens[i], rungs[choice.rung] - 1)
            accepted = (right[: choice.max_nodes[i] - 1] + [False]).index(False)
            result.tokens[i] += accepted + 1
            seen.append((i, choice.rung, choice.max_nodes[i], confidences, accepted))
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


def test_a_table_from_another_rank_is_the_same_to_the_bit():
    there = CostTable.from_dict(json.loads(json.dumps(MOE.as_dict())))
    for bucket in range(1, 9):
        for nodes in range(1, 9):
            assert there.copies(bucket, nodes) == MOE.copies(bucket, nodes)
        assert there.added(bucket).tolist() == MOE.added(bucket).tolist()


@pytest.mark.parametrize(
    "full, evicted, message",
    [
        ({}, None, "full: expected costs"),
        ({(1, 2): 1.0}, None, "of 1 and more nodes, got"),
        ({(1, 1): 1.0, (2, 1): 1.0, (2, 3): 1.0}, None, r"surplus at \(1, 3\)"),
        ({(1, 1): 1.0}, {}, "evicted: expected a cost for each"),
        ({(1, 1): 0.0}, None, "positive milliseconds"),
        ({(1, 1): float("nan")}, None, "positive milliseconds"),
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
        for i, n in zip(active, choice.max_nodes, strict=True):
            confidences = [rng.choice([0.0, rng.random(), 1.0]) for _ in range(n - 1)]
            unread.append((i, choice.rung, n, confidences, rng.randint(0, n - 1)))
        while len(unread) > 2 * num or (unread and rng.random() < 0.7):
            adapter.observe(*unread.pop(0))
