"""Readable PyTorch for ``merge_states``: the oracle, and the fallback on every device."""

from __future__ import annotations

import torch

from spec_kernels._library import register_reference

MAX_PARTS = 1024  # csrc/merge_states/merge_states.h has the same bound


def merge_states_reference(outs, lses, out, lse) -> None:
    top = torch.full(lses.shape[1:], -torch.inf, dtype=torch.float32, device=lses.device)
    total = torch.zeros_like(top)
    values = torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    for part_out, part_lse in zip(outs.float(), lses, strict=True):
        seen = part_lse != -torch.inf
        new_top = torch.maximum(top, part_lse)
        keep = torch.where(top == -torch.inf, 0, torch.exp(top - new_top))
        add = torch.exp(part_lse - new_top)
        total = torch.where(seen, total * keep + add, total)
        new_values = values * keep.unsqueeze(-1) + part_out * add.unsqueeze(-1)
        values = torch.where(seen.unsqueeze(-1), new_values, values)
        top = new_top
    empty = top == -torch.inf
    lse.copy_(torch.where(empty, top, top + torch.log(total)))
    result = torch.where(empty.unsqueeze(-1), 0, values / total.unsqueeze(-1))
    out.copy_(result.where(result.isfinite(), torch.nan))


register_reference("merge_states", merge_states_reference)
