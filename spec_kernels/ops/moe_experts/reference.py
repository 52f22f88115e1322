"""Readable PyTorch for ``moe_experts``: the oracle, and the fallback on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_kernels._library import register_reference


def router_topk(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling: float = 1.0,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The DeepSeek-V3 router (arXiv 2412.19437, equations 13-16): ids and weights of the experts.

    The correction bias takes part in choosing and not in weighing. With more than one group, only
    the ``topk_group`` groups with the largest sum of their two best biased scores compete. Ties go
    to the lower id. A NaN logit scores 0 and is chosen only when nothing sound is left.

    Args:
        x: ``[T, H]``; router_weight: ``[E, H]``; correction_bias: ``[E]`` float32 or None.

    Returns:
        ids ``[T, top_k]`` int64, best first, and weights ``[T, top_k]`` float32.
    """
    num_rows, num_experts = x.shape[0], router_weight.shape[0]
    scores = F.linear(x.float(), router_weight.float()).sigmoid()
    biased = scores if correction_bias is None else scores + correction_bias
    lowest = torch.finfo(torch.float32).min
    choice = biased.nan_to_num(nan=lowest, neginf=lowest)
    if n_group > 1:
        grouped = choice.view(num_rows, n_group, num_experts // n_group)
        best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        order = best_two.sort(dim=-1, descending=True, stable=True).indices
        dropped = torch.ones_like(best_two, dtype=torch.bool)
        dropped.scatter_(1, order[:, :topk_group], False)
        choice = grouped.masked_fill(dropped[..., None], -torch.inf).view(num_rows, num_experts)
    # A stable sort, since topk leaves the order of ties open.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.nan_to_num(nan=0.0).gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * routed_scaling


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights of the ``pack-quantized`` INT4 format, exact in float32.

    Element j of a row is the nibble at bits ``4 * (j % 8)`` of word ``j // 8``, in offset binary: a
    nibble n stands for n - 8, and the weight is that times the scale of its group.

    Args:
        packed: ``[..., K / 8]`` int32; scale: ``[..., K / G]`` of any float type, for groups of G
            neighbouring elements.

    Returns:
        ``[..., K]`` float32.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    values = (((packed[..., None] >> shifts) & 15) - 8).flatten(-2)
    num_groups = scale.shape[-1]
    groups = values.unflatten(-1, (num_groups, values.shape[-1] // max(num_groups, 1)))
    return (groups * scale.float()[..., None]).flatten(-2)


def moe_experts_reference(
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
) -> None:
    def chosen(weights, scales, ids):
        return weights[ids] if scales is None else dequantize_int4(weights[ids], scales[ids])

    def experts(row, gate_up, down):
        """``[n, 2I, H]`` and ``[n, H, I]`` weights applied to one row: ``[n, H]`` float32."""
        gate, up = torch.matmul(gate_up.float(), row).chunk(2, dim=-1)
        # Rounded, as an input of the down product has the dtype of the weights.
        act = (F.silu(gate) * up).to(x.dtype).float()
        return torch.matmul(down.float(), act[..., None])[..., 0]

    # Row by row: a product over all rows would be split by their number, and then the bits of a
    # row would depend on its neighbours. Gathered weights keep the ids on the device.
    for t in range(x.shape[0]):
        row = x[t].to(torch.float32, copy=True)
        ids, weights = router_topk(
            row[None],
            router_weight,
            correction_bias,
            top_k,
            n_group,
            topk_group,
            routed_scaling,
            normalize,
        )
        total = torch.zeros_like(row)
        gate_up = chosen(w_gate_up, w_gate_up_scale, ids[0])
        routed = experts(row, gate_up, chosen(w_down, w_down_scale, ids[0]))
        for slot in range(top_k):
            total += weights[0, slot] * routed[slot]
        if shared_gate_up is not None:
            total += experts(row, shared_gate_up[None], shared_down[None])[0]
        out[t].copy_(total)


register_reference("moe_experts", moe_experts_reference)
