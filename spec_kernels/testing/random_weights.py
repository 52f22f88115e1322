"""Models of any shape without a checkpoint: random weights, made where they are used."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spec_kernels.ops.moe_experts import INT4_PER_WORD

# Of a number that is uniform among -8 .. 7.
_INT4_DEVIATION = (255 / 12) ** 0.5


class RandomWeights:
    """What a model reads instead of a ``Checkpoint``: every tensor it asks for, of any shape.

    Matrices keep the size of what they multiply; norms are about 1, biases and ``d2t`` are 0. The
    same seed gives the same weights, as long as they are asked for in the same order.

    Args:
        int4_group: elements that share a scale in routed experts, which are then packed INT4.
    """

    directory = Path("random weights")

    def __init__(
        self, device: torch.device | str = "cpu", seed: int = 0, int4_group: int | None = None
    ):
        self.device = torch.device(device)
        self._group = int4_group
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return name == "d2t"

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Tensor:
        """A part of a tensor of full shape ``shape``, as ``Checkpoint.read`` cuts it."""
        size = _part(shape, rows, columns)
        if not dtype.is_floating_point or name.endswith("bias"):
            return torch.zeros(size, dtype=dtype, device=self.device)
        values = torch.randn(size, dtype=dtype, device=self.device, generator=self._generator)
        if len(shape) == 1:
            return values.mul_(0.1).add_(1.0)
        return values.mul_(shape[-1] ** -0.5)

    def holds_int4(self, name: str) -> bool:
        return self._group is not None

    def int4_group(self, name: str, num_columns: int) -> int:
        return self._group

    def read_int4(
        self,
        name: str,
        shape: tuple[int, int],
        group: int,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Words and scales, as ``Checkpoint.read_int4``."""
        num_rows, num_columns = _part(shape, rows, columns)
        words = torch.randint(
            -(2**31),
            2**31,
            (num_rows, num_columns // INT4_PER_WORD),
            dtype=torch.int32,
            device=self.device,
            generator=self._generator,
        )
        scale = shape[1] ** -0.5 / _INT4_DEVIATION
        size = (num_rows, num_columns // group)
        return words, torch.full(size, scale, dtype=torch.bfloat16, device=self.device)

    def finish(self) -> None:
        """Nothing is left over."""


def _part(shape: tuple[int, ...], *cuts: slice | None) -> tuple[int, ...]:
    cuts = (*cuts, *[None] * len(shape))
    return tuple(
        size if cut is None else len(range(*cut.indices(size)))
        for size, cut in zip(shape, cuts, strict=False)
    )
