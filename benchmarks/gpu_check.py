"""What only a GPU can tell: each CUDA kernel against its reference, then its speed.

    python benchmarks/gpu_check.py --out report     writes report.json and report.md

Ops without a CUDA kernel are listed as such. Without a GPU nothing runs, and the report says so.
Exit code 1 if a check failed, or a kernel has none here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import spec_kernels
from spec_kernels import _library
from spec_kernels.ops.hidden_capture.reference import hidden_capture_reference
from spec_kernels.testing.compare import assert_as_accurate, assert_same_bits, poisoned
from spec_kernels.testing.timing import machine

COPY_BYTES = 1 << 30
HIDDEN = 7168
EPS = 1e-5
# A pool of inputs larger than this keeps the timed rows out of the L2 cache.
FLUSH_BYTES = 256 << 20


def _hidden_capture_inputs(num_rows, hidden, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, num_rows, hidden, generator=generator).to(device, dtype)
    weight = torch.rand(hidden, generator=generator).to(device, dtype)
    return x, residual, weight


def check_hidden_capture(device: str, backend: str) -> list[str]:
    """Raises AssertionError on the first wrong result; returns the cases that passed."""
    passed = []
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows, hidden in ((1, 1), (3, 255), (4, HIDDEN), (64, HIDDEN), (2, 16384), (0, 64)):
            for with_x in (True, False):
                x, residual, weight = _hidden_capture_inputs(num_rows, hidden, dtype, device)
                x = x if with_x else None
                capture = poisoned(num_rows + 2, 3, hidden, dtype=dtype, device=device)
                got_residual = residual.clone()
                got = spec_kernels.hidden_capture(
                    x, got_residual, weight, EPS, capture=capture, slot=1, backend=backend
                )
                want_residual, plain = residual.clone(), torch.empty_like(residual)
                hidden_capture_reference(x, want_residual, weight, EPS, plain, None, 0)
                assert_same_bits(got_residual, want_residual)
                assert_same_bits(capture[:num_rows, 1], want_residual)
                untouched = torch.cat([capture[:, 0], capture[:, 2], capture[num_rows:, 1]])
                assert untouched.isnan().all(), "capture was written outside its slot"
                r = want_residual.double()
                exact = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + EPS) * weight.double()
                assert_as_accurate(got, exact, plain)
                name = str(dtype).removeprefix("torch.")
                passed.append(f"[{num_rows}, {hidden}] {name}{'' if with_x else ' without x'}")
    return passed


def _microseconds(function: Callable[[int], object], calls: int = 200, rounds: int = 7) -> float:
    """Device time of a call: median over replays of a graph of ``calls``, free of launch costs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            function(i)
    samples = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(samples[1:])[rounds // 2]


def _copy_gbps(device: str) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _microseconds(lambda i: target.copy_(source), calls=10) / 1e3


def time_hidden_capture(device: str) -> list[dict]:
    """Kernel against three PyTorch ops, and its share of the measured copy bandwidth."""
    copy_gbps = _copy_gbps(device)
    rows = []
    dtype = torch.bfloat16
    for num_rows in (1, 4, 16, 64, 1024):
        row_bytes = num_rows * HIDDEN * 2
        pool = [
            _hidden_capture_inputs(num_rows, HIDDEN, dtype, device)
            for _ in range(max(2, min(512, FLUSH_BYTES // (5 * row_bytes))))
        ]
        capture = torch.empty(num_rows, 3, HIDDEN, dtype=dtype, device=device)
        out = torch.empty(num_rows, HIDDEN, dtype=dtype, device=device)

        def ours(i, pool=pool, capture=capture, out=out):
            x, residual, weight = pool[i % len(pool)]
            spec_kernels.hidden_capture(
                x, residual, weight, EPS, capture=capture, slot=1, out=out, backend="cuda"
            )

        def three_ops(i, pool=pool, capture=capture):
            x, residual, weight = pool[i % len(pool)]
            residual.add_(x)
            capture[:, 1].copy_(residual)
            torch.nn.functional.rms_norm(residual, (HIDDEN,), weight, EPS)

        us, rival = _microseconds(ours), _microseconds(three_ops)
        # x and residual are read; residual, capture and out written; the weight is read once.
        gbps = (5 * row_bytes + 2 * HIDDEN) / us / 1e3
        rows.append(
            {
                "op": "hidden_capture",
                "shape": [num_rows, HIDDEN],
                "dtype": "bfloat16",
                "us": round(us, 2),
                "three_ops_us": round(rival, 2),
                "times_faster": round(rival / us, 2),
                "gb_s": round(gbps, 1),
                "share_of_copy": round(gbps / copy_gbps, 3),
            }
        )
    return rows


CHECKS = {"hidden_capture": check_hidden_capture}
TIMINGS = {"hidden_capture": time_hidden_capture}


def run() -> dict:
    """The whole report as plain data."""
    report: dict = {
        "command": "python benchmarks/gpu_check.py",
        "machine": machine(),
        "ran": torch.cuda.is_available(),
        "gpu": None,
        "ops": {},
        "timings": [],
    }
    if not report["ran"]:
        report["why_not"] = (
            "torch finds no CUDA device" if torch.version.cuda else "torch was built without CUDA"
        )
        return report
    p = torch.cuda.get_device_properties(0)
    report["gpu"] = {"name": p.name, "sm": f"{p.major}{p.minor}", "cuda": torch.version.cuda}
    for name in _library.SCHEMAS:
        if not _library.has_kernel(name, "cuda"):
            reason = _library.LIBRARIES["cuda"].reason
            why = "" if reason == "loaded" else f" (_C_cuda: {reason})"
            report["ops"][name] = {"result": "no kernel", "detail": f"reference only{why}"}
        elif name not in CHECKS:
            report["ops"][name] = {"result": "UNCHECKED", "detail": "a kernel without a check here"}
        else:
            try:
                passed = CHECKS[name]("cuda", "cuda")
                torch.cuda.synchronize()
                report["ops"][name] = {"result": "passed", "detail": f"{len(passed)} cases"}
                if name in TIMINGS:
                    report["timings"] += TIMINGS[name]("cuda")
            except (AssertionError, ValueError, RuntimeError) as error:
                report["ops"][name] = {"result": "FAILED", "detail": str(error)}
    return report


def render(report: dict) -> str:
    """The report as Markdown."""
    m = report["machine"]
    lines = [
        "# GPU check",
        "",
        f"{m['date']}, commit {m['commit']}, torch {m['torch']}, {m['cpu']}",
        "",
    ]
    if not report["ran"]:
        return "\n".join([*lines, f"Nothing ran: {report['why_not']}. No figure here is measured."])
    gpu = report["gpu"]
    lines += [f"{gpu['name']}, sm_{gpu['sm']}, CUDA {gpu['cuda']}", ""]
    lines += ["| op | result | |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {row['result']} | {row['detail']} |" for name, row in report["ops"].items()
    ]
    if report["timings"]:
        keys = list(report["timings"][0])
        lines += ["", f"| {' | '.join(keys)} |", "|" + " --- |" * len(keys)]
        lines += [f"| {' | '.join(str(row[k]) for k in keys)} |" for row in report["timings"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks and times every CUDA kernel.")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    args = parser.parse_args()
    if args.out and not args.out.resolve().parent.is_dir():
        parser.error(f"--out: no directory {args.out.resolve().parent}")
    report = run()
    text = render(report)
    print(text)
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")
    return 1 if any(r["result"] in ("FAILED", "UNCHECKED") for r in report["ops"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
