"""The cost model at work in an answer: one chain's cycle in parts, and chains of every length."""

from __future__ import annotations

from dataclasses import replace

from spec_kernels.planning.answer import with_drafts
from spec_kernels.planning.cost_model import Run, cost_curve, cycle_cost, draft_step_ms
from spec_kernels.planning.inputs import Acceptance
from spec_kernels.planning.measurements import Measurements, interpolated
from spec_kernels.planning.model_shapes import kimi_k25, kimi_k25_drafter
from spec_kernels.planning.parts import CycleCost, CyclePart
from spec_kernels.planning.traces import Trace, accepted_by_cycle, path_rates
from spec_kernels.planning.tree_shape import Choice, choices
from spec_kernels.planning.viability import conditional_from_full

MOST_DRAFTS = 8
MOST_NODES = 16


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


def _curve(
    measured: Measurements, most_nodes: int, context: int, batch: int
) -> tuple[dict[int, float], float]:
    """(ms of the target's pass by nodes from 1 on, ms of a drafter's step)."""
    target = kimi_k25()
    if measured.cost_curve_ms:
        most_nodes = min(most_nodes, max(measured.cost_curve_ms))
    curve = cost_curve(target, measured, range(1, most_nodes + 1), context, batch)
    if measured.draft_step_ms is not None:
        return curve, measured.draft_step_ms.value
    return curve, draft_step_ms(target, kimi_k25_drafter(), measured, context, batch)


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
    curve, step = _curve(measured, MOST_DRAFTS + 1, context, batch)
    if len(curve) < 2:
        return []
    full, _, _ = with_drafts(acceptance, len(curve) - 1, tail)
    return choices([[c] for c in conditional_from_full(full)], curve, step, max_children=1)


def traced_choices(
    measured: Measurements, trace: Trace, context: int = 0, batch: int = 1
) -> tuple[list[Choice], list[Choice]]:
    """(chains, trees) of 1, 2, ... nodes: shapes by the trace's rates, lengths by its replay.

    Trees have up to ``MOST_NODES`` nodes, or as many as a measured curve goes to.
    """
    curve, step = _curve(measured, MOST_NODES, context, batch)
    rates = path_rates(trace.texts, trace.num_ranks)
    chains = choices(rates, curve, step, max_children=1)
    return (
        [_replayed(c, trace) for c in chains[: MOST_DRAFTS + 1]],
        [_replayed(c, trace) for c in choices(rates, curve, step)],
    )


def _replayed(choice: Choice, trace: Trace) -> Choice:
    """The same with the accept length that decoding the trace's texts would have had."""
    accepted = [n for t in trace.texts for n in accepted_by_cycle(t, choice.shape.paths)]
    length = 1 + sum(accepted) / len(accepted)
    return replace(choice, shape=replace(choice.shape, accept_length=length))
