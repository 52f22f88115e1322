"""``spec-kernels train``: makes the bundled target and drafter, stage by stage."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from spec_kernels.training import corpus, drafter, export, generate, loop, target

STAGES = ("corpus", "target", "generate", "drafter", "export", "all")
_TARGET_SHARE = 0.75
_GENERATE_SHARE = 0.07
DEFAULT_MINUTES = 100.0


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train the small target and its EAGLE-3 drafter on this Python's standard library",
        description=__doc__,
    )
    parser.add_argument("--stage", choices=STAGES, default="all")
    parser.add_argument("--out", type=Path, default=Path("runs/bundled"), help="working directory")
    parser.add_argument(
        "--assets", type=Path, help="where the published files go (default: OUT/assets)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"of the stage; with --stage all, of all stages together (default {DEFAULT_MINUTES})",
    )
    parser.add_argument("--steps", type=int, help="of the target or drafter, instead of minutes")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sequences", type=int, default=8000, help="texts to generate")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile layers (needs a C++ compiler)"
    )
    parser.set_defaults(func=main)


def _record(out: Path, stage: str, values: dict) -> None:
    """settings.json keeps what each stage ran with, for the card."""
    path = out / "settings.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    settings[stage] = values
    path.write_text(json.dumps(settings, indent=1) + "\n")


def _schedule(args: argparse.Namespace, share: float, rate: float) -> loop.Schedule:
    if args.steps is not None:
        return loop.Schedule(rate, num_steps=args.steps)
    if args.stage == "all":
        return loop.Schedule(rate, minutes=(args.minutes or DEFAULT_MINUTES) * share)
    return loop.Schedule(rate, minutes=args.minutes or DEFAULT_MINUTES)


def main(args: argparse.Namespace) -> int:
    for name in ("minutes", "steps", "sequences", "threads"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ValueError(f"train: --{name}: expected more than 0, got {value}")
    torch.set_num_threads(args.threads)
    out, is_all = args.out, args.stage == "all"
    assets = args.assets or out / "assets"
    if is_all or args.stage == "corpus":
        if not (args.resume and (out / "prompts.json").is_file()):
            summary = corpus.prepare(out, args.seed)
            print(json.dumps({k: v for k, v in summary.items() if k != "held_out_files"}))
    if is_all or args.stage == "target":
        settings = {
            "seed": args.seed,
            "optimizer": args.optimizer,
            "learning_rate": args.learning_rate,
        }
        _record(out, "target", settings)
        target.train(
            out,
            _schedule(args, _TARGET_SHARE, args.learning_rate),
            seed=args.seed,
            use_muon=args.optimizer == "muon",
            use_compile=not args.no_compile,
            resume=args.resume,
        )
        export.publish_target(out, assets)
    if is_all or args.stage == "generate":
        share = _GENERATE_SHARE * (args.minutes or DEFAULT_MINUTES) if is_all else args.minutes
        model = export.load_target(assets / "target")
        generate.generate(out, model, args.sequences, 257, seed=args.seed, minutes=share)
    if is_all or args.stage == "drafter":
        _record(out, "drafter", {"seed": args.seed, "learning_rate": args.learning_rate})
        model = export.load_target(assets / "target")
        drafter.train(
            out,
            model,
            _schedule(args, 1.0 - _TARGET_SHARE - _GENERATE_SHARE, args.learning_rate),
            seed=args.seed,
            use_compile=not args.no_compile,
            resume=args.resume,
        )
        export.publish_drafter(out, assets, drafter.bundled_config(model.config))
    if is_all or args.stage == "export":
        command = "spec-kernels train --stage all --minutes 100"
        print(json.dumps(export.export(out, assets, command), indent=1))
    return 0
