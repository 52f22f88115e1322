"""What each stage of ``spec-kernels train`` runs, and with which part of the time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from spec_kernels.training import corpus, drafter, export, generate, loop, settle, target
from spec_kernels.training.cli import DEFAULT_MINUTES, STAGES
from spec_kernels.training.workers import Workers, launch

# Each stage's share of the time of --stage all; the rest goes to the corpus and the figures.
_SHARES = {"target": 0.66, "settle": 0.12, "generate": 0.06, "drafter": 0.14}
# One token more than the drafter's windows, so that every window has a next token.
_TEXT_TOKENS = 257
_OWN_TEXTS = 192


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


def run_target(workers: Workers, args: argparse.Namespace) -> None:
    # Ends where settle starts, which takes the rate to 0.
    schedule = _schedule(args, "target", args.learning_rate, final_share=settle.RATE_SHARE)
    target.train(args.out, schedule, use_muon=args.optimizer == "muon", **_common(args, workers))


def run_settle(workers: Workers, args: argparse.Namespace) -> None:
    peak = args.learning_rate * settle.RATE_SHARE
    schedule = _schedule(args, "settle", peak, warmup=10, decay_share=0.95)
    settle.train(args.out, schedule, **_common(args, workers))


def run_own(workers: Workers, args: argparse.Namespace) -> None:
    """Greedy texts of the target before settle: what it does wrong."""
    generate.generate(
        args.out,
        export.load_target(_assets(args) / "target"),
        _OWN_TEXTS,
        settle.OWN_TOKENS,
        prompt_tokens=settle.OWN_PROMPT_TOKENS,
        batch=96,
        seed=args.seed,
        temperatures=(0.0,),
        name="own",
        workers=workers,
    )


def run_generate(workers: Workers, args: argparse.Namespace) -> None:
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


def run_drafter(workers: Workers, args: argparse.Namespace) -> None:
    model = export.load_target(_assets(args) / "target")
    schedule = _schedule(args, "drafter", args.learning_rate, decay_share=0.6)
    drafter.train(args.out, model, schedule, **_common(args, workers))


_IN_WORKERS = {
    "target": run_target,
    "settle": run_settle,
    "generate": run_generate,
    "drafter": run_drafter,
}


def _record(args: argparse.Namespace, stage: str) -> None:
    """settings.json keeps what each stage ran with, for the card."""
    path = args.out / "settings.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    names = ("seed", "workers", "minutes", "steps", "optimizer", "learning_rate")
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.steps is None:
        values["minutes"] = round(_minutes(args, stage), 2)
    settings[stage] = values
    path.write_text(json.dumps(settings, indent=1) + "\n")


def run(args: argparse.Namespace) -> None:
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
        if stage == "settle" and not (args.out / "own.npy").is_file():
            launch(args.workers, run_own, args)
            generate.merge(args.out, args.workers, _OWN_TEXTS, "own")
        launch(args.workers, _IN_WORKERS[stage], args)
        if stage in ("target", "settle"):
            export.publish_target(args.out, _assets(args), f"{stage}.safetensors")
        elif stage == "generate":
            generate.merge(args.out, args.workers, args.sequences)
        elif stage == "drafter":
            config = drafter.bundled_config(target.BUNDLED)
            export.publish_drafter(args.out, _assets(args), config)
