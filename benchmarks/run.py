"""Runs every benchmark, one after the other, and gathers their results.

    python benchmarks/run.py                        all of them
    python benchmarks/run.py tree_attention decode  these
    python benchmarks/run.py --out results.json     and keep the figures

A benchmark checks its kernel before it times it; the run fails if one fails, after the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spec_kernels.testing.timing import machine

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    available = sorted(p.stem.removeprefix("bench_") for p in FOLDER.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description="Checks, then times, every op.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(available))
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each (%(default)g)")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(available))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(available)}")
    if args.out and not args.out.resolve().parent.is_dir():
        parser.error(f"--out: no directory {args.out.resolve().parent}")

    report: dict[str, object] = {"machine": machine(), "benchmarks": {}}
    failed = []
    for name in args.names or available:
        script = FOLDER / f"bench_{name}.py"
        print(f"\n==== {name}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, str(script), "--json", str(result)]
            try:
                code = subprocess.run(command, timeout=args.timeout).returncode
            except subprocess.TimeoutExpired:
                code = f"ended after {args.timeout:g} s"
            if code == 0 and not result.exists():
                code = "wrote no figures"
            if code == 0:
                report["benchmarks"][name] = {
                    "command": f"python benchmarks/{script.name}",
                    "seconds": round(time.monotonic() - start, 1),
                    **json.loads(result.read_text()),
                }
            else:
                failed.append(name)
                print(f"{name} FAILED ({code})", flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nfigures: {args.out}")
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
