"""What a verify cycle and a step of plain decoding cost, part by part.

The parts are times that add up: a step reads weights, sums over ranks, attends to the cache and
starts small kernels one after the other; nothing of it overlaps on the device. Without a graph the
host launches kernel by kernel while the device works on earlier ones, so that the longer of the two
counts, and what the host takes beyond the device's work is a part of its own. Arithmetic is no
part: up to a few hundred tokens reading the weights takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spec_kernels.planning.checks import count, fail
from spec_kernels.planning.measurements import Measurements, interpolated, on_box
from spec_kernels.planning.model_shapes import DrafterShape, TargetShape
from spec_kernels.planning.parts import CycleCost, CyclePart, Quantity, combine, product, quotient

__all__ = [
    "CycleCost",
    "CyclePart",
    "Run",
    "chain_costs",
    "cost_curve",
    "cycle_cost",
    "draft_step_ms",
]

READS = ("once", "each")


@dataclass(frozen=True)
class Run:
    """How a cycle is run.

    Attributes:
        num_nodes: verified tokens a request, root included; 1 without drafts is plain decoding.
        draft_steps: forwards of the drafter a cycle, the one over the accepted rows among them.
        context: tokens in the cache a request.
        batch: requests.
        graph: whether the whole cycle is one graph.
        reads: ``"once"``: attention reads a request's cache once for all its nodes; ``"each"``:
            once for every node, as kernels do that take each verified token for a request.
        cache_bytes: of an element of the target's cache: 2 (bf16) or 1 (fp8).

    Raises:
        ValueError: a number is out of range, or drafts are verified that nobody drafts.
    """

    num_nodes: int = 1
    draft_steps: int = 0
    context: int = 0
    batch: int = 1
    graph: bool = True
    reads: str = "once"
    cache_bytes: int = 2

    def __post_init__(self) -> None:
        for name, least in (("num_nodes", 1), ("draft_steps", 0), ("context", 0), ("batch", 1)):
            count("Run", name, getattr(self, name), least)
        if self.reads not in READS:
            raise fail("Run", "reads", f"one of {', '.join(READS)}", self.reads)
        if self.cache_bytes not in (1, 2):
            raise fail("Run", "cache_bytes", "1 or 2", self.cache_bytes)

    @property
    def num_tokens(self) -> int:
        """Rows of the target's pass."""
        return self.batch * self.num_nodes


def cycle_cost(
    target: TargetShape,
    costs: Measurements,
    run: Run,
    drafter: DrafterShape | None = None,
    title: str = "",
) -> CycleCost:
    """The parts of one cycle; of one step of plain decoding for a run of one node.

    Args:
        target: one rank's shape.
        costs: what things take.
        run: how the cycle is run.
        drafter: one rank's shape; not needed without draft steps.
        title: of the table.

    Raises:
        ValueError: draft steps without a drafter.
    """
    if run.draft_steps and drafter is None and costs.draft_step_ms is None:
        raise fail("cycle_cost", "drafter", "its shape for draft steps", drafter)
    parts = _target_parts(target, costs, run)
    if run.draft_steps:
        parts.append(CyclePart.of("drafter", _drafter_ms(target, drafter, costs, run)))
    if not run.graph:
        parts.append(_launches(target, costs, run, parts))
    parts.append(CyclePart.of("host", costs.rates["host_ms"]))
    return CycleCost(tuple(parts), title)


