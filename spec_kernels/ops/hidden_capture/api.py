"""Residual add, RMSNorm and hidden-state capture in one pass."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import run
from spec_kernels.ops.hidden_capture.checks import check_hidden_capture, new_out
from spec_kernels.ops.hidden_capture.reference import hidden_capture_reference

_OP = "hidden_capture"


def hidden_capture(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    capture: torch.Tensor | None = None,
    slot: int = 0,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``residual += x``; returns ``rms_norm(residual) * weight``; stores the residual on request.

    The sum is rounded to the residual's dtype before it is captured and normalised; arithmetic is
    fp32 and a row's bits depend on that row alone. Slot ``k`` of ``capture`` is meant for the input
    of layer ``aux_layers[k]`` (EAGLE-3: the residual stream entering a layer, all-reduced, before
    its norm).

    Args:
        x: ``[T, H]`` block output to add, or None (norm only, as for the first layer).
        residual: ``[T, H]`` float32 or bfloat16; updated in place. Rows may be strided.
        weight: ``[H]``, same dtype.
        eps: added to the mean square.
        capture: ``[M >= T, S, H]`` caller-owned buffer; rows ``:T`` of ``slot`` are overwritten.
        slot: capture slot, ``0 <= slot < S``.
        out: ``[T, H]`` result; may be ``x`` but not ``residual``; allocated when None.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above, ``slot`` is out of range, or
            ``out`` is ``residual``.
    """
    check_hidden_capture(_OP, residual, weight, out, capture, slot, x=x)
    if out is None:
        out = new_out(residual)
    args = (x, residual, weight, eps, out, capture, slot)
    run(_OP, backend, residual.device, args, hidden_capture_reference)
    return out
