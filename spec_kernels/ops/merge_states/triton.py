"""Triton kernel of ``merge_states``: a program for ``_ROWS`` rows and ``_BLOCK_D`` columns.

Parts are added in order, in fp32, relative to the greatest LSE so far. One whose LSE is -inf is not
read and changes no bit. Every part is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.ops.triton_common import LOG2E, check_device, finite_or_nan, round_to

_ROWS = 4
_BLOCK_D = 256


@triton.jit(do_not_specialize=["num_parts", "num_rows", "num_nodes", "num_heads"])
def merge_states_kernel(
    outs,
    lses,
    out,
    lse,
    num_parts,
    num_rows,
    num_nodes,
    num_heads,
    stride_ps,
    stride_pb,
    stride_pn,
    stride_ph,
    stride_ss,
    stride_sb,
    stride_sn,
    stride_sh,
    stride_ob,
    stride_on,
    stride_oh,
    stride_lb,
    stride_ln,
    stride_lh,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    head = row % num_heads
    node = row // num_heads % num_nodes
    b = row // num_heads // num_nodes
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    wanted = (columns < DIM)[None, :]
    part = (outs + b * stride_pb + node * stride_pn + head * stride_ph)[:, None] + columns[None, :]
    score_at = lses + b * stride_sb + node * stride_sn + head * stride_sh
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for _ in range(num_parts):
        score = tl.load(score_at, mask=real, other=-float("inf"))
        seen = score != -float("inf")
        value = tl.load(part, mask=seen[:, None] & wanted, other=0.0)
        new = tl.maximum(top, score, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(seen, new, 0.0)
        keep = tl.where(seen, tl.exp2((top - base) * LOG2E), 1.0)
        weight = tl.exp2((score - base) * LOG2E)
        total = total * keep + weight
        acc = acc * keep[:, None] + value.to(tl.float32) * weight[:, None]
        top = new
        part += stride_ps
        score_at += stride_ss
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    place = (out + b * stride_ob + node * stride_on + head * stride_oh)[:, None] + columns[None, :]
    result = round_to(finite_or_nan(acc / total[:, None]), out.dtype.element_ty)
    tl.store(place, result, mask=real[:, None] & wanted)
    if tl.program_id(1) == 0:
        log_sum = tl.where(empty, -float("inf"), top + tl.log2(total) / LOG2E)
        tl.store(lse + b * stride_lb + node * stride_ln + head * stride_lh, log_sum, mask=real)


def merge_states_triton(outs, lses, out, lse) -> None:
    check_device("merge_states", outs.device)
    num_parts, num_requests, num_nodes, num_heads, dim = outs.shape
    num_rows = num_requests * num_nodes * num_heads
    if num_rows == 0:
        return
    block = min(_BLOCK_D, triton.next_power_of_2(max(1, dim)))
    grid = (triton.cdiv(num_rows, _ROWS), max(1, triton.cdiv(dim, block)))
    with torch.cuda.device_of(outs):  # Triton launches on the current device
        merge_states_kernel[grid](
            outs,
            lses,
            out,
            lse,
            num_parts,
            num_rows,
            num_nodes,
            num_heads,
            *outs.stride()[:4],
            *lses.stride(),
            *out.stride()[:3],
            *lse.stride(),
            DIM=dim,
            ROWS=_ROWS,
            BLOCK_D=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
