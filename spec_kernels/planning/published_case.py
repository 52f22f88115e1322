"""The published case, figure by figure, beside what the formulas say of it.

Kimi-K2.5 with EAGLE-3 drafters on eight PCIe GPUs at batch 1; the figures are those of its authors.
Where a figure does not follow from the others, the table says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spec_kernels.planning import published, viability
from spec_kernels.planning.answer import Answer, Cycle, make_answer
from spec_kernels.planning.inputs import by_hand

# Accuracies of the drafter of 100K samples at the end of epoch 1 of 5, by draft step.
FULL_ACCURACY = (0.742, 0.47, 0.29, 0.15, 0.097)
PLAIN_TOK_S = 82.0
TUNED_PLAIN_TOK_S = 90.0
VERIFY_MS = 30.0
DRAFT_STEPS = 2
# tok/s and cycle, ms; published accept length and 1/(1-p) accuracy.
TARGETS = (
    (82.0, 30.0, "2.46", "0.59"),
    (100.0, 30.0, "3.0", "0.67"),
    (120.0, 30.0, "3.6", "0.72"),
    (150.0, 30.0, "4.5", "0.78"),
    (200.0, 30.0, "6.0", "0.83"),
    (150.0, 15.0, "2.25", "0.56"),
)


@dataclass(frozen=True)
class Figure:
    """A published figure (a range where ``low < high``) and what it follows from.

    Attributes:
        what: of the figure.
        low, high: as published.
        decimals: that it was printed with.
        computed: (low, high) of what the formula gives.
        how: the formula and its inputs.
        bounded: what the same is for a chain of 2 drafts, in words; empty where nothing differs.
    """

    what: str
    low: float
    high: float
    decimals: int
    computed: tuple[float, float]
    how: str
    bounded: str = ""

    @property
    def follows(self) -> bool:
        """Whether what is computed, to the printed digits, lies in the published range."""
        return all(self.low <= round(x, self.decimals) <= self.high for x in self.computed)

    @property
    def published(self) -> str:
        ends = sorted({f"{x:.{self.decimals}f}" for x in (self.low, self.high)}, key=float)
        return "-".join(ends)

    @property
    def shown(self) -> str:
        ends = sorted({f"{x:.{self.decimals}f}" for x in self.computed}, key=float)
        return "-".join(ends)


def case() -> Answer:
    """The published question: targets with 2 drafts at 30 ms, at half of it, and as predicted.

    Its ``costs`` are the 30 ms in parts; the predicted cycle is the cost model's for this package.
    """
    predicted = published.predicted_cycle(draft_steps=DRAFT_STEPS)
    answer = make_answer(
        sorted({target for target, *_ in TARGETS} - {PLAIN_TOK_S}),
        [
            Cycle(VERIFY_MS, "published, without graphs"),
            Cycle(VERIFY_MS / 2, "half of it"),
            Cycle(predicted.total, predicted.title, *predicted.interval()),
        ],
        DRAFT_STEPS,
        plain_tok_s=PLAIN_TOK_S,
        acceptance=by_hand(FULL_ACCURACY, "published: drafter of 100K samples, epoch 1 of 5"),
    )
    thirty_ms = published.modelled(published.point(published.CASE))
    return replace(answer, costs=thirty_ms, is_published=True)


def _point(what: str, value: float, decimals: int, computed: float, how: str, bounded: str = ""):
    return Figure(what, value, value, decimals, (computed, computed), how, bounded)


def figures() -> list[Figure]:
    """Every figure of the case that can be computed from others, the targets' table apart."""
    length = viability.accept_length(FULL_ACCURACY)
    two = viability.accept_length(FULL_ACCURACY[:2])
    by_break_even = viability.calibrated_cycle_ms(2.2, TUNED_PLAIN_TOK_S)
    by_run = viability.calibrated_cycle_ms(2.1, 82.3)
    limit = viability.accept_length(viability.extend(FULL_ACCURACY, 1000, 0.55))

    def deep(num_drafts: int) -> tuple[float, ...]:
        longer = (viability.extend(FULL_ACCURACY, num_drafts, c) for c in (0.5, 0.55))
        return tuple(map(viability.accept_length, longer))

    def tail(num_drafts: int, wanted: float) -> str:
        return f"{viability.tail_for(FULL_ACCURACY, num_drafts, wanted):.2f}"

    def speeds(low: float, high: float) -> tuple[float, float]:
        return viability.tok_s(low, by_break_even), viability.tok_s(high, by_break_even)

    return [
        _point(
            "accept length of the 5 drafts of 100K samples", 2.75, 2, length,
            "1 + sum of the full accuracies", f"2 drafts: {two:.2f}",
        ),
        _point(
            "speedup by the naive model, overhead 0.15", 2.39, 2, viability.speedup(length, 0.15),
            "2.75 / 1.15", f"2 drafts: {viability.speedup(two, 0.15):.2f}",
        ),
        _point(
            "tok/s by it, from 90", 215, 0, TUNED_PLAIN_TOK_S * viability.speedup(length, 0.15),
            "90 x 2.75 / 1.15", f"2 drafts: {TUNED_PLAIN_TOK_S * viability.speedup(two, 0.15):.0f}",
        ),
        Figure(
            "tok/s calibrated by the break-even point", 110, 120, 0, speeds(length, length),
            f"2.2 at 90 tok/s is a cycle of {by_break_even:.1f} ms; by the run of 2.1 at 82.3 "
            f"tok/s ({by_run:.1f} ms) {viability.tok_s(length, by_run):.0f}",
            f"2 drafts: {viability.tok_s(two, by_break_even):.0f}",
        ),
        Figure(
            "tok/s at accept length 3.0-3.5, all epochs", 130, 160, 0, speeds(3.0, 3.5),
            f"the same cycle; 130-160 takes one of {viability.calibrated_cycle_ms(3.5, 160):.1f}-"
            f"{viability.calibrated_cycle_ms(3.0, 130):.1f} ms",
            "2 drafts: at most 3.0, " f"{viability.tok_s(3.0, by_break_even):.0f}",
        ),
        Figure(
            "accept length at 10 drafts, tail 0.50-0.55", 3.1, 3.1, 1, deep(10),
            f"2.75 + 0.097 (c + c^2 + ...); 3.1 takes c = {tail(10, 3.1)}",
        ),
        Figure(
            "accept length at 16 drafts, tail 0.50-0.55", 3.3, 3.3, 1, deep(16),
            f"likewise; 3.3 takes c = {tail(16, 3.3)}, and 0.55 gives at most {limit:.2f} at any "
            "number of drafts",
        ),
        Figure(
            "conditional accuracy, %, at accept length 3.2-3.5", 69, 71, 0,
            (100 * viability.unbounded_accuracy(3.2), 100 * viability.unbounded_accuracy(3.5)),
            "1 - 1/3.2 and 1 - 1/3.5", "2 drafts: out of reach (at most 3.0)",
        ),
        _point(
            "accept length at conditional accuracy 0.64", 2.05, 2,
            viability.chain_accept_length(0.64, DRAFT_STEPS), "1 + p + p^2, 2.0 was observed",
            f"1/(1-p) would say {viability.unbounded_accept_length(0.64):.2f}",
        ),
        _point(
            "conditional accuracy at accept length 2.0", 0.5, 2, viability.unbounded_accuracy(2.0),
            "1 - 1/2.0", f"2 drafts: {viability.chain_accuracy(2.0, DRAFT_STEPS):.2f}",
        ),
        _point(
            "break-even accept length at 30 ms", 2.46, 2,
            viability.break_even(PLAIN_TOK_S, VERIFY_MS), "82 x 0.030",
        ),
        Figure(
            "tok/s with 2 drafts, accept length 2.0", 59, 61, 0,
            (viability.tok_s(2.0, VERIFY_MS), viability.tok_s(2.0, VERIFY_MS)),
            "2.0 / 30 ms; 59-61 takes a whole cycle of "
            f"{viability.calibrated_cycle_ms(2.0, 61):.1f}-"
            f"{viability.calibrated_cycle_ms(2.0, 59):.1f} ms: 30 ms is the verify forward's",
        ),
    ]  # fmt: skip
