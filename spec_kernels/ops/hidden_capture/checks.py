"""Argument checks of ``hidden_capture``, shared with the all-reduce that ends in it."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import FLOATS, check_last_dim, check_tensor, fail


def check_hidden_capture(op: str, residual, weight, out, capture, slot: int, **x) -> None:
    """Checks everything but overlaps. ``x`` is the one tensor to add, under its name in ``op``."""
    check_tensor(op, "residual", residual, (None, None), FLOATS)
    num_rows, hidden = residual.shape
    same = (residual.dtype,)
    device = residual.device
    check_tensor(op, "weight", weight, (hidden,), same, device)
    check_last_dim(op, "weight", weight)
    check_last_dim(op, "residual", residual)
    if out is not None:
        check_tensor(op, "out", out, (num_rows, hidden), same, device)
        check_last_dim(op, "out", out)
        if out is residual:
            fail(op, "out", "a tensor other than residual", "the same tensor")
    for name, t in x.items():
        if t is not None:
            check_tensor(op, name, t, (num_rows, hidden), same, device)
            check_last_dim(op, name, t)
    if capture is not None:
        check_tensor(op, "capture", capture, (None, None, hidden), same, device)
        check_last_dim(op, "capture", capture)
        if capture.shape[0] < num_rows:
            fail(op, "capture", f"at least {num_rows} rows", capture.shape[0])
        if not 0 <= slot < capture.shape[1]:
            fail(op, "slot", f"0 <= slot < {capture.shape[1]}", slot)


def new_out(residual: torch.Tensor) -> torch.Tensor:
    return torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
