"""Triton kernel of ``hidden_capture``: one program a row, which stays in registers up to 16384
columns; a longer one is read again for the scaled store.

The order in which the squares of a row are added depends on its length alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.ops.triton_common import check_device, round_to

_WHOLE = 16384  # columns that stay in registers
_PART = 8192  # columns at a time of longer rows
_PER_WARP = 512


@triton.jit
def _add(x, residual, capture, columns, inside, HAS_X: tl.constexpr, HAS_CAPTURE: tl.constexpr):
    """The sum as later readers of the residual see it, rounded, in fp32; 0 outside the row."""
    row = tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        row += tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = round_to(row, residual.dtype.element_ty)
    if HAS_X:
        tl.store(residual + columns, rounded, mask=inside)
    if HAS_CAPTURE:
        tl.store(capture + columns, rounded, mask=inside)
    return rounded.to(tl.float32)


@triton.jit
def _store_scaled(row, scale, weight, out, columns, inside):
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + columns, round_to(row * scale * factor, out.dtype.element_ty), mask=inside)


@triton.jit
def _inverse_root(squares, hidden, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, hidden.to(tl.float32)) + eps))


@triton.jit(do_not_specialize=["hidden", "eps"])
def hidden_capture_kernel(
    x,
    residual,
    weight,
    out,
    capture,
    hidden,
    eps,
    stride_x,
    stride_r,
    stride_o,
    stride_c,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_X: tl.constexpr,
    HAS_CAPTURE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    x += t * stride_x
    residual += t * stride_r
    out += t * stride_o
    capture += t * stride_c
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        inside = columns < hidden
        row = _add(x, residual, capture, columns, inside, HAS_X, HAS_CAPTURE)
        scale = _inverse_root(tl.sum(row * row, 0), hidden, eps)
        _store_scaled(row, scale, weight, out, columns, inside)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden, BLOCK):
            inside = start + columns < hidden
            row = _add(x, residual, capture, start + columns, inside, HAS_X, HAS_CAPTURE)
            squares += row * row
        scale = _inverse_root(tl.sum(squares, 0), hidden, eps)
        # The stores of a thread are read back by whichever thread holds the column now.
        tl.debug_barrier()
        for start in range(0, hidden, BLOCK):
            inside = start + columns < hidden
            row = tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
            _store_scaled(row, scale, weight, out, start + columns, inside)


def block_sizes(hidden: int) -> dict[str, int | bool]:
    """What the kernel is compiled for, of a row's length."""
    whole = hidden <= _WHOLE
    block = triton.next_power_of_2(hidden) if whole else _PART
    return {"BLOCK": block, "WHOLE": whole}


def num_warps(block: int) -> int:
    return max(1, min(16, block // _PER_WARP))


def hidden_capture_triton(x, residual, weight, eps, out, capture, slot) -> None:
    """The arguments of the schema."""
    check_device("hidden_capture", residual.device)
    num_rows, hidden = residual.shape
    if residual.numel() == 0:
        return
    # What a call does not have is never looked at.
    added = residual if x is None else x
    captured = residual if capture is None else capture.select(1, slot)
    sizes = block_sizes(hidden)
    with torch.cuda.device_of(residual):  # Triton launches on the current device
        hidden_capture_kernel[(num_rows,)](
            added,
            residual,
            weight,
            out,
            captured,
            hidden,
            eps,
            added.stride(0),
            residual.stride(0),
            out.stride(0),
            captured.stride(0),
            **sizes,
            HAS_X=x is not None,
            HAS_CAPTURE=capture is not None,
            num_warps=num_warps(sizes["BLOCK"]),
            enable_fp_fusion=False,
        )
