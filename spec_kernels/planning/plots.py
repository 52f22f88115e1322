"""Plots of ``spec-kernels viability``: speed over accuracy, the map, where a cycle's time goes."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spec_kernels.decode.adaptive import isotonic
from spec_kernels.planning import viability
from spec_kernels.planning.answer import Answer, Requirement
from spec_kernels.planning.parts import CycleCost

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which colour-blind readers tell apart; lines differ in their dashes too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (3, 1)))
_LABELS = {  # of CyclePart: colour and hatch
    "measured": ("#0072B2", ""),
    "modelled": ("#56B4E9", "///"),
    "fitted": ("#E69F00", "..."),
    "assumed": ("#D0D0D0", "xxx"),
}
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "spec-kernels",
    "hatch.linewidth": 0.5,
}
_POINTS = 101
# Share of a panel that a line of text is high.
_LINE = 0.055
# Characters of a line over the waterfall, in the page's width too.
_TITLE_WIDTH = 90
# So that the same answer gives the same file.
_NO_DATE = {"Date": None, "Creator": None}


def _matplotlib():
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.patches
    except ImportError as error:
        raise ValueError(
            "plots: expected matplotlib, got none (pip install matplotlib, or "
            f"'spec-kernels[plots]'): {error}"
        ) from error
    return matplotlib


def draw(answer: Answer, path: str | Path) -> None:
    """Writes all plots of an answer as one picture.

    Without ``answer.costs`` there is no waterfall.

    Raises:
        ValueError: matplotlib is not installed, or the file's suffix is none of ``SUFFIXES``.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"plots: path: expected one of {', '.join(SUFFIXES)}, got {path.name}")
    matplotlib = _matplotlib()
    with matplotlib.rc_context(_STYLE):
        speeds_height = 4.2 + 0.1 * len(answer.cycles)
        height = speeds_height
        if answer.costs is not None:
            height += _waterfall_height(answer.costs)
        figure = matplotlib.figure.Figure(figsize=(10, height), layout="constrained")
        if answer.costs is None:
            left, right = figure.subplots(1, 2)
        else:
            ratios = (speeds_height, _waterfall_height(answer.costs))
            above, below = figure.subfigures(2, 1, height_ratios=ratios)
            left, right = above.subplots(1, 2)
            draw_waterfall(below.subplots(), answer.costs)
        draw_speeds(left, answer)
        draw_map(right, answer)
        _save(figure, path)


def svg_pictures(answer: Answer) -> list[str]:
    """Each plot as an SVG element of its own, glyphs included, for a page that needs no network."""
    matplotlib = _matplotlib()
    pictures = [((6.2, 4.8), draw_speeds, answer), ((6.2, 4.2), draw_map, answer)]
    if answer.costs is not None:
        size = (8.5, _waterfall_height(answer.costs))
        pictures.append((size, draw_waterfall, answer.costs))
    found = []
    with matplotlib.rc_context(_STYLE | {"svg.fonttype": "path"}):
        for number, (size, drawing, what) in enumerate(pictures):
            # Ids must differ between the pictures of one page.
            matplotlib.rcParams["svg.hashsalt"] = f"spec-kernels {number}"
            figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
            drawing(figure.subplots(), what)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata=_NO_DATE)
            found.append(_element(text.getvalue()))
    return found


def _element(svg: str) -> str:
    """An SVG file's element, without the prolog and the metadata, which name addresses."""
    svg = svg[svg.index("<svg") :]
    before, _, rest = svg.partition("<metadata>")
    return before + rest.partition("</metadata>")[2] if rest else svg


def _save(figure, path: Path) -> None:
    suffix = path.suffix.lower()
    metadata = {".png": {"Software": None}, ".svg": _NO_DATE, ".pdf": {"CreationDate": None}}
    figure.savefig(path, dpi=150, metadata=metadata[suffix])


