"""Rotary position embedding: plain, linear and yarn frequencies, and both pair layouts.

Angles are computed from the positions of the call, so no table of some length can run out.
Yarn: arXiv 2309.00071; DeepSeek's use of mscale for the softmax scale: the modelling code published
with DeepSeek-V2 and -V3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spec_kernels.models.config import RopeConfig


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 where the context is not stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_dimension(num_rotations: float, dim: int, rope: RopeConfig) -> float:
    """The (real-valued) pair that turns num_rotations times within the original context."""
    length = rope.original_max_position_embeddings
    turns = math.log(length / (num_rotations * 2.0 * math.pi))
    return dim * turns / (2.0 * math.log(rope.theta))


def inverse_frequencies(
    rope: RopeConfig, dim: int, device: torch.device | str | None = None
) -> Tensor:
    """Radians a position for each of the dim / 2 pairs: float32 ``[dim / 2]``.

    Yarn keeps the pairs that turn at least beta_fast times in the original context, divides by
    factor those that turn at most beta_slow times, and blends linearly between.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"inverse_frequencies: dim: expected an even number >= 2, got {dim}")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    base = rope.theta**-exponents
    if rope.kind == "linear":
        base = base / rope.factor
    elif rope.kind == "yarn":
        low = _yarn_dimension(rope.beta_fast, dim, rope)
        high = _yarn_dimension(rope.beta_slow, dim, rope)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        span = high - low if high != low else 0.001
        pairs = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
        stretched = ((pairs - low) / span).clamp(0.0, 1.0)
        base = base * (1.0 - stretched) + base / rope.factor * stretched
    return base.to(device=device, dtype=torch.float32)


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 except for yarn.

    mscale and mscale_all_dim both given (and not 0): the ratio of their two terms, which is 1 for
    every DeepSeek and Kimi release; the rest of the scaling then stands in ``softmax_scale``.
    """
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def softmax_scale(rope: RopeConfig, qk_head_dim: int) -> float:
    """MLA's softmax scale: qk_head_dim^-0.5, times the squared yarn term of mscale_all_dim.

    Constant over the sequence length. Kimi-K2.5: 192^-0.5 * (0.1 ln 64 + 1)^2 = 0.144679.
    """
    scale = qk_head_dim**-0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """float32 cos and sin ``[..., D / 2]`` of ``positions [...]`` times ``frequencies [D / 2]``."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos() * factor, angles.sin() * factor


def apply_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (2i, 2i + 1) of ``x [..., D]``; DeepSeek's layout.

    cos, sin broadcast against ``[..., D / 2]``. Arithmetic in float32, the result in x's dtype.
    """
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return pairs.flatten(-2).to(x.dtype)


def apply_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D / 2) of ``x [..., D]``; Llama's layout.

    cos, sin broadcast against ``[..., D / 2]``. Arithmetic in float32, the result in x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