def cost_curve(
    target: TargetShape,
    box: Measurements | str,
    num_tokens: Iterable[int],
    context: int = 0,
    batch: int = 1,
    *,
    cache_bytes: int = 2,
) -> dict[int, float]:
    """Milliseconds of the target's pass by verified tokens a request, without the drafter.

    For choosing a tree: what drafting adds is ``draft_step_ms`` for each level. A cost curve that
    was measured stands for the model where ``box`` has one (linear between its points).

    Args:
        target: one rank's shape.
        box: what things take, or the name of a box of ``comm/boxes.json``, then predicted for it.
        num_tokens: verified tokens a request, root included, each >= 1.
        context: tokens in the cache a request.
        batch: requests.
        cache_bytes: of an element of the cache.

    Raises:
        ValueError: no such box, a number out of range, or a size beyond a measured curve.
    """
    costs = on_box(box, num_ranks=target.num_ranks) if isinstance(box, str) else box
    run = Run(context=context, batch=batch, cache_bytes=cache_bytes)
    curve = {}
    for num in num_tokens:
        count("cost_curve", "num_tokens", num)
        if costs.cost_curve_ms:
            if not min(costs.cost_curve_ms) <= num <= max(costs.cost_curve_ms):
                known = f"{min(costs.cost_curve_ms)} to {max(costs.cost_curve_ms)} as measured"
                raise fail("cost_curve", "num_tokens", known, num)
            curve[num] = interpolated(costs.cost_curve_ms, num).value
        else:
            curve[num] = cycle_cost(target, costs, replace(run, num_nodes=num)).total
    return curve


def draft_step_ms(
    target: TargetShape,
    drafter: DrafterShape,
    box: Measurements | str,
    context: int = 0,
    batch: int = 1,
) -> float:
    """Milliseconds of one forward of the drafter; arguments as for ``cost_curve``."""
    costs = on_box(box, num_ranks=target.num_ranks) if isinstance(box, str) else box
    run = Run(num_nodes=2, draft_steps=1, context=context, batch=batch)
    return _drafter_ms(target, drafter, costs, run).value


def chain_costs(
    target: TargetShape,
    drafter: DrafterShape,
    box: Measurements | str,
    num_tokens: Iterable[int],
    batches: Iterable[int] = (1,),
    context: int = 0,
) -> dict[tuple[int, int], float]:
    """Whole cycles of chains, ``{(requests, verified tokens a request): ms}``.

    What ``decode.adaptive.CostTable`` takes. A chain of one node has no drafts, and the drafter
    runs once all the same, to stay in step. Arguments as for ``cost_curve``.
    """
    sizes = list(num_tokens)
    grid = {}
    for batch in batches:
        step = draft_step_ms(target, drafter, box, context, batch)
        for num, ms in cost_curve(target, box, sizes, context, batch).items():
            grid[batch, num] = ms + max(1, num - 1) * step
    return grid


# Parts.


def _weight_ms(num_bytes: Quantity, costs: Measurements) -> Quantity:
    rate = costs.rates["bandwidth_gb_s"]
    source = f"{num_bytes.value / 1e9:.2f} GB at {rate.value:g} GB/s; {num_bytes.source}"
    return quotient(num_bytes.times(1e-6), rate, "modelled", source)


def _expected_bytes(target: TargetShape, costs: Measurements, num_tokens: int) -> Quantity:
    """Experts beyond those of the first token are as many as ``routing`` says, at most."""
    routing = costs.rates["routing"]
    first = target.step_bytes(1)
    more = target.step_bytes(num_tokens) - first
    ends = (first + more * end for end in (routing.value, routing.low, routing.high))
    num = target.distinct_experts(num_tokens)
    return Quantity(*ends, "modelled", f"{num:.1f} distinct experts a layer")


def _cache_ms(
    bytes_a_token: int, costs: Measurements, run: Run, reads_a_request: int, what: str
) -> Quantity:
    """Cache bytes over what so many readings reach together, at most what the device does."""
    reads = run.batch * reads_a_request
    num_bytes = reads * run.context * bytes_a_token
    all_, one = costs.rates["attention_gb_s"], costs.rates["attention_one_gb_s"]
    ends = {e: min(getattr(all_, e), reads * getattr(one, e)) for e in ("value", "low", "high")}
    each = f", read {reads_a_request} times" if reads_a_request > 1 else ""
    source = f"{what} of {run.context} tokens{each}: {num_bytes / 1e9:.2f} GB"
    if num_bytes:
        source += f" at {ends['value']:.0f} GB/s"
    binding = one if reads * one.value < all_.value else all_
    label = "fitted" if binding.label == "fitted" and num_bytes else "modelled"
    rate = Quantity(*(ends[e] for e in ("value", "low", "high")), label, binding.source)
    return quotient(Quantity.exactly(num_bytes / 1e6, label, source), rate, label, source)


