"""Accept length, accuracy, cycle time and speed, each from the others: pure functions.

Terms. Accept length: tokens emitted in one cycle, accepted drafts + 1. Full accuracy at step i: the
probability that drafts 0..i are all right. Conditional accuracy: that step i is right, given that
those before it were. A cycle is everything between two verify forwards, drafting included.

All of it is for chains; ``tree_shape.accept_length`` is a tree's. Where an argument may be an
array, so may the result; a list of rates is one rate for each draft step. Every function raises
``ValueError`` naming itself, the argument, what was expected and got.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from spec_kernels.planning.checks import count, fail, plain, rates, real

CONFIDENCE = 0.95
# Of a chain: a draft tree has at most 1024 nodes, the root among them.
MOST_DRAFTS = 1023
# Relative. What lies out of reach by less than this does so by the rounding of its inputs.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A value and its interval (95 % unless said otherwise).

    ``low == high == value`` where nothing is known of its spread.
    """

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Estimate:
        return cls(value, value, value)

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    def through(self, function) -> Estimate:
        """The estimate of a monotonic ``function`` of the value."""
        ends = sorted((float(function(self.low)), float(function(self.high))))
        return Estimate(float(function(self.value)), *ends)


# Speed.


def tok_s(accept_length, cycle_ms, batch: int = 1):
    """Tokens a second of all ``batch`` requests: batch x accept length / cycle time.

    Every request of a batch goes through the same cycle; ``cycle_ms`` is that batch's, in ms.
    """
    lengths = real("tok_s", "accept_length", accept_length, at_least=0)
    cycles = real("tok_s", "cycle_ms", cycle_ms, above=0)
    return plain(1000 * count("tok_s", "batch", batch) * lengths / cycles)


def required_accept_length(target_tok_s, cycle_ms, batch: int = 1):
    """Accept length for a target of all ``batch`` requests, tok/s, at ``cycle_ms``.

    target x cycle time / batch. May be below 1: then a cycle without an accepted draft is enough.
    """
    name = "required_accept_length"
    targets = real(name, "target_tok_s", target_tok_s, above=0)
    cycles = real(name, "cycle_ms", cycle_ms, above=0)
    # Products first: 100 tok/s at 30 ms is 3 exactly, just within reach of 2 drafts.
    return plain(targets * cycles / (1000 * count(name, "batch", batch)))


def break_even(plain_tok_s, cycle_ms, batch: int = 1):
    """Accept length at which speculation is as fast as plain decoding at ``plain_tok_s``."""
    name = "break_even"
    real(name, "plain_tok_s", plain_tok_s, above=0)
    real(name, "cycle_ms", cycle_ms, above=0)
    return required_accept_length(plain_tok_s, cycle_ms, count(name, "batch", batch))


def calibrated_cycle_ms(accept_length, measured_tok_s, batch: int = 1):
    """Whole cycle, ms, of a run that gave ``measured_tok_s`` at ``accept_length``."""
    name = "calibrated_cycle_ms"
    lengths = real(name, "accept_length", accept_length, at_least=1)
    speeds = real(name, "measured_tok_s", measured_tok_s, above=0)
    return plain(1000 * count(name, "batch", batch) * lengths / speeds)


def draft_overhead(cycle_ms, plain_tok_s, batch: int = 1):
    """What a cycle takes beyond a plain step, as a share of the plain step."""
    name = "draft_overhead"
    cycles = real(name, "cycle_ms", cycle_ms, above=0)
    speeds = real(name, "plain_tok_s", plain_tok_s, above=0)
    return plain(cycles * speeds / (1000 * count(name, "batch", batch)) - 1)


def overhead_cycle_ms(overhead, plain_tok_s, batch: int = 1):
    """Cycle, ms, of the naive model: a plain step and ``overhead`` (share of it) for drafting.

    The model has verifying several tokens cost what decoding one does.
    """
    name = "overhead_cycle_ms"
    shares = real(name, "overhead", overhead, at_least=0)
    speeds = real(name, "plain_tok_s", plain_tok_s, above=0)
    return plain(1000 * count(name, "batch", batch) * (1 + shares) / speeds)


def speedup(accept_length, overhead):
    """accept length / (1 + overhead), the naive model; see ``overhead_cycle_ms``."""
    lengths = real("speedup", "accept_length", accept_length, at_least=0)
    return plain(lengths / (1 + real("speedup", "overhead", overhead, at_least=0)))


