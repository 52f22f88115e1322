"""Readable PyTorch for tree attention: the oracle, and the fallback on every device."""

from __future__ import annotations

import torch

from spec_kernels._library import register_reference
from spec_kernels.ops.common import asked_to_check, check_scale_values, fail
from spec_kernels.ops.tree_attention.shards import ContextShard

# Tables and pages that are views may repeat for ever; no context is longer.
MAX_POSITIONS = 1 << 31


def unpack_ancestors(ancestors: torch.Tensor) -> torch.Tensor:
    """Words ``[B, N, W]`` int32 to booleans ``[B, N, 32 W]``; bit 0 of word 0 comes first."""
    shifts = torch.arange(32, dtype=torch.int32, device=ancestors.device)
    return ((ancestors.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)


def _visibility(bits, context_lens, num_keys, window, shard):
    """Which row of the (shard's) cache each query row sees: ``[B, N, num_keys]``.

    A row's path is its set bits in ascending order, so the k-th of them has depth k and position
    ``context_len + k``; the window is counted in these positions, not in cache rows. The negative
    length of a padded request hides everything.
    """
    context = context_lens.long().view(-1, 1, 1)
    held = shard.local_length(context)
    cache_row = torch.arange(num_keys, device=bits.device).view(1, 1, -1)
    in_prefix = cache_row < held
    slot = cache_row - held
    num_slots = bits.shape[-1] if shard.index == 0 else 0
    in_tree = ~in_prefix & (slot < num_slots)
    path_length = bits.sum(-1, keepdim=True)
    if num_slots:
        index = slot.clamp(0, num_slots - 1).expand(*bits.shape[:2], -1)
        in_tree = in_tree & bits.gather(2, index)
        key_depth = (bits.cumsum(-1) - 1).gather(2, index)
    else:
        key_depth = torch.zeros_like(slot)
    visible = (in_prefix | in_tree) & (path_length > 0) & (context >= 0)
    if window > 0:
        prefix_position = shard.global_position(cache_row)
        key_position = torch.where(in_prefix, prefix_position, context + key_depth)
        visible &= context + path_length - 1 - key_position < window
    return visible


def check_values(
    op, num_pages, page, block_tables, context_lens, bits, window, shard, k_scale, v_scale
) -> int:
    """Refuses what the kernel refuses; returns how many rows of the cache are in use."""
    # A latent cache has one scale, in both places.
    one = k_scale is v_scale
    check_scale_values(
        op, {"cache_scale": k_scale} if one else {"k_scale": k_scale, "v_scale": v_scale}
    )
    capacity = min(block_tables.shape[1] * page, MAX_POSITIONS)
    tree_bits = bits.any(1)
    places = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
    num_slots = torch.zeros_like(context_lens, dtype=torch.int64)
    if bits.shape[-1]:
        num_slots = (tree_bits * places).amax(-1)
    occupied = (num_slots > 0) & (context_lens >= 0)
    if shard.index:
        num_slots = torch.zeros_like(num_slots)
    held = shard.local_length(context_lens.long())
    too_long = occupied & (held > capacity - num_slots)
    if bool(too_long.any()):
        b = int(too_long.nonzero()[0])
        room = f"room for {int(held[b])} + {int(num_slots[b])} positions"
        fail(op, f"block_tables[{b}]", room, capacity)
    lengths = torch.where(occupied, held + num_slots, 0)
    num_keys = int(lengths.max()) if lengths.numel() else 0
    num_blocks = -(-num_keys // page)
    visible = _visibility(bits, context_lens, num_blocks * page, window, shard).any(1)
    needed = visible.unflatten(-1, (num_blocks, page)).any(-1) if num_blocks else visible
    pages = block_tables[:, :num_blocks]
    wrong = needed & ((pages < 0) | (pages >= num_pages))
    if bool(wrong.any()):
        b, m = wrong.nonzero()[0].tolist()
        fail(op, f"block_tables[{b}, {m}]", f"0 <= page < {num_pages}", int(block_tables[b, m]))
    return num_blocks * page


def _gather(cache, pages, used, scale, dtype):
    """Rows ``[B, num_keys, Hkv, D]`` of ``cache`` in ``dtype``, times the scale of their head."""
    stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    rows = stored[pages].flatten(1, 2).view(cache.dtype).to(dtype)
    if scale is not None:
        rows = rows * scale.to(dtype).view(-1, 1)
    # Slots that no row sees may hold anything, NaN included: zeroed before they meet a product.
    return torch.where(used, rows, 0)


def attend(
    op,
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    ancestors,
    k_scale,
    v_scale,
    sinks,
    scale,
    logit_cap,
    window,
    shard_index,
    num_shards,
    shard_run,
    dtype=torch.float32,
):
    """Gather, mask, softmax, all in ``dtype``; returns out ``[B, N, H, Dv]``, lse ``[B, N, H]``.

    On CPU bad values raise. On a device, where looking at them would wait for it, a key whose page
    is out of range counts as absent; SPEC_KERNELS_CHECK=1 looks all the same.
    """
    num_batch, num_rows, num_heads, _ = q.shape
    num_pages, page, num_kv_heads, _ = k_cache.shape
    v_dim = v_cache.shape[-1]
    shard = _shard(op, shard_index, num_shards, shard_run)
    out = torch.zeros(num_batch, num_rows, num_heads, v_dim, dtype=dtype, device=q.device)
    lse = torch.full((num_batch, num_rows, num_heads), -torch.inf, dtype=dtype, device=q.device)
    if lse.numel() == 0:  # nobody looks, so nothing is looked at
        return out, lse
    bits = unpack_ancestors(ancestors)
    num_keys = block_tables.shape[1] * page
    if q.device.type == "cpu" or asked_to_check(q.device):
        rest = (bits, window, shard, k_scale, v_scale)
        num_keys = check_values(op, num_pages, page, block_tables, context_lens, *rest)
    if num_keys == 0 or num_pages == 0:
        return out, lse

    visible = _visibility(bits, context_lens, num_keys, window, shard)
    pages = block_tables[:, : num_keys // page].long()
    in_range = ((pages >= 0) & (pages < num_pages)).repeat_interleave(page, dim=1)
    visible = visible & in_range.unsqueeze(1)
    pages = pages.clamp(0, num_pages - 1)
    used = visible.any(1).view(num_batch, num_keys, 1, 1)
    k = _gather(k_cache, pages, used, k_scale, dtype)
    v = _gather(v_cache, pages, used, v_scale, dtype)

    grouped = q.to(dtype).unflatten(2, (num_kv_heads, -1))
    present = visible.any(-1).view(num_batch, num_rows, 1, 1, 1)
    grouped = torch.where(present, grouped, 0)
    scores = torch.einsum("bnkgd,bskd->bnkgs", grouped, k) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~visible.view(num_batch, num_rows, 1, 1, num_keys), -torch.inf)
    if sinks is not None and shard.index == 0:  # one more column, without a value
        column = sinks.to(dtype).view(num_kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column.masked_fill(~present, -torch.inf)), -1)
    shift = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(shift == -torch.inf, 0, shift))
    total = weights.sum(-1, keepdim=True)  # NaN where a score is NaN or +inf
    log_sum = torch.logsumexp(scores, -1).masked_fill(total.squeeze(-1).isnan(), torch.nan)
    lse.copy_(log_sum.flatten(2))
    weights = weights / total.clamp_min(torch.finfo(dtype).tiny)
    weights = weights[..., :num_keys]
    # A weight of zero does not silence a NaN: it must reach the rows that see it, and no other.
    finite = v.isfinite()
    mixed = torch.einsum("bnkgs,bskd->bnkgd", weights, torch.where(finite, v, 0))
    reached = torch.einsum("bns,bskd->bnkd", visible.to(dtype), (~finite).to(dtype)) > 0
    out.copy_(mixed.masked_fill(reached.unsqueeze(3), torch.nan).flatten(2, 3))
    return out, lse


