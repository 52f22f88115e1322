"""The front of verify attention: rotate queries and new keys, append K/V to the paged cache."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import (
    FLOATS_AND_HALF,
    FP8,
    INTEGERS,
    check_cache_scale,
    check_finite,
    check_last_dim,
    check_tensor,
    fail,
    run,
)
from spec_kernels.ops.rope_append.reference import (
    rope_append_mla_reference,
    rope_append_reference,
)


def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    depths: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    interleaved: bool,
    slots: torch.Tensor | None = None,
    cache_lens: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotates queries into ``q_out``, keys into ``k_cache``, and copies values into ``v_cache``.

    Row n of request b stands at position ``p = context_lens[b] + depths[b, n]``: the nodes of a
    tree that are equally deep share a position. Its K/V go to the cache at the logical place
    ``(cache_lens or context_lens)[b] + slots[b, n]``, of which place x is slot ``x % page`` of page
    ``block_tables[b, x // page]``. A row whose depth or slot is negative, and every row of a
    request whose context length or ``cache_lens`` is, is absent: nothing is read or written for
    it, ``q_out`` included.

    The first ``R`` columns of a head are rotated, the rest is copied (partial rotary). With c and s
    the cosine and sine of pair i at p, ``(x, y)`` becomes ``(x c - y s, y c + x s)`` (RoPE, arXiv
    2104.09864); yarn and other scalings are in the table. Arithmetic is float32, rounded once, and
    a row's bits depend on that row alone. A float8_e4m3fn cache holds ``value / scale``, saturated
    at +-448 and rounded to nearest even; NaN stays NaN.

    Args:
        q: ``[B, N, H, Dk]`` float32, bfloat16 or float16. Rows may be strided, as those of k and v.
        k: ``[B, N, Hkv, Dk]``, same dtype.
        v: ``[B, N, Hkv, Dv]``, same dtype.
        k_cache: ``[P, page, Hkv, Dk]`` in q's dtype or float8_e4m3fn. May be strided.
        v_cache: ``[P, page, Hkv, Dv]``, same dtype as ``k_cache``. May be strided.
        cos_sin: ``[max_positions, R]`` float32, R even and at most Dk: R / 2 cosines, then as many
            sines.
        depths: ``[B, N]`` int32 or int64.
        context_lens: ``[B]`` int32 or int64.
        block_tables: ``[B, M]`` int32 or int64. Only entries that a present row needs are looked
            at. Requests share no page that is written.
        interleaved: pairs are columns ``(2i, 2i + 1)``; else ``(i, i + R / 2)``.
        slots: ``[B, N]`` int32 or int64; None: row n has slot n.
        cache_lens: ``[B]`` int32 or int64, where the cache's rows begin if not at ``context_lens``.
        k_scale, v_scale: ``[Hkv]`` or one element, float32: exactly for a float8_e4m3fn cache.
        q_out: ``[B, N, H, Dk]`` in q's dtype; may be ``q``; zeros are allocated when None.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Returns:
        ``q_out``.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above; or, on CPU and before anything
            is written, a position is beyond ``cos_sin``, a place beyond ``block_tables``, a page
            out of range, a scale not positive and finite, or two rows of a request have one place.
            Elsewhere a row that leads out of a tensor counts as absent.
    """
    op = "rope_append"
    check_tensor(op, "q", q, (None, None, None, None), FLOATS_AND_HALF)
    num_batch, num_rows, _, k_dim = q.shape
    same, device = (q.dtype,), q.device
    check_tensor(op, "k", k, (num_batch, num_rows, None, k_dim), same, device)
    num_kv_heads = k.shape[2]
    check_tensor(op, "v", v, (num_batch, num_rows, num_kv_heads, None), same, device)
    cached = (q.dtype, *FP8)
    check_tensor(op, "k_cache", k_cache, (None, None, num_kv_heads, k_dim), cached, device)
    shape = (*k_cache.shape[:3], v.shape[3])
    check_tensor(op, "v_cache", v_cache, shape, (k_cache.dtype,), device)
    for name, t in (("q", q), ("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_last_dim(op, name, t)
    _check_page(op, "k_cache", k_cache)
    _check_places(op, q, cos_sin, k_dim, depths, context_lens, block_tables, slots, cache_lens)
    k_scale = check_cache_scale(op, "k_scale", k_scale, k_cache, num_kv_heads)
    v_scale = check_cache_scale(op, "v_scale", v_scale, v_cache, num_kv_heads)
    q_out = _output(op, q, q_out)
    places = (cos_sin, depths, slots, context_lens, cache_lens, block_tables)
    args = (q, k, v, *places, k_scale, v_scale, interleaved, q_out, k_cache, v_cache)
    run(op, backend, device, args, rope_append_reference)
    return q_out


def rope_append_mla(
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    cache: torch.Tensor,
    cos_sin: torch.Tensor,
    depths: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    interleaved: bool,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    slots: torch.Tensor | None = None,
    cache_lens: torch.Tensor | None = None,
    cache_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The same for multi-head latent attention: the cached row is the latent, then the rope key.

    The latent is stored as ``latent * rsqrt(mean(latent^2) + eps) * norm_weight``, or as it is
    when there is no ``norm_weight``. Absence, places, arithmetic, fp8 and errors are those of
    ``rope_append``.

    Args:
        q_rope: ``[B, N, H, Dr]`` float32, bfloat16 or float16. Rows may be strided, as those of the
            next two.
        latent: ``[B, N, Rl]``, same dtype.
        k_rope: ``[B, N, Dr]``, same dtype, one rope key for all heads.
        cache: ``[P, page, Rl + Dr]`` in q_rope's dtype or float8_e4m3fn. May be strided.
        norm_weight: ``[Rl]``, same dtype as ``latent``.
        eps: added to the mean square.
        cache_scale: one element, float32: exactly for a float8_e4m3fn cache. It divides the whole
            row.
        q_out: ``[B, N, H, Dr]``; may be ``q_rope``; zeros are allocated when None.
        cos_sin, depths, context_lens, block_tables, interleaved, slots, cache_lens, backend: as in
            ``rope_append``; R is at most Dr.

    Returns:
        ``q_out``.
    """
    op = "rope_append_mla"
    check_tensor(op, "q_rope", q_rope, (None, None, None, None), FLOATS_AND_HALF)
    num_batch, num_rows, _, rope = q_rope.shape
    same, device = (q_rope.dtype,), q_rope.device
    check_tensor(op, "latent", latent, (num_batch, num_rows, None), same, device)
    check_tensor(op, "k_rope", k_rope, (num_batch, num_rows, rope), same, device)
    rank = latent.shape[2]
    check_tensor(op, "cache", cache, (None, None, rank + rope), (q_rope.dtype, *FP8), device)
    if norm_weight is not None:
        check_tensor(op, "norm_weight", norm_weight, (rank,), same, device)
        check_last_dim(op, "norm_weight", norm_weight)
    for name, t in (("q_rope", q_rope), ("latent", latent), ("k_rope", k_rope), ("cache", cache)):
        check_last_dim(op, name, t)
    check_finite(op, "eps", eps)
    _check_page(op, "cache", cache)
    _check_places(op, q_rope, cos_sin, rope, depths, context_lens, block_tables, slots, cache_lens)
    cache_scale = check_cache_scale(op, "cache_scale", cache_scale, cache, 1)
    q_out = _output(op, q_rope, q_out)
    places = (cos_sin, depths, slots, context_lens, cache_lens, block_tables)
    args = (q_rope, latent, k_rope, norm_weight, eps, *places, cache_scale, interleaved)
    run(op, backend, device, (*args, q_out, cache), rope_append_mla_reference)
    return q_out


def _check_page(op: str, name: str, cache: torch.Tensor) -> None:
    if cache.shape[1] < 1:
        fail(op, name, "a page size of at least 1", cache.shape[1])


def _check_places(
    op, q, cos_sin, dim, depths, context_lens, block_tables, slots, cache_lens
) -> None:
    num_batch, num_rows = q.shape[:2]
    device = q.device
    check_tensor(op, "cos_sin", cos_sin, (None, None), (torch.float32,), device)
    check_last_dim(op, "cos_sin", cos_sin)
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > dim:
        fail(op, "cos_sin", f"an even number of columns, at most {dim}", cos_sin.shape[1])
    check_tensor(op, "depths", depths, (num_batch, num_rows), INTEGERS, device)
    check_tensor(op, "context_lens", context_lens, (num_batch,), INTEGERS, device)
    check_tensor(op, "block_tables", block_tables, (num_batch, None), INTEGERS, device)
    if slots is not None:
        check_tensor(op, "slots", slots, (num_batch, num_rows), INTEGERS, device)
    if cache_lens is not None:
        check_tensor(op, "cache_lens", cache_lens, (num_batch,), INTEGERS, device)


def _output(op, q, q_out):
    if q_out is None:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    check_tensor(op, "q_out", q_out, q.shape, (q.dtype,), q.device)
    check_last_dim(op, "q_out", q_out)
    return q_out