# Accept length from accuracies, and back.


def unbounded_accept_length(accuracy):
    """1 / (1 - p), a chain that never ends; inf at p = 1.

    Sum of the geometric series; above what any real chain reaches (``chain_accept_length``).
    """
    p = real("unbounded_accept_length", "accuracy", accuracy, at_least=0, at_most=1)
    with np.errstate(divide="ignore"):
        return plain(np.float64(1) / (1 - p))


def chain_accept_length(accuracy, num_drafts: int):
    """(1 - p^(k+1)) / (1 - p) for k drafts of constant conditional accuracy p; at most k + 1."""
    name = "chain_accept_length"
    p = real(name, "accuracy", accuracy, at_least=0, at_most=1)
    total = np.ones_like(p)
    # By Horner's rule: the quotient is 0/0 at p = 1.
    for _ in range(count(name, "num_drafts", num_drafts, maximum=MOST_DRAFTS)):
        total = 1 + p * total
    return plain(total)


def unbounded_accuracy(accept_length):
    """Conditional accuracy of an endless chain with this accept length: 1 - 1 / accept length."""
    lengths = real("unbounded_accuracy", "accept_length", accept_length, at_least=1)
    return plain(1 - 1 / lengths)


def is_reachable(accept_length, num_drafts: int):
    """Whether k drafts can give this accept length at some accuracy: at most k + 1."""
    name = "is_reachable"
    lengths = real(name, "accept_length", accept_length, at_least=0)
    within = lengths <= (count(name, "num_drafts", num_drafts, maximum=MOST_DRAFTS) + 1) * (
        1 + _ROUNDING
    )
    return bool(within) if np.ndim(within) == 0 else within


def chain_accuracy(accept_length, num_drafts: int):
    """Constant conditional accuracy at which k drafts give ``accept_length`` >= 1.

    NaN where it is out of reach at any accuracy (``accept_length`` > k + 1). The accept length
    rises with slope >= 1 in p, so the root is one, and bisection has it to the last bits.
    """
    name = "chain_accuracy"
    lengths = real(name, "accept_length", accept_length, at_least=1)
    count(name, "num_drafts", num_drafts, maximum=MOST_DRAFTS)
    low, high = np.zeros_like(lengths), np.ones_like(lengths)
    for _ in range(60):
        middle = (low + high) / 2
        below = chain_accept_length(middle, num_drafts) < lengths
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    root = np.select([lengths == 1, lengths >= num_drafts + 1], [0.0, 1.0], high)
    return plain(np.where(is_reachable(lengths, num_drafts), root, np.nan))


def accept_length(full_accuracy: Sequence[float]) -> float:
    """1 + sum of the full accuracies: each draft counts as often as all up to it are right."""
    full = rates("accept_length", "full_accuracy", full_accuracy, falling=True)
    return 1 + math.fsum(full)


def full_from_conditional(conditional: Sequence[float]) -> np.ndarray:
    """Full accuracies ``[k]``: running products of the conditional ones."""
    return np.cumprod(rates("full_from_conditional", "conditional", conditional))


def conditional_from_full(full_accuracy: Sequence[float]) -> np.ndarray:
    """Conditional accuracies ``[k]``: ratios of neighbours; 0 after a full accuracy of 0."""
    full = rates("conditional_from_full", "full_accuracy", full_accuracy, falling=True)
    before = np.concatenate(([1.0], full[:-1]))
    return np.divide(full, before, out=np.zeros_like(full), where=before > 0)


def extend(full_accuracy: Sequence[float], num_drafts: int, tail: float) -> np.ndarray:
    """Full accuracies ``[num_drafts]``: those given, then each ``tail`` times the one before.

    A constant conditional accuracy beyond the last measured step is an assumption. Fewer drafts
    than given cut the list.
    """
    full = rates("extend", "full_accuracy", full_accuracy, falling=True)
    ratio = float(real("extend", "tail", tail, at_least=0, at_most=1))
    beyond = count("extend", "num_drafts", num_drafts, maximum=MOST_DRAFTS) - len(full)
    if beyond <= 0:
        return full[:num_drafts]
    return np.concatenate((full, full[-1] * ratio ** np.arange(1, beyond + 1)))


