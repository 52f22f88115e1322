"""What is known of a drafter and its cycle, from whichever source says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_kernels.planning import viability
from spec_kernels.planning.viability import Estimate


@dataclass(frozen=True)
class Acceptance:
    """How often drafts are right, and times where the source has them.

    Attributes:
        source: file and line, or option, that said so.
        full_accuracy: by draft step; empty where the source knows the accept length alone.
        accept_length: of as many drafts as ``full_accuracy`` has (or as the source ran).
        num_cycles: cycles (or positions) counted; None where the source gives rates alone.
        cycle_ms: a whole cycle, drafting included; None where not known.
        plain_tok_s: plain decoding of the same batch; None where not known.
        notes: what a reader must know of this source.
    """

    source: str
    full_accuracy: tuple[float, ...]
    accept_length: Estimate
    num_cycles: int | None = None
    cycle_ms: float | None = None
    plain_tok_s: float | None = None
    notes: tuple[str, ...] = ()


def by_hand(
    full_accuracy: Sequence[float], source: str = "given", num_cycles: int | None = None
) -> Acceptance:
    """Rates that the user states, with the number of cycles they were counted over, if known."""
    length = (
        Estimate.exact(viability.accept_length(full_accuracy))
        if num_cycles is None
        else viability.accept_length_estimate(full_accuracy, num_cycles)
    )
    return Acceptance(source, tuple(map(float, full_accuracy)), length, num_cycles)
