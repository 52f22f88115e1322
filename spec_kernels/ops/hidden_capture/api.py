"""Residual add, RMSNorm and hidden-state capture in one pass."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import FLOATS, check_last_dim, check_tensor, fail, run
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
    check_tensor(_OP, "residual", residual, (None, None), FLOATS)
    num_rows, hidden = residual.shape
    same = (residual.dtype,)
    device = residual.device
    check_tensor(_OP, "weight", weight, (hidden,), same, device)
    check_last_dim(_OP, "weight", weight)
    check_last_dim(_OP, "residual", residual)
    if out is None:
        out = torch.empty((num_rows, hidden), dtype=residual.dtype, device=device)
    else:
        check_tensor(_OP, "out", out, (num_rows, hidden), same, device)
        check_last_dim(_OP, "out", out)
        if out is residual:
            fail(_OP, "out", "a tensor other than residual", "the same tensor")
    if x is not None:
        check_tensor(_OP, "x", x, (num_rows, hidden), same, device)
        check_last_dim(_OP, "x", x)
    if capture is not None:
        check_tensor(_OP, "capture", capture, (None, None, hidden), same, device)
        check_last_dim(_OP, "capture", capture)
        if capture.shape[0] < num_rows:
            fail(_OP, "capture", f"at least {num_rows} rows", capture.shape[0])
        if not 0 <= slot < capture.shape[1]:
            fail(_OP, "slot", f"0 <= slot < {capture.shape[1]}", slot)
    args = (x, residual, weight, eps, out, capture, slot)
    run(_OP, backend, device, args, hidden_capture_reference)
    return out