def draw_speeds(axes, answer: Answer) -> None:
    """tok/s over constant conditional accuracy, a line for each cycle time.

    Marked are plain decoding and each line's break-even, the targets, and what the answer's drafter
    gives (at the constant accuracy of the same accept length). Thin lines: 1/(1-p), which no chain
    of so many drafts follows.
    """
    p = np.linspace(0, 1, _POINTS)
    cycles = sorted(answer.cycles, key=lambda c: c.ms)
    k, batch = answer.num_drafts, answer.batch
    bounded = viability.chain_accept_length(p, k)
    fastest = [batch * 1e3 * (k + 1) / c.ms for c in cycles]
    highs = [prediction.tok_s.high for prediction in answer.predictions]
    top = max(*answer.targets, *fastest, *highs, answer.plain_tok_s or 0)
    lines = []
    for number, cycle in enumerate(cycles):
        style = {"color": _COLOURS[number % 6]}
        dash = _DASHES[(number + number // 6) % 6]
        speeds = viability.tok_s(bounded, cycle.ms, batch)
        label = f"{cycle.ms:.3g} ms a cycle{_break_even(answer, cycle.ms)}"
        lines += axes.plot(p, speeds, linestyle=dash, linewidth=1.8, label=label, **style)
        endless = viability.tok_s(viability.unbounded_accept_length(p[:-1]), cycle.ms, batch)
        axes.plot(p[:-1], endless, linewidth=0.7, alpha=0.7, **style)
    lines += axes.plot([], [], color="#555555", linewidth=0.7, label="thin: endless chain, 1/(1-p)")
    levels = [(target, f"{target:g}", "#555555") for target in answer.targets]
    if answer.plain_tok_s is not None:
        levels.append((answer.plain_tok_s, f"plain {answer.plain_tok_s:.3g}", "black"))
    for level, _, colour in levels:
        axes.axhline(level, color=colour, linewidth=0.8, linestyle=(0, (1, 2)))
    even = [r for r in answer.break_even if _is_even(r)]
    if even:
        speeds = [r.target_tok_s for r in even]
        lines += axes.plot(
            [r.bounded for r in even], speeds, "D", color="black", markersize=5, linestyle="",
            label="break-even", zorder=4,
        )  # fmt: skip
    drafter = _drafter(answer)
    if drafter is not None:
        for prediction in answer.predictions:
            speed = prediction.tok_s
            axes.errorbar(
                [drafter], [speed.value], [[speed.value - speed.low], [speed.high - speed.value]],
                color="black", capsize=3, marker="o", markerfacecolor="white", markersize=6,
                zorder=5,
            )  # fmt: skip
        lines += axes.plot(
            [], [], "o", color="black", markerfacecolor="white", label="this drafter"
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.1 * top)
    heights = _apart([level for level, _, _ in levels], _LINE * 1.1 * top)
    for height, (_, text, colour) in zip(heights, levels, strict=True):
        axes.text(1.015, height, text, color=colour, va="center", fontsize=8, clip_on=False)
    axes.set_xlabel(f"conditional accuracy p of each of {k} draft{'s' * (k != 1)}")
    axes.set_ylabel("tok/s" if batch == 1 else f"tok/s of {batch} requests")
    axes.set_title("Speed over accuracy", loc="left")
    # Below the axes, where no line can run under it.
    axes.legend(
        handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8,
        edgecolor="none", handlelength=2.6, columnspacing=1.2,
    )  # fmt: skip


def _is_even(requirement: Requirement) -> bool:
    """Whether break-even takes right drafts, and can be had at some accuracy."""
    return requirement.reachable and requirement.accept_length > 1


def _break_even(answer: Answer, ms: float) -> str:
    """What the legend says of a cycle time, if plain decoding's speed is known."""
    for r in answer.break_even:
        if r.cycle_ms == ms:
            if _is_even(r):
                return f": break-even at {r.bounded:.2f}"
            return ": faster at any p" if r.reachable else ": slower at any p"
    return ""


def draw_map(axes, answer: Answer) -> None:
    """tok/s over accuracy and cycle time, with lines of the targets' and plain decoding's speed."""
    k, batch = answer.num_drafts, answer.batch
    times = [c.ms for c in answer.cycles]
    p = np.linspace(0, 1, _POINTS)
    ms = np.linspace(0.5 * min(times), 1.2 * max(times), _POINTS)
    speeds = viability.tok_s(viability.chain_accept_length(p, k)[None, :], ms[:, None], batch)
    # Filled in equal ratios: speed falls as 1 / time, and equal steps would crowd at one end.
    levels = np.geomspace(speeds.min(), speeds.max(), 17)
    filled = axes.contourf(p, ms, speeds, levels=levels, cmap="cividis", norm="log")
    # Or a page's renderer shows seams between the bands.
    filled.set_edgecolor("face")
    bar = axes.figure.colorbar(filled, ax=axes, pad=0.02)
    ticks = _round_numbers(speeds.min(), speeds.max())
    bar.set_ticks(ticks, labels=[f"{t:g}" for t in ticks])
    bar.minorticks_off()
    bar.ax.set_title("tok/s", fontsize=8)
    wanted = [(t, f"{t:g}", "-") for t in answer.targets]
    if answer.plain_tok_s is not None:
        wanted.append((answer.plain_tok_s, f"plain {answer.plain_tok_s:.3g}", "--"))
    drafter = _drafter(answer)
    for (speed, text, dash), height in zip(wanted, _heights(len(wanted)), strict=True):
        _speed_line(axes, answer, p, ms, speed, text, dash, height, drafter)
    if drafter is not None:
        axes.plot(
            [drafter] * len(answer.predictions),
            [prediction.cycle.ms for prediction in answer.predictions],
            "o", color="black", markerfacecolor="white", markersize=6, clip_on=False, zorder=5,
        )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(ms[0], ms[-1])
    axes.set_xlabel(f"conditional accuracy p of each of {k} draft{'s' * (k != 1)}")
    axes.set_ylabel("cycle, ms")
    axes.set_title("Lines of equal speed", loc="left")


def _heights(count: int) -> list[float]:
    """Where along the axis lines are labelled, so that neighbours are labelled apart."""
    return [0.25 + 0.5 * (i + 0.5) / count for i in range(count)]


def _speed_line(axes, answer, p, ms, speed, text, dash, height, drafter) -> None:
    """Where ``speed`` is reached: cycle time = tokens / speed. The label is not at ``drafter``."""
    lengths = viability.chain_accept_length(p, answer.num_drafts)
    times = 1e3 * answer.batch * lengths / speed
    inside = (times >= ms[0]) & (times <= ms[-1])
    if not inside.any():
        return
    axes.plot(p, times, color="white", linewidth=1.6, linestyle=dash, clip_on=True)
    low, high = times[inside][0], times[inside][-1]
    distances = np.abs(times - (low + height * (high - low)))
    if drafter is not None:
        distances[np.abs(p - drafter) < 0.13] = np.inf
    at = int(distances.argmin())
    axes.text(
        p[at], times[at], text, fontsize=8, ha="center", va="center", color="black",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )  # fmt: skip


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the bounds."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [m * 10.0**e for e in powers for m in (1, 2, 5) if low <= m * 10.0**e <= high]


def _drafter(answer: Answer) -> float | None:
    """The constant conditional accuracy of the drafter's accept length."""
    if not answer.predictions:
        return None
    length = answer.predictions[0].accept_length.value
    return viability.chain_accuracy(min(max(length, 1.0), answer.num_drafts + 1), answer.num_drafts)


def _apart(values: Sequence[float], least: float) -> list[float]:
    """The values, moved as little as it takes (in least squares) to lie ``least`` apart."""
    order = np.argsort(values, kind="stable")
    steps = least * np.arange(len(order))
    out = np.empty(len(order))
    out[order] = isotonic(np.asarray(values, float)[order] - steps) + steps
    return out.tolist()


def _title(costs: CycleCost) -> str:
    return textwrap.fill(costs.title, _TITLE_WIDTH) or "Where a cycle's time goes"


def _waterfall_height(costs: CycleCost) -> float:
    """Inches."""
    return 1.1 + 0.3 * (len(costs.parts) + 1) + 0.2 * len(_title(costs).splitlines())


def draw_waterfall(axes, costs: CycleCost) -> None:
    """Each part of a cycle where the one before ended, with its bounds; the total below."""
    begin, used = 0.0, []
    edge = max(costs.total, costs.interval()[1])
    rows = list(range(len(costs.parts) + 1))
    for row, part in zip(rows, costs.parts, strict=False):
        colour, hatch = _LABELS[part.label]
        axes.barh(
            row, part.ms, left=begin, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5
        )
        _whisker(axes, row, begin + part.ms, begin + part.low, begin + part.high)
        right = begin + max(part.ms, part.high) + 0.012 * edge
        axes.text(right, row, f"{part.ms:.2f}", va="center", fontsize=8)
        if row + 1 < len(costs.parts):
            axes.plot([begin + part.ms] * 2, [row, row + 1], color="#888888", linewidth=0.6)
        if part.label not in used:
            used.append(part.label)
        begin += part.ms
    low, high = costs.interval()
    axes.barh(rows[-1], costs.total, color="#333333")
    _whisker(axes, rows[-1], costs.total, low, high, "#AAAAAA")
    axes.text(
        high + 0.012 * edge, rows[-1], f"{costs.total:.1f} ({low:.1f}-{high:.1f})", va="center",
        fontsize=8, fontweight="bold",
    )  # fmt: skip
    axes.set_yticks(rows, [*(part.name for part in costs.parts), "total"])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * edge)
    axes.set_xlabel("ms; whiskers: where each part may lie, and all of them at one end")
    axes.set_title(_title(costs), loc="left")
    axes.tick_params(axis="y", length=0)
    patch = _matplotlib().patches.Patch
    handles = []
    for label in used:
        colour, hatch = _LABELS[label]
        handles.append(patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label))
    axes.legend(
        handles=handles, loc="upper right", fontsize=8, framealpha=0.9, edgecolor="none",
        handlelength=2.2, handleheight=1.2,
    )  # fmt: skip


def _whisker(axes, row: float, at: float, low: float, high: float, colour: str = "black") -> None:
    if low < high:
        axes.errorbar(
            [at], [row], xerr=[[at - low], [high - at]], color=colour, capsize=2.5, linewidth=1
        )
