"""A target and its drafter, loaded together; the bundled ones unless others are named."""

from __future__ import annotations

from pathlib import Path

import torch

from spec_kernels.comm import Communicator
from spec_kernels.models.config import DrafterConfig, TargetConfig
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.target import Target

ASSETS = Path(__file__).resolve().parent.parent / "assets"
TARGET, DRAFTER = ASSETS / "target", ASSETS / "drafter"


def load_pair(
    target: str | Path = TARGET,
    drafter: str | Path = DRAFTER,
    comm: Communicator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    parallel: str = "auto",
) -> tuple[Target, Drafter | AbsentDrafter]:
    """This rank's parts of both; the target captures what the drafter's config asks for.

    Args:
        target, drafter: directories with ``config.json`` and safetensors.
        comm: the ranks that share them; None for one.
        parallel: of the drafter, see ``Drafter``.

    Raises:
        ValueError: a checkpoint cannot be used, or the two do not fit.
    """
    num_layers = TargetConfig.from_json(target).num_hidden_layers
    layers = DrafterConfig.from_json(drafter).captured_layers(num_layers)
    loaded = Target.load(target, comm or Communicator.single(), dtype, device, layers)
    return loaded, Drafter.load(drafter, loaded, parallel)
