"""Timing for benchmarks: contenders take turns, so that a noisy machine disturbs all alike."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds a call."""

    samples: np.ndarray

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def best(self) -> float:
        return float(self.samples.min())

    def percentile(self, p: float) -> float:
        return float(np.percentile(self.samples, p))


@dataclass(frozen=True)
class Ratio:
    """How many times faster: median over rounds of rival's time / ours, with 10-90 % spread."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}-{self.high:.2f}]"


def time_in_turns(
    contenders: dict[str, Callable[[], object]], *, rounds: int = 21, target_ms: float = 5.0
) -> dict[str, Timing]:
    """Times each callable in turns; a sample is the mean of the calls that fill ``target_ms``."""
    calls = {}
    for name, function in contenders.items():
        function()
        start = time.perf_counter()
        function()
        once = time.perf_counter() - start
        calls[name] = max(1, min(10_000, int(target_ms / 1e3 / max(once, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                function()
            samples[name].append((time.perf_counter() - start) / calls[name] * 1e6)
    return {name: Timing(np.array(s)) for name, s in samples.items()}


def ratio(rival: Timing, ours: Timing) -> Ratio:
    r = rival.samples / ours.samples
    return Ratio(*(float(np.percentile(r, p)) for p in (50, 10, 90)))


def gemm_gflops(dtype: torch.dtype, size: int = 1024) -> float:
    """This machine's matrix-multiply rate, the ceiling for compute-bound kernels."""
    a = torch.randn(size, size).to(dtype)
    b = torch.randn(size, size).to(dtype)
    t = time_in_turns({"gemm": lambda: a @ b}, rounds=9)["gemm"]
    return 2 * size**3 / t.best / 1e3


def copy_gbps(num_bytes: int = 1 << 28) -> float:
    """Bytes read plus written a second by a large copy: the ceiling when memory binds."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    t = time_in_turns({"copy": lambda: target.copy_(source)}, rounds=5, target_ms=1.0)["copy"]
    return 2 * num_bytes / t.best / 1e3


def machine() -> dict[str, object]:
    """What a result must carry to be believed: where, when and on which commit it was measured."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit or "unknown",
    }


def write_json(path: str | Path, rows: list[dict]) -> None:
    Path(path).write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
