"""What planning's functions say of a bad argument: function, argument, expected, got."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence

import numpy as np

# Of times, speeds and rates; so that no product or quotient of two of them overflows.
MOST, LEAST = 1e100, 1e-100
MOST_COUNTED = 1 << 53


def fail(function: str, argument: str, expected: str, got: object) -> ValueError:
    """The error to raise; a long value is shortened."""
    text = repr(got)
    return ValueError(
        f"{function}: {argument}: expected {expected}, got "
        + (text if len(text) <= 80 else text[:77] + "...")
    )


def is_number(value: object) -> bool:
    """Whether it is a number that can be reckoned with; not NaN, beyond ``MOST``, or a bool."""
    return type(value) in (int, float) and abs(value) <= MOST


def parse_json(where: str, text: str) -> object:
    """The value of a JSON text, or a ValueError beginning with ``where``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON, got: {error}") from error


def real(
    function: str,
    argument: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> np.ndarray:
    """``value`` (a number or an array of them) as float64; finite and within the bounds.

    No further from zero than ``MOST``, and where it must be above zero, no nearer than ``LEAST``.
    """
    expected = "finite numbers" if np.ndim(value) else "a finite number"
    bounds = [(f"> {above:g}", np.greater, above)] if above is not None else []
    bounds += [(f">= {at_least:g}", np.greater_equal, at_least)] if at_least is not None else []
    bounds += [(f"<= {at_most:g}", np.less_equal, at_most)] if at_most is not None else []
    expected = " ".join([expected, " and ".join(text for text, _, _ in bounds)]).rstrip()
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise fail(function, argument, expected, value)
    array = array.astype(np.float64)
    if not np.isfinite(array).all() or not all(
        compare(array, bound).all() for _, compare, bound in bounds
    ):
        raise fail(function, argument, expected, value)
    if (abs(array) > MOST).any() or above == 0 and (array < LEAST).any():
        raise fail(function, argument, f"{expected}, of {LEAST:g} to {MOST:g}", value)
    return array


def count(
    function: str, argument: str, value: object, minimum: int = 1, maximum: int = MOST_COUNTED
) -> int:
    """``value`` as an integer from ``minimum`` to ``maximum``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum or isinstance(value, bool):
        raise fail(function, argument, f"an integer >= {minimum}", value)
    if number > maximum:
        raise fail(function, argument, f"an integer <= {maximum}", value)
    return number


def rates(function: str, argument: str, values: object, *, falling: bool = False) -> np.ndarray:
    """Rates by draft step, ``[k]`` float64 with k >= 1, each in [0, 1].

    ``falling``: none may be above the one before, as full accuracies cannot.
    """
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str) or not len(values):
        raise fail(function, argument, "rates by draft step, at least one", values)
    array = real(function, argument, values, at_least=0, at_most=1)
    if array.ndim != 1:
        raise fail(function, argument, "rates by draft step, one dimension", values)
    if falling and (np.diff(array) > 0).any():
        step = int(np.argmax(np.diff(array) > 0)) + 1
        raise fail(
            function,
            argument,
            "full accuracies, none above the one before",
            f"{array[step]:g} after {array[step - 1]:g} at step {step}",
        )
    return array


def plain(array: np.ndarray) -> float | np.ndarray:
    """A float where the caller gave numbers, an array where it gave arrays."""
    return float(array) if np.ndim(array) == 0 else array
