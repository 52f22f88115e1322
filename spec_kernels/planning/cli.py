"""``spec-kernels viability``: what accuracy a speed takes, what a drafter's accuracy yields."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_kernels.planning.answer import Answer
    from spec_kernels.planning.inputs import Acceptance
    from spec_kernels.planning.measurements import Measurements


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
    from spec_kernels.planning import report

    try:
        answer = _answer(args)
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
        print(json.dumps(report.as_dict(answer), indent=1))
    elif args.csv:
        print(report.as_csv(answer), end="")
    else:
        print(report.render(answer))
    return 0


# All others make it a question of the user's own.
_OUTPUT = {"command", "func", "json", "csv", "plot", "html"}


def _answer(args: argparse.Namespace) -> Answer:
    from spec_kernels.planning import published_case, viability
    from spec_kernels.planning.answer import (
        DEFAULT_NUM_DRAFTS,
        DEFAULT_TARGETS,
        Cycle,
        make_answer,
    )

    if args.tail is not None and args.trace is not None:
        raise ValueError("--tail: expected no --trace, which is replayed as deep as recorded")
    acceptance = _acceptance(args)
    if args.tail is not None and acceptance is None:
        raise ValueError("--tail: expected rates that it continues (--full-acc, --log, ...)")
    if all(value is None for name, value in vars(args).items() if name not in _OUTPUT):
        return published_case.case()
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
    )


def _measured(args: argparse.Namespace) -> Measurements | None:
    """The figures that --costs and --box name, or None."""
    if args.costs is None and args.box is None:
        if args.context is not None:
            raise ValueError("--context: expected --costs or --box with it")
        return None
    from spec_kernels.planning import measurements, published

    base = published.predicted_costs(args.box or published.DEFAULT_BOX)
    return base if args.costs is None else measurements.load(args.costs, base)


def _acceptance(args: argparse.Namespace) -> Acceptance | None:
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