def _shard(op, index, num_shards, run) -> ContextShard:
    """The raw op's three integers, whose names an error carries."""
    try:
        return ContextShard(index, num_shards, run)
    except ValueError as error:
        name, _, rest = str(error).partition(": ")
        names = {"index": "shard_index", "run": "shard_run"}
        raise ValueError(f"spec_kernels::{op}: {names.get(name, name)}: {rest}") from None


# Both take the arguments of their schema, in that order (spec_kernels/_library.py).
def tree_attention_reference(*args) -> None:
    *inputs, out, lse = args
    result, log_sum = attend("tree_attention", *inputs)
    out.copy_(result)
    lse.copy_(log_sum)


def tree_attention_mla_reference(q_latent, q_rope, cache, *rest) -> None:
    block_tables, context_lens, ancestors, cache_scale, *options, out, lse = rest
    q = torch.cat((q_latent, q_rope), -1)
    keys = cache.unsqueeze(2)
    values = keys[..., : q_latent.shape[-1]]
    indices = (block_tables, context_lens, ancestors)
    result, log_sum = attend(
        "tree_attention_mla", q, keys, values, *indices, cache_scale, cache_scale, *options
    )
    out.copy_(result)
    lse.copy_(log_sum)


register_reference("tree_attention", tree_attention_reference)
register_reference("tree_attention_mla", tree_attention_mla_reference)
