"""``spec-kernels``: one command with the parts of the package as subcommands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Each module has add_parser(subparsers), which sets func(args) -> exit code. They are light: what a
# subcommand needs is imported when it runs.
_MODULES = (
    "spec_kernels.decode.cli",
    "spec_kernels.training.cli",
    "spec_kernels.comm.cli",
    "spec_kernels.planning.cli",
    "spec_kernels.info",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that ``argv`` (default: the process's arguments) names.

    Exit codes: 0 done, 1 the subcommand's own verdict, 2 bad arguments or input, 130 interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="spec-kernels", description="Speculative decoding kernels and their reference loop."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _MODULES:
        importlib.import_module(name).add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.func(args) or 0
    except KeyboardInterrupt:
        print(f"spec-kernels {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody left to tell.
        sys.stdout = None
        return 1


if __name__ == "__main__":
    sys.exit(main())
