"""``spec-kernels viability``: what accuracy a speed takes, what a drafter's accuracy yields."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

_WIDTH = 100


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "viability",
        help="is speculation worth it: accuracy, accept length, cycle time and tok/s",
        description="Says what accuracy a drafter needs for a speed, and what speed a drafter's "
        "accuracy gives, for chains of as many drafts as are really drafted. Without arguments: "
        "the published case of two drafts and 30 ms cycles, figure by figure.",
    )
    add = parser.add_argument
    add("--target-tok-s", type=float, nargs="+", metavar="TOK_S", help="wanted speeds (150 200)")
    add(
        "--cycle-ms",
        type=float,
        nargs="+",
        metavar="MS",
        help="whole cycles, drafting included (the source's, or 30 15)",
    )
    add("--draft-steps", type=int, metavar="K", help="drafts of a chain (the source's, or 2)")
    add("--batch", type=int, help="requests that share a cycle (1); speeds are of all together")
    add("--plain-tok-s", type=float, metavar="TOK_S", help="speed of plain decoding, to compare")
    source = parser.add_argument_group("the drafter, from one of").add_mutually_exclusive_group()
    add = source.add_argument
    add(
        "--full-acc",
        type=float,
        nargs="+",
        metavar="RATE",
        help="by draft step: how often all drafts up to it are right",
    )
    add(
        "--cond-acc",
        type=float,
        nargs="+",
        metavar="RATE",
        help="by draft step: how often it is right when those before it were",
    )
    add("--log", type=Path, metavar="FILE", help="a training log, JSON lines")
    add("--decode-json", type=Path, metavar="FILE", help="what spec-kernels decode --json wrote")
    add("--trace", type=Path, metavar="FILE", help="recorded acceptance (planning/traces.py)")
    add("--engine-log", type=Path, metavar="FILE", help="a log of vLLM, SGLang or llama.cpp")
    add = parser.add_argument
    add("--series", help="accuracies of --log, pass of --decode-json, temperature of --trace")
    add(
        "--counts",
        type=int,
        metavar="N",
        help="cycles (of --log: positions) behind the rates: gives intervals",
    )
    add("--tail", type=float, metavar="RATE", help="conditional accuracy beyond the last draft")
    add(
        "--calibrate",
        type=float,
        nargs=2,
        metavar=("ACCEPT_LENGTH", "TOK_S"),
        help="a measured run, whose cycle time is taken",
    )
    add(
        "--draft-overhead",
        type=float,
        metavar="SHARE",
        help="a cycle of a plain step and this share of it (the naive model; with --plain-tok-s)",
    )
    add(
        "--costs",
        type=Path,
        metavar="FILE",
        help="figures of a machine (planning/measurements.py, or what bench allreduce --json and "
        "decode --json give): adds the cycle by the cost model, part by part, and the best chain",
    )
    add("--box", help="the same for a described box (spec-kernels tune --help), all predicted")
    add("--context", type=int, metavar="N", help="tokens in the cache, for --costs and --box (0)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON instead of text")
    shown.add_argument("--csv", action="store_true", help="print CSV instead of text")
    add("--plot", type=Path, metavar="FILE", help="draw the answer (.png, .svg; needs matplotlib)")
    add("--html", type=Path, metavar="FILE", help="write one page with text and plots (likewise)")
    parser.set_defaults(func=main)


def main(args: argparse.Namespace) -> int:
    """Exit code 0, or 2 for bad arguments or input."""
    try:
        answer, is_published = _answer(args)
        if args.plot is not None:
            from spec_kernels.planning import plots

            plots.draw(answer, args.plot)
        if args.html is not None:
            from spec_kernels.planning import page

            page.write(answer, args.html)
    except (ValueError, OSError) as error:
        print(f"spec-kernels viability: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(as_dict(answer, is_published), indent=1))
    elif args.csv:
        print(as_csv(answer), end="")
    else:
        print(render(answer, is_published))
    return 0


# Options that make it a question of the user's own.
_OWN = (
    "target_tok_s", "cycle_ms", "draft_steps", "batch", "plain_tok_s", "full_acc", "cond_acc",
    "log", "decode_json", "trace", "engine_log", "calibrate", "draft_overhead", "costs", "box",
    "context",
)  # fmt: skip


def _answer(args: argparse.Namespace):
    """(the answer, whether it is the published case)."""
    from spec_kernels.planning import published_case, viability
    from spec_kernels.planning.answer import (
        DEFAULT_NUM_DRAFTS,
        DEFAULT_TARGETS,
        Cycle,
        make_answer,
    )

    acceptance = _acceptance(args)
    if args.tail is not None and acceptance is None:
        raise ValueError("--tail: expected rates that it continues (--full-acc, --log, ...)")
    if all(getattr(args, name) is None for name in _OWN):
        return published_case.case(), True
    cycles = [Cycle(ms, "--cycle-ms") for ms in args.cycle_ms or ()]
    batch = args.batch
    if batch is None:
        batch = 1 if acceptance is None else acceptance.batch
    plain_tok_s = args.plain_tok_s
    if args.calibrate is not None:
        length, speed = args.calibrate
        ms = viability.calibrated_cycle_ms(length, speed, batch)
        cycles.append(Cycle(ms, f"--calibrate: accept length {length:g} at {speed:g} tok/s"))
    if args.draft_overhead is not None:
        if plain_tok_s is None:
            raise ValueError("--draft-overhead: expected --plain-tok-s, of which it is a share")
        ms = viability.overhead_cycle_ms(args.draft_overhead, plain_tok_s, batch)
        cycles.append(
            Cycle(
                ms,
                f"the naive model: a plain step and {args.draft_overhead:g} of it for drafting, as "
                "if verifying several tokens cost what decoding one does",
            )
        )
    costs, chains, trees = None, (), ()
    measured = _measured(args)
    if measured is not None:
        from spec_kernels.planning.costs import chain_choices, chain_cycle, traced_choices
        from spec_kernels.planning.inputs import trace_texts

        num_drafts = args.draft_steps
        if num_drafts is None:
            num_drafts = (acceptance and acceptance.num_drafts) or DEFAULT_NUM_DRAFTS
        where = {"context": args.context or 0, "batch": batch}
        costs = chain_cycle(measured, num_drafts, series=args.series, **where)
        if args.trace is not None:
            trace, _ = trace_texts(args.trace, args.series)
            chains, trees = traced_choices(measured, trace, **where)
        elif acceptance is not None:
            chains = chain_choices(measured, acceptance, tail=args.tail, **where)
    return make_answer(
        args.target_tok_s or DEFAULT_TARGETS,
        cycles,
        args.draft_steps,
        args.batch,
        plain_tok_s,
        acceptance,
        args.tail,
        costs,
        chains,
        trees,
    ), False


def _measured(args: argparse.Namespace):
    """The figures that --costs and --box name, or None."""
    if args.costs is None and args.box is None:
        if args.context is not None:
            raise ValueError("--context: expected --costs or --box with it")
        return None
    from spec_kernels.planning import measurements, published

    base = published.predicted_costs(args.box or published.DEFAULT_BOX)
    return base if args.costs is None else measurements.load(args.costs, base)


def _acceptance(args: argparse.Namespace):
    """What the one source that was given says, or None."""
    from spec_kernels.planning import inputs, viability

    for option, takes in (
        ("series", ("log", "decode_json", "trace")),
        ("counts", ("log", "full_acc", "cond_acc")),
    ):
        if getattr(args, option) is not None and all(getattr(args, t) is None for t in takes):
            names = ", ".join("--" + t.replace("_", "-") for t in takes)
            raise ValueError(f"--{option}: expected one of {names} with it")
    if args.full_acc is not None:
        return inputs.by_hand(args.full_acc, "--full-acc", args.counts)
    if args.cond_acc is not None:
        full = viability.full_from_conditional(args.cond_acc)
        return inputs.by_hand(full, "--cond-acc", args.counts)
    if args.log is not None:
        return inputs.read_training_log(args.log, args.series, args.counts)
    if args.decode_json is not None:
        return inputs.read_decode_report(args.decode_json, args.series)
    if args.trace is not None:
        return inputs.read_trace(args.trace, args.series, args.draft_steps)
    if args.engine_log is not None:
        return inputs.read_engine_log(args.engine_log, args.draft_steps)
    return None


# What is printed.


def _plural(num: int, what: str) -> str:
    return f"{num} {what}{'s' * (num != 1)}"


def _estimate(value, decimals: int) -> str:
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


def _in_words(answer) -> list[str]:
    """The answer first: each target, break-even, the drafter, what would help more."""
    drafts = _plural(answer.num_drafts, "draft")

    def needs(rows) -> str:
        parts = []
        for r in rows:
            if not r.reachable:
                takes = "out of reach"
            elif r.accept_length <= 1:
                takes = "no draft need be right"
            else:
                takes = f"conditional accuracy {r.bounded:.2f}"
            parts.append(f"{r.accept_length:.2f} at {r.cycle_ms:.3g} ms ({takes})")
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
            text = f"{_speed(p.tok_s.value)} tok/s at {p.cycle.ms:.3g} ms"
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


def _requirements_table(answer) -> list[str]:
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


def _predictions_table(answer) -> list[str]:
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


def _choices_table(answer, title: str, rows, best) -> list[str]:
    lines = ["", f"  {title:<34}   accept length   cycle, ms      tok/s"]
    for c in rows:
        mark = "  best" if c is best else ""
        lines.append(
            f"  {c.shape!s:<34}   {c.shape.accept_length:13.2f}   {c.cycle_ms:9.2f}  "
            f"{answer.batch * c.tok_s:9.1f}{mark}"
        )
    return lines


def render(answer, is_published: bool = False) -> str:
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
    if is_published:
        lines += ["", *_published_table()]
    elif answer.costs is not None:
        lines += ["", "Where the cycle's time goes", *answer.costs.table()]
    lines += ["", "Assumptions"]
    lines += [line for text in answer.assumptions for line in _wrap("- ", text)]
    return "\n".join(lines)


def _published_table() -> list[str]:
    from spec_kernels.planning import published, published_case

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


def as_dict(answer, is_published: bool = False) -> dict:
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
    if is_published:
        from spec_kernels.planning import published_case

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


def as_csv(answer) -> str:
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
