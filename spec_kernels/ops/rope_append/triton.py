"""Triton kernel of ``rope_append`` and ``rope_append_mla``: one launch, one program a row.

A program finds its row's position and place, leaves at once if either leads out of a tensor, and
then takes queries, keys and values (or rope key and latent) in chunks of heads. Every element is
read once and written once: a row of E elements in queries and new K/V moves about
``2 * E * itemsize`` bytes, and ``R * 4`` of the table. Kimi-K2.5 at 8 heads a GPU, 64 nodes, bf16:
E = 512 + 576, in all 0.3 MB, 0.2 us at 1.8 TB/s; so what the call costs is the launch.

Multiplications and additions are not fused: rotations have the bits of the CPU kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.ops.common import asked_to_check
from spec_kernels.ops.rope_append.reference import check_values
from spec_kernels.ops.triton_common import check_device, round_to

NUM_WARPS = 4
# Elements of a chunk of heads: 16 a thread.
_CHUNK = 2048


@triton.jit
def _to_fp8(x):
    """fp32 to the bits of float8_e4m3fn: saturated at +-448, to nearest even, NaN stays NaN.

    In integers, since sm_80 has no instruction for it and the others' need not be told apart.
    """
    word = x.to(tl.int32, bitcast=True)
    sign = (word >> 24) & 0x80
    magnitude = word & 0x7FFFFFFF
    bits = tl.minimum(magnitude, 0x43E00000)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - 0x3C000000) >> 20
    # Below 2^-6 values are counts of 2^-9: adding 2^14 leaves the count in the low mantissa bits.
    shifted = bits.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    number = tl.where(bits < 0x3C800000, small, normal)
    number = tl.where(magnitude > 0x7F800000, 0x7F, number)
    return (number | sign).to(tl.uint8)


@triton.jit
def _put(pointers, x, scale, mask, FP8: tl.constexpr):
    if FP8:
        tl.store(pointers, _to_fp8(tl.math.div_rn(x, scale + tl.zeros_like(x))), mask=mask)
    else:
        tl.store(pointers, round_to(x, pointers.dtype.element_ty), mask=mask)


@triton.jit
def _scales(scales, stride, head, exists, FP8: tl.constexpr):
    """``[heads, 1]``; not looked at unless the cache is fp8."""
    if FP8:
        values = tl.load(scales + head * stride, mask=exists, other=1.0)
    else:
        values = tl.full(head.shape, 1.0, tl.float32)
    return values[:, None]


@triton.jit
def _rotate(
    source, source_stride, target, target_stride, scales, scale_stride, num_heads, cos, sin,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """``num_heads`` vectors of ``DIM``: the first ``2 * HALF`` columns turned, the rest copied."""
    lane = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        first, second = 2 * lane, 2 * lane + 1
    else:
        first, second = lane, lane + HALF
    for start in range(0, num_heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        exists = head < num_heads
        scale = _scales(scales, scale_stride, head, exists, FP8)
        read = source + (head * source_stride)[:, None]
        write = target + (head * target_stride)[:, None]
        mask = exists[:, None] & (lane < HALF)[None, :]
        x = tl.load(read + first[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(read + second[None, :], mask=mask, other=0.0).to(tl.float32)
        # Queries may be turned in place: no thread writes before all have read.
        tl.debug_barrier()
        _put(write + first[None, :], x * cos - y * sin, scale, mask, FP8)
        _put(write + second[None, :], y * cos + x * sin, scale, mask, FP8)
        if DIM > 2 * HALF:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)
            tail = exists[:, None] & (rest < DIM)[None, :]
            z = tl.load(read + rest[None, :], mask=tail, other=0.0).to(tl.float32)
            _put(write + rest[None, :], z, scale, tail, FP8)


@triton.jit
def _append(
    source, source_stride, target, target_stride, scales, scale_stride, num_heads, norm_weight, eps,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, NORM: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """``num_heads`` vectors of ``DIM``, copied or normalised."""
    column = tl.arange(0, BLOCK_DIM)
    for start in range(0, num_heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        exists = head < num_heads
        scale = _scales(scales, scale_stride, head, exists, FP8)
        mask = exists[:, None] & (column < DIM)[None, :]
        read = source + (head * source_stride)[:, None] + column[None, :]
        x = tl.load(read, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            mean = tl.math.div_rn(tl.sum(x * x, 1), tl.full([BLOCK_HEADS], DIM, tl.float32))
            root = tl.math.sqrt_rn(mean + eps)
            factor = tl.math.div_rn(tl.full([BLOCK_HEADS], 1.0, tl.float32), root)
            weight = tl.load(norm_weight + column, mask=column < DIM, other=0.0)
            x = x * factor[:, None] * weight.to(tl.float32)[None, :]
        write = target + (head * target_stride)[:, None] + column[None, :]
        _put(write, x, scale, mask, FP8)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_kv_heads", "num_positions",
                               "num_blocks", "num_pages", "page"])  # fmt: skip
def rope_append_kernel(
    q, k, v, q_out, k_cache, v_cache, cos_sin, depths, slots, context_lens, cache_lens,
    block_tables, k_scale, v_scale, norm_weight, eps,
    num_rows, num_heads, num_kv_heads, num_positions, num_blocks, num_pages, page,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_on, stride_oh,
    stride_kcp, stride_kcs, stride_kch, stride_vcp, stride_vcs, stride_vch,
    stride_cos, stride_db, stride_dn, stride_sb, stride_sn, stride_context, stride_begin,
    stride_tb, stride_tm, stride_k_scale, stride_v_scale,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_CACHE_LENS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, n = row // num_rows, row % num_rows
    context = tl.load(context_lens + b * stride_context).to(tl.int64)
    depth = tl.load(depths + b * stride_db + n * stride_dn).to(tl.int64)
    slot = n
    if HAS_SLOTS:
        slot = tl.load(slots + b * stride_sb + n * stride_sn).to(tl.int64)
    begin = context
    if HAS_CACHE_LENS:
        begin = tl.load(cache_lens + b * stride_begin).to(tl.int64)
    # Sums of huge values wrap below zero.
    position, place = context + depth, begin + slot
    block = place // page
    is_present = (context >= 0) & (depth >= 0) & (slot >= 0) & (begin >= 0)
    is_present = is_present & (position >= 0) & (position < num_positions)
    is_present = is_present & (place >= 0) & (block < num_blocks)
    entry = block_tables + b * stride_tb + block * stride_tm
    at = tl.load(entry, mask=is_present, other=-1).to(tl.int64)
    if (at >= 0) & (at < num_pages):
        within = place % page
        lane = tl.arange(0, BLOCK_HALF)
        angles = cos_sin + position * stride_cos + lane
        cos = tl.load(angles, mask=lane < HALF, other=0.0)[None, :]
        sin = tl.load(angles + HALF, mask=lane < HALF, other=0.0)[None, :]
        _rotate(
            k + b * stride_kb + n * stride_kn, stride_kh,
            k_cache + at * stride_kcp + within * stride_kcs, stride_kch,
            k_scale, stride_k_scale, num_kv_heads, cos, sin,
            K_DIM, HALF, BLOCK_HALF, BLOCK_REST, K_HEADS, INTERLEAVED, FP8,
        )  # fmt: skip
        _append(
            v + b * stride_vb + n * stride_vn, stride_vh,
            v_cache + at * stride_vcp + within * stride_vcs, stride_vch,
            v_scale, stride_v_scale, num_kv_heads, norm_weight, eps,
            V_DIM, BLOCK_V, V_HEADS, NORM, FP8,
        )  # fmt: skip
        _rotate(
            q + b * stride_qb + n * stride_qn, stride_qh,
            q_out + b * stride_ob + n * stride_on, stride_oh,
            k_scale, stride_k_scale, num_heads, cos, sin,
            K_DIM, HALF, BLOCK_HALF, BLOCK_REST, Q_HEADS, INTERLEAVED, False,
        )  # fmt: skip


def block_sizes(num_heads: int, num_kv_heads: int, k_dim: int, v_dim: int, rotary: int) -> dict:
    """The compile-time sizes of a call's tiles."""
    power = triton.next_power_of_2
    half, rest, columns = (
        max(1, power(rotary // 2)),
        max(1, power(k_dim - rotary)),
        max(1, power(v_dim)),
    )

    def heads(count: int, width: int) -> int:
        return max(1, min(power(count), _CHUNK // width))

    return {
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "HALF": rotary // 2,
        "BLOCK_HALF": half,
        "BLOCK_REST": rest,
        "BLOCK_V": columns,
        "Q_HEADS": heads(num_heads, max(half, rest)),
        "K_HEADS": heads(num_kv_heads, max(half, rest)),
        "V_HEADS": heads(num_kv_heads, columns),
    }


def _launch(
    q, k, v, norm_weight, eps, cos_sin, depths, slots, context_lens, cache_lens, block_tables,
    k_scale, v_scale, interleaved, q_out, k_cache, v_cache,
):  # fmt: skip
    """Both forms; a latent is 4-dimensional here, with one head, as are its rope key and cache."""
    num_batch, num_rows, num_heads, k_dim = q.shape
    num_pages, page, num_kv_heads, v_dim = v_cache.shape
    if num_batch * num_rows == 0 or num_pages == 0 or block_tables.shape[1] == 0:
        return
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    if is_fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    # Triton launches on the current device. What a call does not have is never looked at.
    with torch.cuda.device_of(q):
        rope_append_kernel[(num_batch * num_rows,)](
            q,
            k,
            v,
            q_out,
            k_cache,
            v_cache,
            cos_sin,
            depths,
            depths if slots is None else slots,
            context_lens,
            context_lens if cache_lens is None else cache_lens,
            block_tables,
            k_scale if is_fp8 else cos_sin,
            v_scale if is_fp8 else cos_sin,
            v if norm_weight is None else norm_weight,
            eps,
            num_rows,
            num_heads,
            num_kv_heads,
            cos_sin.shape[0],
            block_tables.shape[1],
            num_pages,
            page,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *q_out.stride()[:3],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            cos_sin.stride(0),
            *depths.stride(),
            *(depths if slots is None else slots).stride(),
            context_lens.stride(0),
            (context_lens if cache_lens is None else cache_lens).stride(0),
            *block_tables.stride(),
            k_scale.stride(0) if is_fp8 else 0,
            v_scale.stride(0) if is_fp8 else 0,
            **block_sizes(num_heads, num_kv_heads, k_dim, v_dim, cos_sin.shape[1]),
            HAS_SLOTS=slots is not None,
            HAS_CACHE_LENS=cache_lens is not None,
            INTERLEAVED=interleaved,
            NORM=norm_weight is not None,
            FP8=is_fp8,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def _check(op, device, cache_name, cache, lookup, scales) -> None:
    check_device(op, device)
    if asked_to_check(device):
        check_values(op, cache_name, cache, lookup, scales)


def rope_append_triton(*args) -> None:
    """The arguments of the schema."""
    q, k, v, *lookup, k_scale, v_scale, interleaved, q_out, k_cache, v_cache = args
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    _check("rope_append", q.device, "k_cache", k_cache, lookup, scales)
    _launch(
        q, k, v, None, 0.0, *lookup, k_scale, v_scale, interleaved, q_out, k_cache,
        v_cache,
    )  # fmt: skip


def rope_append_mla_triton(*args) -> None:
    """The arguments of the schema."""
    q, latent, k_rope, norm_weight, eps, *lookup, scale, interleaved, q_out, cache = args
    _check("rope_append_mla", q.device, "cache", cache, lookup, {"cache_scale": scale})
    rows, rank = cache.unsqueeze(2), latent.shape[2]
    _launch(
        q, k_rope.unsqueeze(2), latent.unsqueeze(2), norm_weight, eps, *lookup,
        scale, scale, interleaved, q_out, rows[..., rank:], rows[..., :rank],
    )  # fmt: skip
