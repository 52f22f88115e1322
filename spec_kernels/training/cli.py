"""``spec-kernels train``: makes the bundled target and drafter, stage by stage."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

# In their order; each reads what the ones before it left in --out.
STAGES = ("corpus", "target", "settle", "generate", "drafter", "export")
DEFAULT_MINUTES = 100.0


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train the small target and its EAGLE-3 drafter on this Python's standard library",
        description="Stages in their order: " + ", ".join(STAGES) + ". Each reads what the ones "
        "before it left in OUT, and goes on from its last checkpoint with --resume.",
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
        "--threads", type=int, default=os.cpu_count(), help="of the one process without --workers"
    )
    parser.add_argument("--sequences", type=int, default=4000, help="texts to generate at most")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile layers (that needs g++)"
    )
    parser.set_defaults(func=main)


def main(args: argparse.Namespace) -> int:
    """Runs the stages that ``args`` names. Exit code 2 for input that cannot be used."""
    try:
        for name in ("minutes", "steps", "sequences", "threads", "workers", "learning_rate"):
            value = getattr(args, name)
            if value is not None and not value > 0:
                flag = name.replace("_", "-")
                raise ValueError(f"train: --{flag}: expected more than 0, got {value}")
        # Imported here: torch and the tokenizer take seconds, and other subcommands do not train.
        importlib.import_module("spec_kernels.training.stages").run(args)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("spec_kernels"):
            raise
        print(f"spec-kernels train: needs {error.name}: pip install {error.name}", file=sys.stderr)
        return 2
    except (ValueError, FileNotFoundError) as error:
        print(f"spec-kernels train: {error}", file=sys.stderr)
        return 2
    return 0
