"""What benchmarks of the loop share: the bundled models, held-out prompts, ratios over rounds."""

from __future__ import annotations

import json

import numpy as np

from spec_kernels.decode.cli import ASSETS
from spec_kernels.models.config import DrafterConfig, TargetConfig
from spec_kernels.models.drafter import Drafter
from spec_kernels.models.target import Target
from spec_kernels.testing.timing import Ratio


def held_out(count: int) -> list[list[int]]:
    prompts = json.loads((ASSETS / "prompts.json").read_text())
    return [prompts[i * len(prompts) // count]["token_ids"] for i in range(count)]


def models(comm) -> tuple[Target, Drafter]:
    """The bundled ones."""
    num_layers = TargetConfig.from_json(ASSETS / "target").num_hidden_layers
    layers = DrafterConfig.from_json(ASSETS / "drafter").captured_layers(num_layers)
    target = Target.load(ASSETS / "target", comm, captured_layers=layers)
    return target, Drafter.load(ASSETS / "drafter", target)


def quotient(rival: list[float], ours: list[float]) -> Ratio:
    values = np.array(rival) / np.array(ours)
    return Ratio(*(float(np.percentile(values, p)) for p in (50, 10, 90)))
