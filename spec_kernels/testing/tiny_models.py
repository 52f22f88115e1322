"""A tiny target and drafter on disk, and batches and engines over them, for tests of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spec_kernels.decode.batch import Batch, Emitted
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.engine import Engine
from spec_kernels.models.drafter import Drafter
from spec_kernels.models.pair import load_pair
from spec_kernels.models.target import Target
from spec_kernels.testing import checkpoints

PROMPTS = [
    [3, 1, 4, 1, 5],
    [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3],
    [1],
]
PLANS = {
    "chain": DraftPlan("chain", 3),
    "static": DraftPlan("static", 3, 3, 10),
    "dynamic": DraftPlan("dynamic", 3, 3, 12),
}
DRAWN = {
    "chain, drawn": DraftPlan("chain", 3, sampled=True),
    "static, drawn": DraftPlan("static", 3, 3, 10, sampled=True),
}


@dataclass(frozen=True)
class Tiny:
    """Where the tiny checkpoints lie; the drafter is right about every second time."""

    target: Path
    drafter: Path

    def models(self, comm=None, parallel="auto", dtype=torch.float32) -> tuple[Target, Drafter]:
        return load_pair(self.target, self.drafter, comm, dtype, parallel=parallel)

    def engine(self, plan=PLANS["chain"], max_tokens=80, comm=None, parallel="auto", **options):
        models = self.models(comm, parallel)
        return Engine(*models, plan, max_tokens=max_tokens, **options)

    def batch(self, plan=PLANS["chain"], max_tokens=80, comm=None, parallel="auto", **options):
        models = self.models(comm, parallel)
        return Batch(*models, plan, max_tokens=max_tokens, **options)

    @classmethod
    def write(cls, root: Path) -> Tiny:
        tensors = checkpoints.target_tensors(checkpoints.TARGET, gain=0.7)
        drafter = checkpoints.knowing_drafter_tensors(checkpoints.DRAFTER, tensors)
        return cls(
            checkpoints.write_checkpoint(root / "target", checkpoints.TARGET, tensors),
            checkpoints.write_checkpoint(root / "drafter", checkpoints.DRAFTER, drafter),
        )


def drain(batch: Batch) -> dict[int, list[Emitted]]:
    """Steps until nobody decodes and nothing is under way: what each request was given."""
    parts: dict[int, list[Emitted]] = {}
    while True:
        found = batch.step()
        for part in found:
            parts.setdefault(part.request, []).append(part)
        if not found and not batch.num_requests:
            return parts


def tokens_of(parts: list[Emitted]) -> list[int]:
    """All tokens of a request, whose error is raised if it had one."""
    for part in parts:
        if part.error is not None:
            raise part.error
    return [token for part in parts for token in part.tokens]
