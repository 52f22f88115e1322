"""Readable PyTorch for ``hidden_capture``: the oracle, and the fallback on every device."""

from __future__ import annotations

import torch

from spec_kernels._library import register_reference


def hidden_capture_reference(x, residual, weight, eps, out, capture, slot) -> None:
    if x is not None:
        residual.copy_((residual.float() + x.float()).to(residual.dtype))
    if capture is not None:
        capture[: residual.shape[0], slot].copy_(residual)
    r = residual.float()
    scale = torch.rsqrt(r.square().mean(-1, keepdim=True) + eps)
    out.copy_((r * scale * weight.float()).to(out.dtype))


register_reference("hidden_capture", hidden_capture_reference)