def tail_for(full_accuracy: Sequence[float], num_drafts: int, wanted: float) -> float:
    """The ``tail`` of ``extend`` with which ``num_drafts`` drafts give accept length ``wanted``.

    NaN where no tail in [0, 1] does.
    """
    name = "tail_for"
    full = rates(name, "full_accuracy", full_accuracy, falling=True)
    beyond = count(name, "num_drafts", num_drafts, len(full) + 1, MOST_DRAFTS) - len(full)
    rest = float(real(name, "wanted", wanted, at_least=1)) - accept_length(full)
    most = beyond * full[-1]
    if full[-1] == 0 or not -_ROUNDING * wanted <= rest <= most + _ROUNDING * wanted:
        return math.nan
    rest = min(max(0.0, rest), most)
    # sum of tail^1..tail^n = chain accept length - 1.
    return chain_accuracy(1 + rest / full[-1], beyond)


# How much a small change is worth.


def per_point(conditional: Sequence[float], cycle_ms: float, batch: int = 1) -> float:
    """d tok/s for each percentage point more of conditional accuracy, at every step alike.

    From F_i = F_(i-1) c_i: dF_i = dF_(i-1) c_i + F_(i-1). Analytic, so right at c = 0 too.
    """
    steps = rates("per_point", "conditional", conditional)
    full, slope, total = 1.0, 0.0, 0.0
    for c in steps:
        slope = slope * c + full
        full *= c
        total += slope
    return tok_s(0.01 * total, cycle_ms, batch)


def per_ms(accept_length, cycle_ms, batch: int = 1):
    """d tok/s for each ms that the cycle gets longer (negative): -tok/s / cycle time."""
    speed = tok_s(accept_length, cycle_ms, batch)
    return plain(-np.asarray(speed) / real("per_ms", "cycle_ms", cycle_ms, above=0))


# Intervals, where counts are known.


def _z(function: str, confidence: float) -> float:
    share = float(real(function, "confidence", confidence, above=0))
    if share >= 1:
        raise fail(function, "confidence", "a number below 1", confidence)
    return NormalDist().inv_cdf((1 + share) / 2)


def wilson(num_right: int, num_tried: int, confidence: float = CONFIDENCE) -> Estimate:
    """A rate and its interval by Wilson's score (1927); [0, 1] where nothing was tried is refused.

    Within [0, 1], and of sensible width also where none or all were right.
    """
    tried = count("wilson", "num_tried", num_tried)
    right = count("wilson", "num_right", num_right, minimum=0)
    if right > tried:
        raise fail("wilson", "num_right", f"at most num_tried = {tried}", num_right)
    z, rate = _z("wilson", confidence), right / tried
    centre = (rate + z * z / (2 * tried)) / (1 + z * z / tried)
    half = z / (1 + z * z / tried) * math.sqrt(rate * (1 - rate) / tried + (z / (2 * tried)) ** 2)
    return Estimate(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def accept_length_estimate(
    full_accuracy: Sequence[float], num_cycles: int, confidence: float = CONFIDENCE
) -> Estimate:
    """Accept length and its interval, from full accuracies counted over ``num_cycles`` cycles.

    The variance of accepted drafts A follows from the full accuracies (E A = sum F_i, E A^2 =
    sum (2i - 1) F_i, i from 1). z^2 cycles are added, half of them with no draft right and half
    with all: for one draft that is the interval of Agresti and Coull (1998), and like theirs it
    has a width also where all cycles went alike. Cycles count as independent; those of one text
    are not quite, so real intervals are wider.
    """
    name = "accept_length_estimate"
    full = rates(name, "full_accuracy", full_accuracy, falling=True)
    cycles, z = count(name, "num_cycles", num_cycles), _z(name, confidence)
    steps, total = len(full), cycles + z * z
    mean = (cycles * full.sum() + z * z / 2 * steps) / total
    square = (
        cycles * ((2 * np.arange(1, steps + 1) - 1) * full).sum() + z * z / 2 * steps**2
    ) / total
    half = z * math.sqrt(max(0.0, square - mean * mean) / total)
    value = accept_length(full)
    return Estimate(
        value,
        max(1.0, min(value, float(1 + mean - half))),
        min(1.0 + steps, max(value, float(1 + mean + half))),
    )
