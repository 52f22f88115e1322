"""Combines attention over parts of a context: partial outputs and their log-sum-exps."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import (
    FLOATS_AND_HALF,
    check_last_dim,
    check_no_overlap,
    check_tensor,
    fail,
    run,
)
from spec_kernels.ops.merge_states.reference import MAX_PARTS, merge_states_reference

_OP = "merge_states"
_F32 = (torch.float32,)


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of ``S`` disjoint sets of keys, from that over each; ``(out, lse)``.

    ``out = sum_i exp(lses[i]) outs[i] / sum_i exp(lses[i])`` and ``lse = log sum_i exp(lses[i])``
    (the associative merge of softmax states, as in Milakov and Gimelshein, arXiv 1805.02867). Parts
    are added in the order 0, 1, 2, ... in fp32, relative to the greatest LSE so far, and the result
    is rounded once, so ranks that hold the same parts compute the same bits, on the CPU with any
    instruction set. A part whose LSE is -inf saw nothing and is not looked at: merging it changes
    no bit, and of such parts alone the result is 0 and -inf. An LSE that is NaN or +inf makes its
    row NaN, ``lse`` included; an element of a part that is not finite makes that element of the
    result NaN, whatever the part's weight.

    Args:
        outs: ``[S <= 1024, B, N, H, D]`` float32, bfloat16 or float16: normalised partial outputs,
            such as ``tree_attention`` returns for the shards of a context. Rows may be strided.
        lses: ``[S, B, N, H]`` float32, natural log. May be strided.
        out: ``[B, N, H, D]`` in ``outs``' dtype; allocated when None. May be strided.
        lse: ``[B, N, H]`` float32; allocated when None.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    check_tensor(_OP, "outs", outs, (None, None, None, None, None), FLOATS_AND_HALF)
    if outs.shape[0] > MAX_PARTS:
        fail(_OP, "outs", f"at most {MAX_PARTS} parts", outs.shape[0])
    device = outs.device
    check_tensor(_OP, "lses", lses, outs.shape[:4], _F32, device)
    check_last_dim(_OP, "outs", outs)
    shape = outs.shape[1:]
    if out is None:
        out = torch.empty(shape, dtype=outs.dtype, device=device)
    else:
        check_tensor(_OP, "out", out, shape, (outs.dtype,), device)
        check_last_dim(_OP, "out", out)
        check_no_overlap(_OP, "out", out)
    if lse is None:
        lse = torch.empty(shape[:3], dtype=torch.float32, device=device)
    else:
        check_tensor(_OP, "lse", lse, shape[:3], _F32, device)
        check_no_overlap(_OP, "lse", lse)
    run(_OP, backend, device, (outs, lses, out, lse), merge_states_reference)
    return out, lse
