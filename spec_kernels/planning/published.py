"""The cost model beside published cycle times: where they went, and what ours would take.

Two of the published points set one parameter each (``fits``); the rest are tests of the model.
Nothing here was measured by this project.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from spec_kernels.planning.checks import fail
from spec_kernels.planning.cost_model import Run, cycle_cost
from spec_kernels.planning.measurements import Measurements, defaults, on_box
from spec_kernels.planning.model_shapes import kimi_k25, kimi_k25_drafter
from spec_kernels.planning.parts import CycleCost, Quantity

# A box on which nothing collapses, with switches as most of the published ones.
DEFAULT_BOX = "wrx90-two-switches"
CASE = "case: verify, no graphs"
TOLERANCE = 0.15  # of what is called near
_NOTHING = 1e-9


@dataclass(frozen=True)
class Point:
    """A published time of a cycle or of a plain step.

    Attributes:
        name: short, for tables.
        ms: as published, or tokens a cycle over tokens a second.
        engine: whose figures hold.
        run: how the cycle is taken to have been run.
        sets: the rate that this point was used to fit; empty for a test.
        note: what else is known.
    """

    name: str
    ms: float
    engine: str
    run: Run
    sets: str = ""
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """A published point beside the model."""

    point: Point
    cost: CycleCost

    @property
    def residual(self) -> float:
        """Published less modelled, ms."""
        return self.point.ms - self.cost.total

    @property
    def near(self) -> bool:
        """Whether the model is within ``TOLERANCE`` of the published time."""
        return abs(self.residual) <= TOLERANCE * self.point.ms

    def within(self, independent: bool = False) -> bool:
        """Whether the point lies between the ends, of all parts at once or of independent ones."""
        low, high = self.cost.spread() if independent else self.cost.interval()
        return low <= self.point.ms <= high


@cache
def _data() -> Mapping:
    path = files("spec_kernels.planning").joinpath("data/published.json")
    return json.loads(path.read_text())


@cache
def points() -> tuple[Point, ...]:
    """All published points, in the order of tables."""
    found = []
    for entry in _data()["points"]:
        run = Run(**entry["run"])
        ms = entry.get("ms")
        if ms is None:
            # A chain's acceptance a draft gives the tokens of a cycle besides the bonus token.
            tokens = entry.get("tokens", 1 + run.draft_steps * entry.get("acceptance", 0))
            ms = 1e3 * run.batch * tokens / entry["tok_s"]
        found.append(
            Point(
                entry["name"],
                ms,
                entry["engine"],
                run,
                entry.get("sets", ""),
                entry.get("note", ""),
            )
        )
    return tuple(found)


def point(name: str) -> Point:
    """The point of that name; ValueError if there is none."""
    for p in points():
        if p.name == name:
            return p
    names = ", ".join(p.name for p in points())
    raise fail("point", "name", f"one of {names}", name)


@cache
def _engine(name: str) -> Measurements:
    """An engine's figures before anything is fitted."""
    data = _data()
    return defaults().updated(data["common"]).updated(data["engines"][name])


@cache
def fits() -> Mapping[str, Quantity]:
    """The rates that published points set, one point each."""
    return {p.sets: _FITS[p.sets](p) for p in points() if p.sets}


def _fit_kernel(p: Point) -> Quantity:
    """Everything of a plain step that no other part explains, over its kernels."""
    nothing = Quantity.exactly(_NOTHING, "assumed", "left out")
    bare = _engine(p.engine).with_rates(kernel_us=nothing)
    rest = cycle_cost(kimi_k25(), bare, p.run)
    counts = bare.rates
    num = kimi_k25().num_layers * counts["layer_kernels"].value + counts["other_kernels"].value
    low, high = rest.interval()
    us = [max(_NOTHING, 1e3 * (p.ms - other) / num) for other in (rest.total, high, low)]
    return Quantity(*us, "fitted", f"fitted to {p.ms:.1f} ms ({p.name})")


def _fit_attention(p: Point) -> Quantity:
    """What a step takes longer than without a context, as a rate of reading the cache once."""
    target = kimi_k25()
    start = next(q.ms for q in points() if q.engine == p.engine and q.sets == "kernel_us")
    num_bytes = p.run.context * target.cache_bytes_a_token(p.run.cache_bytes)
    rate = num_bytes / (p.ms - start) / 1e6
    source = f"fitted to {p.ms:.1f} - {start:.1f} ms ({p.name}); 10 % either way"
    return Quantity(rate, 0.9 * rate, 1.1 * rate, "fitted", source)


_FITS = {"kernel_us": _fit_kernel, "attention_one_gb_s": _fit_attention}


def engine(name: str) -> Measurements:
    """An engine's figures with the fitted rates."""
    return _engine(name).with_rates(**fits())


def modelled(p: Point) -> CycleCost:
    """The cost model's account of a point."""
    drafter = kimi_k25_drafter()
    latent = _data()["drafter_cache_bytes_a_token"].get(p.engine)
    if latent is not None:
        drafter = replace(drafter, cache_bytes_a_token=latent)
    return cycle_cost(kimi_k25(), engine(p.engine), p.run, drafter, p.name)


