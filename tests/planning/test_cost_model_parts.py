"""Parts of a cycle: their checks, sums and intervals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_kernels.planning.parts import CycleCost, CyclePart, Quantity, combine

ends = st.tuples(*[st.floats(0, 100)] * 3).map(sorted)


def part(name, ms, low, high):
    return CyclePart(name, ms, low, high, "assumed", "a test")


@given(st.lists(ends, min_size=1, max_size=8))
def test_total_and_intervals_are_sums_of_the_parts(values):
    cost = CycleCost([part(str(i), v, lo, hi) for i, (lo, v, hi) in enumerate(values)])
    assert cost.total == pytest.approx(sum(v for _, v, _ in values))
    low, high = cost.interval()
    assert (low, high) == pytest.approx((sum(v[0] for v in values), sum(v[2] for v in values)))
    inner, outer = cost.spread()
    slack = 1e-9 * (1 + high)
    assert low - slack <= inner <= cost.total <= outer <= high + slack


def test_independent_errors_add_as_squares():
    cost = CycleCost([part("a", 10, 7, 13), part("b", 5, 1, 9)])
    assert cost.interval() == (8, 22)
    assert cost.spread() == pytest.approx((15 - 5, 15 + 5))


def test_the_table_shows_every_part_and_the_total():
    cost = CycleCost([part("weights", 6.25, 5, 7), part("host", 0.5, 0, 1)], "a cycle")
    lines = cost.table()
    assert lines[0] == "a cycle"
    assert any(
        line.startswith("weights") and "6.25" in line and "assumed" in line for line in lines
    )
    assert "6.75" in lines[-1] and "5.00 - 8.00" in lines[-1]
    data = cost.as_dict()
    assert data["total_ms"] == cost.total
    assert math.fsum(p["ms"] for p in data["parts"]) == cost.total


def test_a_part_is_found_by_name():
    cost = CycleCost([part("a", 1, 1, 1), part("b", 2, 2, 2)])
    assert cost.part("b").ms == 2
    with pytest.raises(ValueError, match="expected one of a, b, got 'c'"):
        cost.part("c")


@pytest.mark.parametrize(
    "fields, message",
    [
        ((2, 3, 4, "assumed", "x"), "ascending"),
        ((-1, -1, 0, "assumed", "x"), "low, value|finite number >= 0"),
        ((math.nan, 0, 1, "assumed", "x"), "finite"),
        ((1, 0, math.inf, "assumed", "x"), "finite"),
        ((True, 0, 1, "assumed", "x"), "expected a number, got True"),
        ((1, 0, 2, "guessed", "x"), "one of measured, modelled, fitted, assumed"),
        ((1, 0, 2, "assumed", " "), "source"),
    ],
)
def test_bad_numbers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Quantity(*fields)
    with pytest.raises(ValueError, match=message):
        CyclePart("p", *fields)


def test_a_cycle_needs_parts_with_different_names():
    for parts in ([], [part("a", 1, 1, 1)] * 2):
        with pytest.raises(ValueError, match="no name twice"):
            CycleCost(parts)


def test_quantities_scale_and_add():
    q = Quantity(2, 1, 4, "measured", "x")
    assert q.times(3) == Quantity(6, 3, 12, "measured", "x")
    assert combine([q, q], "modelled", "y") == Quantity(4, 2, 8, "modelled", "y")
    assert Quantity.exactly(5, "measured", "x") == Quantity(5, 5, 5, "measured", "x")
