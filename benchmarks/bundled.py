"""What benchmarks of the loop share: held-out prompts, and ratios over rounds."""

from __future__ import annotations

import json

import numpy as np

from spec_kernels.models.pair import ASSETS
from spec_kernels.testing.timing import Ratio


def held_out(count: int) -> list[list[int]]:
    prompts = json.loads((ASSETS / "prompts.json").read_text())
    return [prompts[i * len(prompts) // count]["token_ids"] for i in range(count)]


def quotient(rival: list[float], ours: list[float]) -> Ratio:
    values = np.array(rival) / np.array(ours)
    return Ratio(*(float(np.percentile(values, p)) for p in (50, 10, 90)))
