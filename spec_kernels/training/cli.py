"""``spec-kernels train``: makes the bundled target and drafter, stage by stage."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from spec_kernels.training import corpus, drafter, export, generate, loop, settle, target
from spec_kernels.training.workers import Workers, launch

# Each stage's share of the time of --stage all; the rest goes to the corpus and the figures.
_SHARES = {"target": 0.66, "settle": 0.12, "generate": 0.06, "drafter": 0.14}
STAGES = ("corpus", *_SHARES, "export")
DEFAULT_MINUTES = 100.0
# One token more than a training window, so that every window has a next token.
_TEXT_TOKENS = 257


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train the small target and its EAGLE-3 drafter on this Python's standard library",
        description="Stages in their order: " + ", ".join(STAGES) + ". Each reads what the ones "
        "before it left in OUT and continues there with --resume.",
    )
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--out", type=Path, default=Path("runs/bundled"), help="working directory")
    parser.add_argument(
        "--assets", type=Path, help="where the published files go (default: OUT/assets)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"of the stage; with --stage all, of all stages together (default {DEFAULT_MINUTES})",
    )
    parser.add_argument("--steps", type=int, help="of a training stage, instead of minutes")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workers", type=int, default=1, help="data-parallel processes of one thread each"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="with one worker"
    )
    parser.add_argument("--sequences", type=int, default=4000, help="texts to generate at most")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile layers (that needs g++)"
    )
    parser.set_defaults(func=main)


def _minutes(args: argparse.Namespace, stage: str) -> float:
    minutes = args.minutes or DEFAULT_MINUTES
    return minutes * _SHARES[stage] if args.stage == "all" else minutes


def _schedule(args: argparse.Namespace, stage: str, peak: float, **shape) -> loop.Schedule:
    if args.steps is not None:
        return loop.Schedule(peak, num_steps=args.steps, **shape)
    return loop.Schedule(peak, minutes=_minutes(args, stage), **shape)


def _assets(args: argparse.Namespace) -> Path:
    return args.assets or args.out / "assets"


def _common(args: argparse.Namespace, workers: Workers) -> dict:
    return {
        "seed": args.seed,
        "use_compile": not args.no_compile,
        "resume": args.resume,
        "workers": workers,
    }


def _target(workers: Workers, args: argparse.Namespace) -> None:
    # Ends where settle starts, which takes the rate to 0.
    schedule = _schedule(args, "target", args.learning_rate, final_share=settle.RATE_SHARE)
    target.train(args.out, schedule, use_muon=args.optimizer == "muon", **_common(args, workers))


def _settle(workers: Workers, args: argparse.Namespace) -> None:
    peak = args.learning_rate * settle.RATE_SHARE
    schedule = _schedule(args, "settle", peak, warmup=10, decay_share=0.95)
    settle.train(args.out, schedule, **_common(args, workers))


def _generate(workers: Workers, args: argparse.Namespace) -> None:
    model = export.load_target(_assets(args) / "target")
    generate.generate(
        args.out,
        model,
        args.sequences,
        _TEXT_TOKENS,
        seed=args.seed,
        minutes=_minutes(args, "generate"),
        workers=workers,
    )


def _drafter(workers: Workers, args: argparse.Namespace) -> None:
    model = export.load_target(_assets(args) / "target")
    schedule = _schedule(args, "drafter", args.learning_rate, decay_share=0.6)
    drafter.train(args.out, model, schedule, **_common(args, workers))


def _record(args: argparse.Namespace, stage: str) -> None:
    """settings.json keeps what each stage ran with, for the card."""
    path = args.out / "settings.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    names = ("seed", "workers", "minutes", "steps", "optimizer", "learning_rate")
    settings[stage] = {name: getattr(args, name) for name in names if getattr(args, name)}
    path.write_text(json.dumps(settings, indent=1) + "\n")


def main(args: argparse.Namespace) -> int:
    for name in ("minutes", "steps", "sequences", "threads", "workers", "learning_rate"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            flag = name.replace("_", "-")
            raise ValueError(f"train: --{flag}: expected more than 0, got {value}")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in STAGES if args.stage == "all" else (args.stage,):
        if stage == "corpus":
            if not (args.resume and (args.out / "prompts.json").is_file()):
                summary = corpus.prepare(args.out, args.seed)
                del summary["held_out_files"]
                print(json.dumps(summary))
            continue
        if stage == "export":
            print(json.dumps(export.export(args.out, _assets(args)), indent=1))
            continue
        _record(args, stage)
        function = {
            "target": _target,
            "settle": _settle,
            "generate": _generate,
            "drafter": _drafter,
        }[stage]
        launch(args.workers, function, args)
        if stage in ("target", "settle"):
            export.publish_target(args.out, _assets(args), f"{stage}.pt")
        elif stage == "generate":
            generate.merge(args.out, args.workers, args.sequences)
        elif stage == "drafter":
            config = drafter.bundled_config(target.BUNDLED)
            export.publish_drafter(args.out, _assets(args), config)
    return 0
