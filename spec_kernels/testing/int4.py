"""INT4 weights of the ``pack-quantized`` format, made for tests and benchmarks.

The package itself only reads them: what a checkpoint holds is never quantised again.
"""

from __future__ import annotations

import torch


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Integers -8..7 ``[..., K]`` as int32 words ``[..., K / 8]``, each stored as q + 8."""
    nibbles = (values.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    return (nibbles << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def quantize_int4(weight: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and bfloat16 scales ``[..., K / group]`` of ``weight [..., K]``, to nearest."""
    groups = weight.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1) / 7).clamp(min=1e-6).to(torch.bfloat16)
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    return pack_int4(values.flatten(-2)), scale


def random_int4(
    *shape: int, group: int = 32, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and scales of ``[..., K]`` weights, every nibble as likely, of deviation K ** -0.5.

    They stand on the generator's device.
    """
    *rows, columns = shape
    device = generator.device
    words = torch.randint(
        -(2**31),
        2**31,
        (*rows, columns // 8),
        generator=generator,
        device=device,
        dtype=torch.int32,
    )
    spread = 0.5 + torch.rand(*rows, columns // group, generator=generator, device=device)
    # A uniform nibble has a deviation of 4.6.
    scale = spread / (4.6 * max(1, columns) ** 0.5)
    return words, scale.to(torch.bfloat16)
