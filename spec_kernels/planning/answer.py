"""What ``spec-kernels viability`` answers: needed accuracies, predicted speeds, assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from spec_kernels.planning import viability
from spec_kernels.planning.inputs import Acceptance
from spec_kernels.planning.viability import Estimate


@dataclass(frozen=True)
class Cycle:
    """Time of a whole cycle of the batch, ms, and where it comes from."""

    ms: float
    source: str


@dataclass(frozen=True)
class Requirement:
    """What a target takes at a cycle time.

    Attributes:
        target_tok_s: of the whole batch.
        cycle_ms: time of a cycle.
        accept_length: the one needed; below 1, no draft need be right.
        unbounded: constant conditional accuracy by 1 / (1 - p), which has drafts without end.
        bounded: the same by the answer's ``num_drafts``; None where out of reach at any accuracy.
    """

    target_tok_s: float
    cycle_ms: float
    accept_length: float
    unbounded: float
    bounded: float | None

    @property
    def reachable(self) -> bool:
        return self.bounded is not None


@dataclass(frozen=True)
class Prediction:
    """What the given acceptance yields at a cycle time.

    Attributes:
        cycle: time of a cycle.
        accept_length: of ``num_drafts`` drafts, tokens.
        tok_s: of the whole batch.
        speedup: over plain decoding; None where its speed is not known.
        tok_s_per_point: more tok/s for each percentage point of conditional accuracy, every step's.
        tok_s_per_ms: more tok/s for each ms that the cycle gets longer (negative).
    """

    cycle: Cycle
    accept_length: Estimate
    tok_s: Estimate
    speedup: Estimate | None
    tok_s_per_point: float
    tok_s_per_ms: float


@dataclass(frozen=True)
class Answer:
    """All that is printed, drawn and written.

    Attributes:
        num_drafts: k, drafts of a chain in a cycle; k + 1 tokens are verified.
        batch: requests that go through a cycle together.
        targets: tok/s of the whole batch.
        cycles: the cycle times looked at.
        plain_tok_s: plain decoding of the whole batch; None where not known.
        acceptance: what the drafter does, and who says so; None where not given.
        requirements: for each target, for each cycle time.
        break_even: for each cycle time, with plain decoding's speed as the target; may be empty.
        predictions: for each cycle time; empty without ``acceptance``.
        warnings: what must not be overlooked.
        assumptions: what all this stands on.
        costs: a ``cost_model.CycleCost`` to be shown with it; None where not asked for.
    """

    num_drafts: int
    batch: int
    targets: tuple[float, ...]
    cycles: tuple[Cycle, ...]
    plain_tok_s: float | None
    acceptance: Acceptance | None
    requirements: tuple[Requirement, ...]
    break_even: tuple[Requirement, ...]
    predictions: tuple[Prediction, ...]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]
    costs: object | None = field(default=None)


def requirement(target_tok_s: float, cycle_ms: float, num_drafts: int, batch: int) -> Requirement:
    """What ``target_tok_s`` (of the batch) takes at ``cycle_ms`` with chains of ``num_drafts``."""
    needed = viability.required_accept_length(target_tok_s, cycle_ms, batch)
    bounded = viability.chain_accuracy(max(1.0, needed), num_drafts)
    return Requirement(
        target_tok_s,
        cycle_ms,
        needed,
        viability.unbounded_accuracy(max(1.0, needed)),
        None if math.isnan(bounded) else bounded,
    )
