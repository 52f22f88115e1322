"""Readable PyTorch for ``rope_append``: the oracle, and the fallback on every device.

It asks the device which rows are present, which no compiled kernel does.
"""

from __future__ import annotations

import torch

from spec_kernels._library import register_reference
from spec_kernels.ops.common import asked_to_check, check_scale_values, fail

_FP8_MAX = 448.0


def rotate(x, cos, sin, interleaved):
    """The first ``2 * cos.shape[-1]`` columns of ``x [T, H, D]`` rotated, the rest as it is."""
    x = x.float()
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    pairs = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned, rest), -1)


def _first(wrong):
    """Index of the first true element, or None."""
    found = wrong.nonzero()
    return tuple(found[0].tolist()) if found.shape[0] else None


def _at(name, index):
    return f"{name}[{', '.join(str(i) for i in index)}]"


def _places(op, cache_name, cache, lookup, checks):
    """``(request, row, cos and sin, page, slot)`` of the present rows, each ``[T, ...]``.

    Rows whose values lead out of a tensor are left out, or, with ``checks``, raise.
    """
    cos_sin, depths, slots, context_lens, cache_lens, block_tables = lookup
    num_pages, page_size = cache.shape[:2]
    num_positions = cos_sin.shape[0]
    num_places = block_tables.shape[1] * page_size
    context = context_lens.long().unsqueeze(1)
    depth = depths.long()
    slot = torch.arange(depth.shape[1], device=depth.device).expand_as(depth)
    if slots is not None:
        slot = slots.long()
    begin = context if cache_lens is None else cache_lens.long().unsqueeze(1)
    present = (context >= 0) & (begin >= 0) & (depth >= 0) & (slot >= 0)

    # Sums of huge values wrap below zero.
    position, place = context + depth, begin + slot
    no_angle = (position < 0) | (position >= num_positions)
    no_place = (place < 0) | (place >= num_places)
    if checks:
        if at := _first(present & no_angle):
            fail(op, _at("depths", at), f"a position below {num_positions}", int(position[at]))
        if at := _first(present & no_place):
            expected = f"a place within {block_tables.shape[1]} pages of {page_size}"
            fail(op, _at("slots", at), expected, int(place[at]))
    present = present & ~(no_angle | no_place)

    b, n = present.nonzero(as_tuple=True)
    place = place[b, n]
    page = block_tables[b, place // page_size].long()
    within = (page >= 0) & (page < num_pages)
    if checks:
        if at := _first(~within):
            index = (int(b[at]), int(place[at]) // page_size)
            fail(op, _at("block_tables", index), f"0 <= page < {num_pages}", int(page[at]))
        flat = (b * num_pages + page) * page_size + place % page_size
        order = flat.argsort(stable=True)
        if at := _first(flat[order][1:] == flat[order][:-1]):
            i = int(order[at[0]])
            got = f"slot {int(place[i]) % page_size} of page {int(page[i])} twice"
            fail(op, f"slots[{int(b[i])}]", f"a place in {cache_name} for each row", got)
    b, n, page, place = b[within], n[within], page[within], place[within]
    angles = cos_sin[position[b, n]].unsqueeze(1).chunk(2, -1)
    return b, n, angles, page, place % page_size


def check_values(op, cache_name, cache, lookup, scales) -> None:
    """Refuses what the CPU kernel refuses; waits for the device.

    ``lookup`` is (cos_sin, depths, slots, context_lens, cache_lens, block_tables).
    """
    check_scale_values(op, scales)
    _places(op, cache_name, cache, lookup, checks=True)


def _checked_places(op, cache_name, cache, lookup, scales):
    if cache.device.type == "cpu" or asked_to_check(cache.device):
        check_values(op, cache_name, cache, lookup, scales)
    return _places(op, cache_name, cache, lookup, checks=False)


def _stored(x, scale, dtype):
    """``x [T, H, D]`` as the cache holds it; ``scale [H]``."""
    if scale is not None:
        x = (x / scale.unsqueeze(-1)).clamp(-_FP8_MAX, _FP8_MAX)
    return x.to(dtype)


def rope_append_reference(
    q,
    k,
    v,
    cos_sin,
    depths,
    slots,
    context_lens,
    cache_lens,
    block_tables,
    k_scale,
    v_scale,
    interleaved,
    q_out,
    k_cache,
    v_cache,
) -> None:
    op = "rope_append"
    lookup = (cos_sin, depths, slots, context_lens, cache_lens, block_tables)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    b, n, angles, page, slot = _checked_places(op, "k_cache", k_cache, lookup, scales)
    keys = rotate(k[b, n], *angles, interleaved)
    k_cache[page, slot] = _stored(keys, k_scale, k_cache.dtype)
    v_cache[page, slot] = _stored(v[b, n].float(), v_scale, v_cache.dtype)
    q_out[b, n] = rotate(q[b, n], *angles, interleaved).to(q_out.dtype)


def rope_append_mla_reference(
    q_rope,
    latent,
    k_rope,
    norm_weight,
    eps,
    cos_sin,
    depths,
    slots,
    context_lens,
    cache_lens,
    block_tables,
    cache_scale,
    interleaved,
    q_out,
    cache,
) -> None:
    op = "rope_append_mla"
    lookup = (cos_sin, depths, slots, context_lens, cache_lens, block_tables)
    scales = {"cache_scale": cache_scale}
    b, n, angles, page, slot = _checked_places(op, "cache", cache, lookup, scales)
    rows = latent[b, n].float()
    if norm_weight is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    keys = rotate(k_rope[b, n].unsqueeze(1), *angles, interleaved)
    rows = torch.cat((rows.unsqueeze(1), keys), -1)
    cache[page, slot] = _stored(rows, cache_scale, cache.dtype).squeeze(1)
    q_out[b, n] = rotate(q_rope[b, n], *angles, interleaved).to(q_out.dtype)


register_reference("rope_append", rope_append_reference)
register_reference("rope_append_mla", rope_append_mla_reference)
