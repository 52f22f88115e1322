"""Mixture of experts for few tokens: router, chosen experts and shared expert in one call."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import FLOATS, check_finite, check_last_dim, check_tensor, fail, run
from spec_kernels.ops.moe_experts.reference import moe_experts_reference

_OP = "moe_experts"
_F32 = (torch.float32,)
_BF16 = (torch.bfloat16,)
_INT32 = (torch.int32,)
# Elements that share a scale come in multiples of this.
INT4_GROUP = 32
INT4_PER_WORD = 8


def moe_experts(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    top_k: int,
    correction_bias: torch.Tensor | None = None,
    w_gate_up_scale: torch.Tensor | None = None,
    w_down_scale: torch.Tensor | None = None,
    shared_gate_up: torch.Tensor | None = None,
    shared_down: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling: float = 1.0,
    normalize: bool = True,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Returns ``sum over chosen e of w_e * down_e(silu(gate_e(x)) * up_e(x)) + shared expert``.

    The router is DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): scores are
    ``sigmoid(x @ router_weight.T)`` in float32; the ``top_k`` largest of score + correction bias
    are chosen, ties to the lower id, within the best ``topk_group`` of ``n_group`` groups (a group
    counts the sum of its two best biased scores); the weights are the scores without the bias,
    divided by their sum + 1e-20 when ``normalize``, times ``routed_scaling``. A NaN logit scores 0
    and is chosen last.

    Products accumulate in float32, the activation is rounded to the dtype of ``x`` before the down
    product, experts are summed in float32 in the order of choice, the shared expert last, and the
    result is rounded once. A row's bits depend on that row alone. Under tensor parallelism each
    rank passes its slice of ``I`` and ``Is`` (views are fine) and the results are summed over
    ranks. ``E = top_k = 0`` leaves the shared expert alone: a dense layer.

    Routed experts may be INT4 (``pack-quantized``, symmetric), the shared one is not: eight
    elements an int32 word, the lowest bits first, each stored as q + 8; groups of G neighbouring
    elements of a row share a scale, and a weight is q * scale. Both matrices are packed or neither;
    each has its own G, which follows from the shapes.

    Args:
        x: ``[T, H]`` float32 or bfloat16. Rows may be strided, as those of every weight.
        router_weight: ``[E, H]``, dtype of ``x`` or float32.
        w_gate_up: ``[E, 2I, H]``, dtype of ``x``: I gate rows, then I up rows. Packed:
            ``[E, 2I, H / 8]`` int32.
        w_down: ``[E, H, I]``, dtype of ``x``. Packed: ``[E, H, I / 8]`` int32.
        top_k: experts a row, ``0 <= top_k <= E * topk_group / n_group``.
        correction_bias: ``[E]`` float32, or None.
        w_gate_up_scale: ``[E, 2I, H / G]`` bfloat16 of packed weights, G a multiple of 32, or None.
        w_down_scale: ``[E, H, I / G]`` bfloat16 of packed weights, or None.
        shared_gate_up: ``[2Is, H]``, or None; given together with ``shared_down``.
        shared_down: ``[H, Is]``, or None.
        n_group: groups of ``E / n_group`` neighbouring experts each.
        topk_group: groups that compete, ``1 <= topk_group <= n_group``.
        routed_scaling: factor on the weights of routed experts.
        normalize: whether the weights are divided by their sum.
        out: ``[T, H]`` result; may be ``x`` itself; allocated when None.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype, device, stride or number is not as above.
    """
    check_tensor(_OP, "x", x, (None, None), FLOATS)
    num_rows, hidden = x.shape
    same, device = (x.dtype,), x.device
    router_dtypes = _F32 if x.dtype == torch.float32 else FLOATS
    check_tensor(_OP, "router_weight", router_weight, (None, hidden), router_dtypes, device)
    num_experts = router_weight.shape[0]
    if (w_gate_up_scale is None) != (w_down_scale is None):
        got = type(w_down_scale).__name__
        fail(_OP, "w_down_scale", "given exactly when w_gate_up_scale is", got)
    packed = w_down_scale is not None
    if packed and hidden % INT4_GROUP:
        fail(_OP, "x", f"a multiple of {INT4_GROUP} columns for INT4 experts", hidden)
    dtypes, per_word = (_INT32, INT4_PER_WORD) if packed else (same, 1)
    check_tensor(_OP, "w_down", w_down, (num_experts, hidden, None), dtypes, device)
    inner = w_down.shape[2] * per_word
    shape = (num_experts, 2 * inner, hidden // per_word)
    check_tensor(_OP, "w_gate_up", w_gate_up, shape, dtypes, device)
    if packed:
        shape = (num_experts, 2 * inner)
        _check_scale("w_gate_up_scale", w_gate_up_scale, shape, hidden, device)
        _check_scale("w_down_scale", w_down_scale, (num_experts, hidden), inner, device)
    check_last_dim(_OP, "x", x)
    check_last_dim(_OP, "router_weight", router_weight)
    check_last_dim(_OP, "w_gate_up", w_gate_up)
    check_last_dim(_OP, "w_down", w_down)
    if correction_bias is not None:
        check_tensor(_OP, "correction_bias", correction_bias, (num_experts,), _F32, device)
        check_last_dim(_OP, "correction_bias", correction_bias)
    if (shared_gate_up is None) != (shared_down is None):
        fail(_OP, "shared_down", "given exactly when shared_gate_up is", type(shared_down).__name__)
    if shared_gate_up is not None:
        check_tensor(_OP, "shared_down", shared_down, (hidden, None), same, device)
        shape = (2 * shared_down.shape[1], hidden)
        check_tensor(_OP, "shared_gate_up", shared_gate_up, shape, same, device)
        check_last_dim(_OP, "shared_gate_up", shared_gate_up)
        check_last_dim(_OP, "shared_down", shared_down)
    if not 1 <= n_group <= max(num_experts, 1) or num_experts % n_group:
        fail(_OP, "n_group", f"a divisor of {num_experts} experts", n_group)
    if not 1 <= topk_group <= n_group:
        fail(_OP, "topk_group", f"1 <= topk_group <= {n_group}", topk_group)
    most = num_experts // n_group * topk_group
    if not 0 <= top_k <= most:
        fail(_OP, "top_k", f"0 <= top_k <= {most}", top_k)
    check_finite(_OP, "routed_scaling", routed_scaling)
    if out is None:
        out = torch.empty((num_rows, hidden), dtype=x.dtype, device=device)
    else:
        check_tensor(_OP, "out", out, (num_rows, hidden), same, device)
        check_last_dim(_OP, "out", out)
    args = (
        x,
        router_weight,
        correction_bias,
        w_gate_up,
        w_down,
        w_gate_up_scale,
        w_down_scale,
        shared_gate_up,
        shared_down,
        top_k,
        n_group,
        topk_group,
        routed_scaling,
        normalize,
        out,
    )
    run(_OP, backend, device, args, moe_experts_reference)
    return out


def _check_scale(name, scale, rows, num_columns, device) -> None:
    check_tensor(_OP, name, scale, (*rows, None), _BF16, device)
    check_last_dim(_OP, name, scale)
    groups = scale.shape[2]
    size = num_columns // max(groups, 1)
    if groups * size != num_columns or size % INT4_GROUP:
        expected = f"groups of a multiple of {INT4_GROUP} among {num_columns} columns"
        fail(_OP, name, expected, f"{groups} groups")