@cache
def comparisons() -> tuple[Comparison, ...]:
    """Every point beside the model, in the order of ``points``."""
    return tuple(Comparison(p, modelled(p)) for p in points())


def predicted_costs(box: str = DEFAULT_BOX) -> Measurements:
    """Figures of this package's cycle on a described box; none of them was measured on one.

    The time of a kernel was fitted for a supposed number of kernels a layer, so that its ends here
    allow for fewer and for more.
    """
    us = fits()["kernel_us"]
    supposed = _engine("vllm, plain").rates["layer_kernels"].value
    few, many = _data()["layer_kernels_ends"]
    ends = (us.value, us.low * supposed / many, us.high * supposed / few)
    return on_box(box).with_rates(kernel_us=Quantity(*ends, us.label, us.source))


def predicted_cycle(
    box: str = DEFAULT_BOX,
    draft_steps: int = 2,
    context: int = 1024,
    batch: int = 1,
    cache_bytes: int = 2,
) -> CycleCost:
    """This package's cycle of a chain, in one graph, fused attention, its own all-reduces."""
    run = Run(draft_steps + 1, draft_steps, context, batch, cache_bytes=cache_bytes)
    title = f"predicted: {draft_steps} draft steps, context {context}, batch {batch}, {box}"
    return cycle_cost(kimi_k25(), predicted_costs(box), run, kimi_k25_drafter(), title)


# Text.

_COLUMNS = {
    "weights": "weights",
    "attention": "attention",
    "allreduce": "allreduce",
    "small kernels": "kernels",
    "drafter": "drafter",
    "launches, not hidden": "launches",
    "host": "host",
}


def comparison_table(rows: Iterable[Comparison] | None = None) -> list[str]:
    """Lines of text: each point's parts, both totals, interval and residual; then the count."""
    rows = list(rows or comparisons())
    lines = [
        f"{'ms':27}"
        + "".join(f"{title:>10}" for title in _COLUMNS.values())
        + f" |{'model':>7} {'interval':>13} {'published':>9} {'residual':>8}"
    ]
    for row in rows:
        parts = {part.name: part.ms for part in row.cost.parts}
        cells = "".join(f"{parts[n]:10.1f}" if n in parts else f"{'-':>10}" for n in _COLUMNS)
        low, high = row.cost.interval()
        verdicts = [f"sets {row.point.sets}" if row.point.sets else "", row.point.note]
        verdicts.append("" if row.within() else "OUTSIDE")
        verdict = "; ".join(filter(None, verdicts))
        lines.append(
            f"{row.point.name:27}{cells} |{row.cost.total:7.1f} {f'{low:.1f} - {high:.1f}':>13} "
            f"{row.point.ms:9.1f} {row.residual:+8.1f}  {verdict}".rstrip()
        )
    return [*lines, *_count(rows)]


def _count(rows: list[Comparison]) -> list[str]:
    tests = [row for row in rows if not row.point.sets]
    inside = sum(row.within() for row in tests)
    narrow = sum(row.within(independent=True) for row in tests)
    near = sum(row.near for row in tests)
    return [
        f"{len(rows)} published points: {len(rows) - len(tests)} set a rate each, {len(tests)} are "
        f"tests. Of the tests {inside} lie between the ends of all parts",
        f"together, {narrow} between those of parts that err independently, and the model is "
        f"within {TOLERANCE:.0%} of {near}.",
    ]


def explanation(box: str = DEFAULT_BOX) -> list[str]:
    """Lines of text: where the 30 ms went, and the predicted cycle beside it, part by part."""
    p = point(CASE)
    then, now = modelled(p), predicted_cycle(box)

    def cell(ms: float, low: float, high: float) -> str:
        return f"{ms:6.1f} {f'({low:.1f} - {high:.1f})':15}"

    lines = [f"{'ms':22}{'the 30 ms, modelled':24}predicted"]
    ours = {part.name: part for part in now.parts}
    for part in then.parts:
        left = cell(part.ms, part.low, part.high)
        other = ours.get(part.name)
        right = cell(other.ms, other.low, other.high) if other else "     -"
        lines.append(f"{part.name:22}{left}  {right}".rstrip())
    left, right = (cell(c.total, *c.interval()) for c in (then, now))
    lines.append(f"{'total':22}{left}  {right}".rstrip())
    left, right = (cell(c.total, *c.spread()) for c in (then, now))
    lines.append(f"{'  erring independently':22}{left}  {right}".rstrip())
    lines.append(f"{'published':22}{p.ms:6.1f}")
    lines.append(f"{'not explained':22}{p.ms - then.total:6.1f}")
    hidden = then.part("launches, not hidden")
    if hidden.ms > 0:
        device = sum(part.ms for part in then.parts if part.name not in (hidden.name, "host"))
        us = engine(p.engine).rates["eager_us"].value
        implied = us * (p.ms - then.part("host").ms) / (device + hidden.ms)
        lines.append(f"A launch of {implied:.1f} us instead of {us:g} would explain all of it.")
    for title, cost in (("The 30 ms", then), ("Predicted", now)):
        lines += ["", f"{title} ({cost.title}):"]
        lines += [f"  {part.name}: {part.source} [{part.label}]" for part in cost.parts]
    return lines