def _kernels(target: TargetShape, costs: Measurements, draft_steps: int = 0) -> Quantity:
    """Kernels of the target's pass, of what surrounds it, and of so many drafter forwards."""
    r = costs.rates
    counts = [
        r["layer_kernels"].times(target.num_layers),
        r["other_kernels"],
        r["drafter_kernels"].times(draft_steps),
    ]
    return combine(counts, "assumed", "kernels")


def _kernels_ms(num: Quantity, costs: Measurements) -> Quantity:
    each = costs.rates["kernel_us"]
    label = "fitted" if each.label == "fitted" else "modelled"
    source = f"{num.value:.0f} kernels of {each.value:.2g} us; {each.source}"
    return product(num, each, label, source).times(1e-3)


def _target_parts(target: TargetShape, costs: Measurements, run: Run) -> list[CyclePart]:
    num_sums = target.num_allreduces if target.num_ranks > 1 else 0
    one = costs.sum_us(target.message_bytes(run.num_tokens), target.num_ranks)
    sums = replace(
        one.times(num_sums / 1e3), source=f"{num_sums} of {one.value:.1f} us; {one.source}"
    )
    reads = run.num_nodes if run.reads == "each" else 1
    cache_bytes = target.cache_bytes_a_token(run.cache_bytes)
    weights = _weight_ms(_expected_bytes(target, costs, run.num_tokens), costs)
    return [
        CyclePart.of("weights", weights),
        CyclePart.of("attention", _cache_ms(cache_bytes, costs, run, reads, "latent cache")),
        CyclePart.of("allreduce", sums),
        CyclePart.of("small kernels", _kernels_ms(_kernels(target, costs), costs)),
    ]


def _drafter_ms(
    target: TargetShape, drafter: DrafterShape | None, costs: Measurements, run: Run
) -> Quantity:
    """All forwards of a cycle."""
    steps = run.draft_steps
    if costs.draft_step_ms is not None:
        q = costs.draft_step_ms.times(steps)
        return replace(q, source=f"{steps} forwards; {q.source}")
    read = steps * drafter.step_bytes + drafter.extend_bytes
    one = costs.sum_us(2 * drafter.hidden * run.batch, target.num_ranks)
    num_sums = steps * drafter.num_allreduces if target.num_ranks > 1 else 0
    pieces = [
        _weight_ms(Quantity.exactly(read, "modelled", "drafter"), costs),
        _cache_ms(drafter.cache_bytes_a_token, costs, run, 1, "drafter's cache").times(steps),
        _kernels_ms(costs.rates["drafter_kernels"].times(steps), costs),
        one.times(num_sums / 1e3),
    ]
    source = f"{steps} forwards: {read / 1e9:.2f} GB, cache, kernels, {num_sums} all-reduces"
    return combine(pieces, "modelled", source)


def _launches(
    target: TargetShape, costs: Measurements, run: Run, work: Iterable[CyclePart]
) -> CyclePart:
    """By how much the host's launching takes longer than the device's work.

    Its ends match those of the work (both short, both long), so that what makes the work longer
    does not make the cycle longer twice.
    """
    num, each = _kernels(target, costs, run.draft_steps), costs.rates["eager_us"]
    host = product(num, each, "modelled", "host").times(1e-3)
    work = CycleCost(tuple(work))
    device = (work.total, *work.interval())
    beyond = [
        max(0.0, h - d) for h, d in zip((host.value, host.low, host.high), device, strict=True)
    ]
    source = (
        f"{num.value:.0f} launches of {each.value:g} us take {host.value:.1f} ms, during which the "
        f"device works {device[0]:.1f} ms; {each.source}"
    )
    low, high = min(beyond), max(beyond)
    return CyclePart("launches, not hidden", beyond[0], low, high, "modelled", source)
