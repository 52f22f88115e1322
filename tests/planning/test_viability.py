"""Formulas against enumeration, simulation and their inverses; published figures to the digit."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels.planning import published_case, viability
from spec_kernels.planning.viability import Estimate

FULL = published_case.FULL_ACCURACY
rates = st.floats(0, 1)
steps = st.integers(1, 12)
relaxed = settings(max_examples=100, deadline=None)


def enumerated(conditional):
    """Accept length of a chain by its definition: every pattern of right and wrong drafts."""
    total = 0.0
    for pattern in itertools.product((True, False), repeat=len(conditional)):
        chance = math.prod(
            c if right else 1 - c for c, right in zip(conditional, pattern, strict=True)
        )
        total += chance * (1 + sum(itertools.accumulate(pattern, lambda a, b: a and b)))
    return total


# Published figures.


@pytest.mark.parametrize("target, cycle, length, unbounded", published_case.TARGETS)
def test_published_targets(target, cycle, length, unbounded):
    needed = viability.required_accept_length(target, cycle)
    assert f"{needed:.{len(length.split('.')[1])}f}" == length
    assert f"{viability.unbounded_accuracy(needed):.2f}" == unbounded


@pytest.mark.parametrize(
    "target, cycle, bounded",
    [(82, 30, 0.81), (100, 30, 1.0), (120, 30, None), (150, 30, None), (200, 30, None),
     (150, 15, 0.72), (200, 15, 1.0)],
)  # fmt: skip
def test_two_drafts_beside_the_published_targets(target, cycle, bounded):
    needed = viability.required_accept_length(target, cycle)
    accuracy = viability.chain_accuracy(needed, 2)
    assert viability.is_reachable(needed, 2) is (bounded is not None)
    assert math.isnan(accuracy) if bounded is None else f"{accuracy:.2f}" == f"{bounded:.2f}"


def test_published_figures_that_follow_do_so_to_their_digits():
    by_name = {f.what: f for f in published_case.figures()}
    shown = {name: (f.published, f.shown) for name, f in by_name.items() if f.follows}
    assert shown == {
        "accept length of the 5 drafts of 100K samples": ("2.75", "2.75"),
        "speedup by the naive model, overhead 0.15": ("2.39", "2.39"),
        "tok/s by it, from 90": ("215", "215"),
        "tok/s calibrated by the break-even point": ("110-120", "112"),
        "conditional accuracy, %, at accept length 3.2-3.5": ("69-71", "69-71"),
        "accept length at conditional accuracy 0.64": ("2.05", "2.05"),
        "conditional accuracy at accept length 2.0": ("0.50", "0.50"),
        "break-even accept length at 30 ms": ("2.46", "2.46"),
    }
    beside = {name: f.bounded for name, f in by_name.items() if f.bounded}
    assert beside["accept length of the 5 drafts of 100K samples"] == "2 drafts: 2.21"
    assert beside["accept length at conditional accuracy 0.64"] == "1/(1-p) would say 2.78"


def test_published_figures_that_do_not_follow_are_told_apart():
    """Each is reproduced by what it takes, which is not what was published beside it."""
    odd = {f.what: f.shown for f in published_case.figures() if not f.follows}
    assert odd == {
        "tok/s at accept length 3.0-3.5, all epochs": "123-143",
        "accept length at 10 drafts, tail 0.50-0.55": "2.8-2.9",
        "accept length at 16 drafts, tail 0.50-0.55": "2.8-2.9",
        "tok/s with 2 drafts, accept length 2.0": "67",
    }
    assert f"{viability.tok_s(3.0, 23.1):.0f}-{viability.tok_s(3.5, 21.9):.0f}" == "130-160"
    for num_drafts, wanted in ((10, 3.1), (16, 3.3)):
        tail = viability.tail_for(FULL, num_drafts, wanted)
        assert 0.88 < tail < 0.90
        assert viability.accept_length(viability.extend(FULL, num_drafts, tail)) == pytest.approx(
            wanted
        )
    assert 59 <= viability.tok_s(2.0, 33.3) <= 61


def test_published_rows_of_today_agree_with_themselves():
    """Accept length = 1 + k x acceptance per draft, cycle = accept length / tok/s."""
    for tok_s, share, length, cycle in (
        (122.0, 0.494, 2.48, 20.3), (103.8, 0.347, 2.04, 19.7), (58.3, 0.333, 2.00, 34.3),
        (125.0, 0.316, 1.95, 15.6), (81.0, 0.435, 2.31, 28.5), (55.1, 0.309, 1.93, 35.0),
    ):  # fmt: skip
        assert 1 + 3 * share == pytest.approx(length, abs=0.006)
        assert viability.calibrated_cycle_ms(length, tok_s) == pytest.approx(cycle, abs=0.06)


# Accept length from accuracies.


@pytest.mark.parametrize(
    "conditional",
    [[0.5], [0.0, 0.9], [1.0, 1.0, 1.0], [0.742, 0.633, 0.617], [0.3, 0.0, 0.8, 0.1], [1, 0, 1]],
)
def test_accept_length_by_enumeration(conditional):
    full = viability.full_from_conditional(conditional)
    assert viability.accept_length(full) == pytest.approx(enumerated(conditional), abs=1e-12)


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 7])
@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.64, 0.97, 1.0])
def test_bounded_chain_by_enumeration(accuracy, num_drafts):
    bounded = viability.chain_accept_length(accuracy, num_drafts)
    assert bounded == pytest.approx(enumerated([accuracy] * num_drafts), abs=1e-12)
    assert bounded <= num_drafts + 1
    assert bounded <= viability.unbounded_accept_length(accuracy)
    if accuracy < 1:
        closed = (1 - accuracy ** (num_drafts + 1)) / (1 - accuracy)
        assert bounded == pytest.approx(closed, rel=1e-12)


def test_bounded_chain_by_simulation():
    random = np.random.default_rng(0)
    right = random.random((200_000, 4)) < 0.64
    lengths = 1 + right.cumprod(1).sum(1)
    error = lengths.std() / math.sqrt(len(lengths))
    assert abs(lengths.mean() - viability.chain_accept_length(0.64, 4)) < 4 * error
    assert abs(lengths.mean() - viability.unbounded_accept_length(0.64)) > 20 * error


def test_long_chains_approach_the_unbounded_one():
    assert viability.chain_accept_length(0.6, 200) == pytest.approx(
        viability.unbounded_accept_length(0.6), rel=1e-12
    )
    assert viability.unbounded_accept_length(1.0) == math.inf


def test_arrays_are_taken_element_by_element():
    p = np.array([[0.0, 0.5], [0.9, 1.0]])
    assert viability.chain_accept_length(p, 2).tolist() == [
        [viability.chain_accept_length(x, 2) for x in row] for row in p
    ]
    lengths = np.array([1.0, 2.05, 3.0, 3.01])
    assert viability.is_reachable(lengths, 2).tolist() == [True, True, True, False]
    assert np.isnan(viability.chain_accuracy(lengths, 2)).tolist() == [False, False, False, True]
    grid = viability.tok_s(lengths[:, None], np.array([15.0, 30.0]))
    assert grid.shape == (4, 2) and grid[0, 1] == viability.tok_s(1.0, 30.0)


# Inverses.


@relaxed
@given(rates, steps)
def test_accuracy_round_trip(accuracy, num_drafts):
    length = viability.chain_accept_length(accuracy, num_drafts)
    assert viability.chain_accuracy(length, num_drafts) == pytest.approx(accuracy, abs=1e-12)


@relaxed
@given(st.floats(0, 1), steps)
def test_length_round_trip(share, num_drafts):
    length = 1 + share * num_drafts
    accuracy = viability.chain_accuracy(length, num_drafts)
    assert 0 <= accuracy <= 1
    assert viability.chain_accept_length(accuracy, num_drafts) == pytest.approx(length, rel=1e-12)


@relaxed
@given(st.floats(0, 0.999))
def test_unbounded_round_trip(accuracy):
    length = viability.unbounded_accept_length(accuracy)
    assert viability.unbounded_accuracy(length) == pytest.approx(accuracy, abs=1e-12)


@relaxed
@given(st.lists(rates, min_size=1, max_size=8))
def test_full_and_conditional_round_trip(conditional):
    full = viability.full_from_conditional(conditional)
    again = viability.conditional_from_full(full)
    assert viability.full_from_conditional(again) == pytest.approx(full, abs=1e-12)
    zero = list(full).index(0) if 0 in full else len(full)
    if full[:zero].min(initial=1) > 1e-200:
        assert again[:zero] == pytest.approx(conditional[:zero], abs=1e-9)
    # After a certain failure nothing can be said of the later steps: 0, as training logs have it.
    assert not again[zero + 1 :].any()


@relaxed
@given(st.floats(0.1, 1e4), st.floats(0.1, 1e3), st.integers(1, 64))
def test_speed_round_trips(target, cycle, batch):
    needed = viability.required_accept_length(target, cycle, batch)
    assert viability.tok_s(needed, cycle, batch) == pytest.approx(target)
    assert viability.break_even(target, cycle, batch) == needed
    if needed >= 1:
        assert viability.calibrated_cycle_ms(needed, target, batch) == pytest.approx(cycle)
    overhead = viability.draft_overhead(cycle, target, batch)
    if overhead >= 0:
        assert viability.overhead_cycle_ms(overhead, target, batch) == pytest.approx(cycle)


@relaxed
@given(st.floats(1, 8), st.floats(0, 3), st.floats(1, 500))
def test_the_naive_model_is_a_cycle_time(length, overhead, plain):
    cycle = viability.overhead_cycle_ms(overhead, plain)
    by_cycle = viability.tok_s(length, cycle)
    assert by_cycle / plain == pytest.approx(viability.speedup(length, overhead))


@relaxed
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(1, 8), st.floats(0, 1))
def test_extension_and_its_inverse(conditional, more, tail):
    full = viability.full_from_conditional(conditional)
    longer = viability.extend(full, len(full) + more, tail)
    assert longer[: len(full)].tolist() == full.tolist()
    assert viability.full_from_conditional([*conditional, *[tail] * more]) == pytest.approx(longer)
    assert viability.extend(longer, len(full), 0.5).tolist() == full.tolist()
    wanted = viability.accept_length(longer)
    found = viability.tail_for(full, len(full) + more, wanted)
    # Near p = 0 rounding of the sum hides the tail.
    assert found == pytest.approx(tail, abs=1e-12 / full[-1])


def test_no_tail_reaches_too_far_or_back():
    assert math.isnan(viability.tail_for([0.5], 3, 2.6))
    assert math.isnan(viability.tail_for([0.5], 3, 1.4))
    assert math.isnan(viability.tail_for([0.5, 0.0], 3, 1.5))
    assert viability.tail_for([0.5], 3, 2.5) == 1.0
    assert viability.tail_for([0.5], 3, 1.5) == 0.0


# Sensitivities.


@relaxed
@given(
    st.lists(st.floats(0.001, 0.999), min_size=1, max_size=6), st.floats(1, 100), st.integers(1, 8)
)
def test_sensitivities_against_differences(conditional, cycle, batch):
    def speed(shift=0.0, ms=0.0):
        full = viability.full_from_conditional(np.array(conditional) + shift)
        return viability.tok_s(viability.accept_length(full), cycle + ms, batch)

    h = 1e-5
    numeric = 0.01 * (speed(shift=h) - speed(shift=-h)) / (2 * h)
    assert viability.per_point(conditional, cycle, batch) == pytest.approx(numeric, rel=1e-5)
    h = 1e-4 * cycle
    numeric = (speed(ms=h) - speed(ms=-h)) / (2 * h)
    length = viability.accept_length(viability.full_from_conditional(conditional))
    assert viability.per_ms(length, cycle, batch) == pytest.approx(numeric, rel=1e-5)


def test_sensitivity_at_zero_accuracy():
    # F1 = c, F2 = c * d: at c = 0.5, d = 0, one point of both is 0.01 + 0.005 tokens.
    assert viability.per_point([0.5, 0.0], 1000.0) == pytest.approx(0.015)
    assert viability.per_point([0.0, 0.0], 1000.0) == pytest.approx(0.01)


# Intervals.


@pytest.mark.parametrize(
    "right, tried, low, high",
    [(5, 10, 0.2366, 0.7634), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (1, 1, 0.2065, 1.0)],
)
def test_wilson(right, tried, low, high):
    """Against the tabulated 95 % values."""
    estimate = viability.wilson(right, tried)
    assert estimate.value == right / tried
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("full", [(0.74, 0.56, 0.44), (0.3, 0.05), (0.98, 0.97, 0.96), (0.5,)])
@pytest.mark.parametrize("num_cycles", [25, 400])
def test_accept_length_interval_covers(full, num_cycles):
    """95 % of simulated runs, give or take what 4000 of them leave open."""
    random = np.random.default_rng(1)
    truth, covered, runs = viability.accept_length(full), 0, 4000
    conditional = viability.conditional_from_full(full)
    right = (random.random((runs, num_cycles, len(full))) < conditional).cumprod(2)
    for counted in right.mean(1):
        estimate = viability.accept_length_estimate(counted, num_cycles)
        covered += estimate.low <= truth <= estimate.high
        assert 1 <= estimate.low <= estimate.value <= estimate.high <= len(full) + 1
    assert 0.93 < covered / runs < 0.995


@pytest.mark.parametrize("full", [(1.0, 1.0), (0.0, 0.0)])
def test_interval_has_a_width_where_all_cycles_were_alike(full):
    estimate = viability.accept_length_estimate(full, 20)
    assert estimate.low < estimate.high
    narrower = viability.accept_length_estimate(full, 2000)
    assert narrower.high - narrower.low < estimate.high - estimate.low


def test_intervals_follow_monotonic_functions():
    estimate = Estimate(2.0, 1.5, 3.0)
    assert estimate.through(lambda x: viability.tok_s(x, 10)) == Estimate(200.0, 150.0, 300.0)
    assert estimate.through(lambda x: -x) == Estimate(-2.0, -3.0, -1.5)
    assert Estimate.exact(2.0).is_exact and not estimate.is_exact


# Bad input.

NAN = math.nan


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: viability.tok_s(2, 0), "tok_s: cycle_ms: expected a finite number > 0, got 0"),
        (lambda: viability.tok_s(2, -3), "tok_s: cycle_ms: expected a finite number > 0, got -3"),
        (lambda: viability.tok_s(2, NAN), "tok_s: cycle_ms: expected a finite number > 0, got nan"),
        (lambda: viability.tok_s(2, math.inf), "tok_s: cycle_ms"),
        (lambda: viability.tok_s(2, True), "tok_s: cycle_ms"),
        (lambda: viability.tok_s("2", 30), "tok_s: accept_length: expected a finite number"),
        (lambda: viability.tok_s(2, 30, 0), "tok_s: batch: expected an integer >= 1, got 0"),
        (lambda: viability.tok_s(2, 30, 1.5), "tok_s: batch: expected an integer >= 1, got 1.5"),
        (lambda: viability.tok_s([2, NAN], 30), "accept_length: expected finite numbers >= 0"),
        (lambda: viability.required_accept_length(0, 30), "required_accept_length: target_tok_s"),
        (lambda: viability.required_accept_length(100, NAN), "required_accept_length: cycle_ms"),
        (lambda: viability.break_even(-1, 30), "break_even: plain_tok_s: expected a finite number"),
        (lambda: viability.calibrated_cycle_ms(0.5, 80), "calibrated_cycle_ms: accept_length"),
        (lambda: viability.calibrated_cycle_ms(2, 0), "calibrated_cycle_ms: measured_tok_s"),
        (lambda: viability.speedup(2, -0.1), "speedup: overhead: expected a finite number >= 0"),
        (lambda: viability.unbounded_accept_length(1.1), "unbounded_accept_length: accuracy"),
        (lambda: viability.unbounded_accuracy(0.9), "unbounded_accuracy: accept_length"),
        (
            lambda: viability.chain_accept_length(-0.1, 2),
            "chain_accept_length: accuracy: expected a finite number >= 0 and <= 1, got -0.1",
        ),
        (lambda: viability.chain_accept_length(0.5, 0), "num_drafts: expected an integer >= 1"),
        (lambda: viability.chain_accept_length(0.5, True), "num_drafts: expected an integer >= 1"),
        (lambda: viability.chain_accept_length(0.5, 1024), "expected an integer <= 1023, got 1024"),
        (lambda: viability.chain_accuracy(0.5, 2), "chain_accuracy: accept_length"),
        (lambda: viability.chain_accuracy(2, -1), "chain_accuracy: num_drafts"),
        (lambda: viability.is_reachable(-1, 2), "is_reachable: accept_length"),
        (lambda: viability.accept_length([]), "expected rates by draft step, at least one, got []"),
        (lambda: viability.accept_length([1.2]), "accept_length: full_accuracy: expected finite"),
        (
            lambda: viability.accept_length([0.5, 0.6]),
            "full accuracies, none above the one before, got '0.6 after 0.5 at step 1'",
        ),
        (lambda: viability.accept_length([0.5, NAN]), "accept_length: full_accuracy"),
        (lambda: viability.accept_length(0.5), "accept_length: full_accuracy"),
        (lambda: viability.accept_length("0.5"), "accept_length: full_accuracy"),
        (lambda: viability.accept_length([[0.5]]), "one dimension"),
        (lambda: viability.full_from_conditional([-0.1]), "full_from_conditional: conditional"),
        (lambda: viability.conditional_from_full([0.1, 0.2]), "conditional_from_full"),
        (lambda: viability.extend([0.5], 3, 1.5), "extend: tail"),
        (lambda: viability.extend([0.5], 0, 0.5), "extend: num_drafts"),
        (lambda: viability.tail_for([0.5], 1, 2), "tail_for: num_drafts: expected an integer >= 2"),
        (lambda: viability.tail_for([0.5], 3, 0.5), "tail_for: wanted"),
        (lambda: viability.per_point([2.0], 30), "per_point: conditional"),
        (lambda: viability.per_point([0.5], 0), "cycle_ms"),
        (lambda: viability.per_ms(2, 0), "cycle_ms"),
        (lambda: viability.wilson(3, 2), "wilson: num_right: expected at most num_tried = 2"),
        (lambda: viability.wilson(0, 0), "wilson: num_tried: expected an integer >= 1, got 0"),
        (lambda: viability.wilson(1, 2, 1.0), "wilson: confidence: expected a number below 1"),
        (lambda: viability.accept_length_estimate([0.5], 0), "num_cycles: expected an integer"),
        (lambda: viability.accept_length_estimate([0.2, 0.5], 9), "none above the one before"),
    ],
)  # fmt: skip
def test_bad_input_names_function_argument_expected_and_got(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)
    assert str(error.value).count(": expected ") == 1 and ", got " in str(error.value)
