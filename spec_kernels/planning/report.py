"""An answer as text, as JSON's values and as CSV."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from spec_kernels.planning import published, published_case
from spec_kernels.planning.answer import Answer
from spec_kernels.planning.tree_shape import Choice
from spec_kernels.planning.viability import Estimate

_WIDTH = 100


def _plural(num: int, what: str) -> str:
    return f"{num} {what}{'s' * (num != 1)}"


def _estimate(value: Estimate, decimals: int) -> str:
    text = f"{value.value:.{decimals}f}"
    if value.is_exact:
        return text
    return f"{text} ({value.low:.{decimals}f}-{value.high:.{decimals}f})"


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _wrap(mark: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _in_words(answer: Answer) -> list[str]:
    """The answer first: each target, break-even, the drafter, what would help more."""
    drafts = _plural(answer.num_drafts, "draft")
    modelled = {c.ms for c in answer.cycles if c.high is not None and c.high > c.ms}

    def at(ms: float) -> str:
        return f"at a modelled {ms:.3g} ms" if ms in modelled else f"at {ms:.3g} ms"

    def needs(rows) -> str:
        parts = []
        for r in rows:
            if not r.reachable:
                takes = "out of reach"
            elif r.accept_length <= 1:
                takes = "no draft need be right"
            else:
                takes = f"conditional accuracy {r.bounded:.2f}"
            parts.append(f"{r.accept_length:.2f} {at(r.cycle_ms)} ({takes})")
        return ", ".join(parts)

    lines = []
    for target in answer.targets:
        rows = [r for r in answer.requirements if r.target_tok_s == target]
        lines += _wrap("", f"{target:g} tok/s with {drafts} takes accept length {needs(rows)}.")
    if answer.break_even:
        text = f"Plain decoding's {answer.plain_tok_s:.3g} tok/s: {needs(answer.break_even)}."
        lines += _wrap("", text)
    if answer.predictions:
        length = answer.predictions[0].accept_length
        parts, most = [], []
        for p in answer.predictions:
            text = f"{_speed(p.tok_s.value)} tok/s {at(p.cycle.ms)}"
            notes = [] if p.tok_s.is_exact else [f"{_speed(p.tok_s.low)}-{_speed(p.tok_s.high)}"]
            notes += [] if p.speedup is None else [f"{p.speedup.value:.2f}x plain"]
            parts.append(text + (f" ({', '.join(notes)})" if notes else ""))
            most.append(_speed(p.most_tok_s))
        text = f"This drafter, accept length {_estimate(length, 2)}, gives {', '.join(parts)}."
        lines += _wrap("", text)
        lines += _wrap(
            "",
            f"With every draft right it would be {', '.join(most)} tok/s; with half the cycle, "
            f"{', '.join(_speed(2 * p.tok_s.value) for p in answer.predictions)}.",
        )
    best = answer.best_chain
    if best is not None:
        speed = f"{_speed(answer.batch * best.tok_s)} tok/s"
        text = f"At these costs a chain of {_plural(best.shape.depth, 'draft')} is fastest, {speed}"
        if not best.shape.depth:
            text = f"At these costs no drafts are fastest: plain decoding, {speed}"
        elif best is answer.chains[-1]:
            text += "; it is the longest that they cover"
        lines += _wrap("", text + ".")
    tree = answer.best_tree
    if tree is not None and not tree.shape.is_chain:
        lines += _wrap("", f"A {tree.shape} gives {_speed(answer.batch * tree.tok_s)} tok/s.")
    return lines


def _requirements_table(answer: Answer) -> list[str]:
    lines = [
        "",
        "                        accept length   conditional accuracy",
        f"  tok/s  cycle, ms      needed    {_plural(answer.num_drafts, 'draft'):>10}     1/(1-p)",
    ]
    seen = [(r, "") for r in answer.requirements] + [(r, "break-even") for r in answer.break_even]
    for r, mark in seen:
        bounded = "out of reach" if r.bounded is None else f"{r.bounded:.2f}"
        lines.append(
            f"{r.target_tok_s:7.4g}  {r.cycle_ms:9.2f}   {r.accept_length:9.2f}  "
            f"{bounded:>12}  {r.unbounded:10.2f}  {mark}".rstrip()
        )
    return lines


def _predictions_table(answer: Answer) -> list[str]:
    lines = [
        "",
        f"  cycle, ms   {'accept length':<18}   {'tok/s':<20} speedup   +1 point   -1 ms  at most",
    ]
    for p in answer.predictions:
        speedup = "-" if p.speedup is None else f"{p.speedup.value:.2f}x"
        lines.append(
            f"  {p.cycle.ms:9.2f}   {_estimate(p.accept_length, 2):<18}   "
            f"{_estimate(p.tok_s, 1):<20} {speedup:>6}   {p.tok_s_per_point:+8.2f}  "
            f"{-p.tok_s_per_ms:+6.2f}  {p.most_tok_s:8.1f}"
        )
    lines.append("  +1 point: more tok/s for one percentage point of every conditional accuracy; ")
    lines[-1] += "at most: all right"
    return lines


def _choices_table(
    answer: Answer, title: str, rows: Sequence[Choice], best: Choice | None
) -> list[str]:
    lines = ["", f"  {title:<34}   accept length   cycle, ms      tok/s"]
    for c in rows:
        mark = "  best" if c is best else ""
        lines.append(
            f"  {c.shape!s:<34}   {c.shape.accept_length:13.2f}   {c.cycle_ms:9.2f}  "
            f"{answer.batch * c.tok_s:9.1f}{mark}"
        )
    return lines


def render(answer: Answer) -> str:
    """The answer, the tables, the assumptions."""
    lines = _in_words(answer)
    lines += [line for text in answer.warnings for line in _wrap("warning: ", text)]
    lines += _requirements_table(answer)
    if answer.predictions:
        full = ", ".join(_estimate(rate, 3) for rate in answer.full_accuracy)
        lines += _predictions_table(answer)
        lines += _wrap("  ", f"full accuracy by draft: {full}")
    if answer.chains:
        lines += _choices_table(answer, "chains", answer.chains, answer.best_chain)
    if answer.trees:
        lines += _choices_table(answer, "best tree of each size", answer.trees, answer.best_tree)
    if answer.is_published:
        lines += ["", *_published_table()]
    elif answer.costs is not None:
        lines += ["", "Where the cycle's time goes", *answer.costs.table()]
    lines += ["", "Assumptions"]
    lines += [line for text in answer.assumptions for line in _wrap("- ", text)]
    return "\n".join(lines)


def _published_table() -> list[str]:
    # Its table only: where each part is from stands in docs/planning.md.
    parts = published.explanation()
    lines = ["Where the 30 ms went, and this package's cycle for 2 drafts by the same cost model"]
    lines += [*parts[: parts.index("")], ""]
    lines += [f"{'published figure':50} {'printed':>8} {'computed':>9}   with 2 drafts"]
    for f in published_case.figures():
        verdict = f.bounded if f.follows else f"DOES NOT FOLLOW: {f.how}"
        shown = textwrap.wrap(verdict, 44) or [""]
        lines.append(f"{f.what:50} {f.published:>8} {f.shown:>9}   {shown[0]}".rstrip())
        lines += [" " * 72 + line for line in shown[1:]]
    return lines


def _plain(value):
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_dict(answer: Answer) -> dict:
    """The answer for ``--json``: the fields of ``Answer``, shapes in words and paths."""
    fields = asdict(answer)
    for name in ("requirements", "break_even"):
        for values, r in zip(fields[name], getattr(answer, name), strict=True):
            values["reachable"] = r.reachable
    fields["costs"] = None if answer.costs is None else answer.costs.as_dict()
    for name, best in (("chains", answer.best_chain), ("trees", answer.best_tree)):
        fields[name] = [
            {
                "shape": str(c.shape),
                "paths": c.shape.paths,
                "num_drafts": len(c.shape.paths),
                "accept_length": c.shape.accept_length,
                "cycle_ms": c.cycle_ms,
                "tok_s": answer.batch * c.tok_s,
                "best": c is best,
            }
            for c in getattr(answer, name)
        ]
    if answer.is_published:
        fields["published"] = [
            {**asdict(f), "follows": f.follows} for f in published_case.figures()
        ]
    return _plain(fields)


_COLUMNS = (
    "row", "cycle_ms", "cycle_source", "target_tok_s", "num_drafts", "batch", "accept_length",
    "accept_length_low", "accept_length_high", "accuracy_bounded", "accuracy_unbounded",
    "reachable", "tok_s", "tok_s_low", "tok_s_high", "speedup", "tok_s_per_point", "tok_s_per_ms",
    "most_tok_s",
)  # fmt: skip


def as_csv(answer: Answer) -> str:
    """Rows ``target``, ``break-even`` and ``drafter``; empty where a column says nothing."""
    rows: list[dict] = []
    needs: Sequence = [("target", r) for r in answer.requirements]
    for kind, r in [*needs, *(("break-even", r) for r in answer.break_even)]:
        rows.append(
            {
                "row": kind,
                "cycle_ms": r.cycle_ms,
                "target_tok_s": r.target_tok_s,
                "accept_length": r.accept_length,
                "accuracy_bounded": r.bounded,
                "accuracy_unbounded": r.unbounded,
                "reachable": r.reachable,
            }
        )
    for p in answer.predictions:
        rows.append(
            {
                "row": "drafter",
                "cycle_ms": p.cycle.ms,
                "cycle_source": p.cycle.source,
                "accept_length": p.accept_length.value,
                "accept_length_low": p.accept_length.low,
                "accept_length_high": p.accept_length.high,
                "tok_s": p.tok_s.value,
                "tok_s_low": p.tok_s.low,
                "tok_s_high": p.tok_s.high,
                "speedup": p.speedup and p.speedup.value,
                "tok_s_per_point": p.tok_s_per_point,
                "tok_s_per_ms": p.tok_s_per_ms,
                "most_tok_s": p.most_tok_s,
            }
        )
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({"num_drafts": answer.num_drafts, "batch": answer.batch, **row})
    return out.getvalue()
