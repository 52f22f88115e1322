"""The cost model at work in an answer: one chain's cycle in parts, and chains of every length."""

from __future__ import annotations

from spec_kernels.planning.answer import with_drafts
from spec_kernels.planning.cost_model import Run, cost_curve, cycle_cost, draft_step_ms
from spec_kernels.planning.inputs import Acceptance
from spec_kernels.planning.measurements import Measurements, interpolated
from spec_kernels.planning.model_shapes import kimi_k25, kimi_k25_drafter
from spec_kernels.planning.parts import CycleCost, CyclePart
from spec_kernels.planning.tree_shape import Choice, choices
from spec_kernels.planning.viability import conditional_from_full

MOST_DRAFTS = 8


def chain_cycle(
    measured: Measurements,
    num_drafts: int,
    context: int = 0,
    batch: int = 1,
    series: str | None = None,
) -> CycleCost:
    """Cycle of a chain: as measured phase by phase, by a measured curve, or by the model.

    ``series``: which pass of a run that was measured; None, or none of its names = the first.

    Raises:
        ValueError: more drafts than the measured curve goes to, or a number out of range.
    """
    if measured.cycles and num_drafts + 1 == max(measured.cost_curve_ms):
        named = (c for c in measured.cycles if series and c.title.startswith(f"{series}: "))
        return next(named, measured.cycles[0])
    title = f"{num_drafts} drafts, batch {batch}, {measured.about}"
    run = Run(num_drafts + 1, num_drafts, context, batch)
    if not measured.cost_curve_ms:
        target, drafter = kimi_k25(), kimi_k25_drafter()
        title = f"{title}, context {context}: Kimi-K2.5 on {target.num_ranks} GPUs"
        return cycle_cost(target, measured, run, drafter, title)
    # Refuses what the curve does not reach.
    cost_curve(kimi_k25(), measured, [run.num_nodes])
    parts = [CyclePart.of("target's pass", interpolated(measured.cost_curve_ms, run.num_nodes))]
    if measured.draft_step_ms is not None:
        parts.append(CyclePart.of("drafter", measured.draft_step_ms.times(num_drafts)))
    return CycleCost(tuple(parts), title)


def chain_choices(
    measured: Measurements,
    acceptance: Acceptance,
    context: int = 0,
    batch: int = 1,
    tail: float | None = None,
) -> list[Choice]:
    """Chains of 0, 1, ... drafts with the cycles that they take; speeds are one request's.

    Up to ``MOST_DRAFTS``, or as far as a measured curve goes.
    """
    target = kimi_k25()
    most = MOST_DRAFTS
    if measured.cost_curve_ms:
        most = min(most, max(measured.cost_curve_ms) - 1)
    if most < 1:
        return []
    full, _, _ = with_drafts(acceptance, most, tail)
    curve = cost_curve(target, measured, range(1, most + 2), context, batch)
    if measured.draft_step_ms is not None:
        step = measured.draft_step_ms.value
    else:
        step = draft_step_ms(target, kimi_k25_drafter(), measured, context, batch)
    return choices([[c] for c in conditional_from_full(full)], curve, step, max_children=1)
