"""Attention of a draft tree over a paged cache: a node sees the prefix and its ancestors."""

from __future__ import annotations

import torch

from spec_kernels import _library
from spec_kernels.ops.common import (
    FLOATS_AND_HALF,
    FP8,
    INTEGERS,
    check_cache_scale,
    check_last_dim,
    check_no_overlap,
    check_tensor,
    fail,
    run,
)
from spec_kernels.ops.tree_attention.reference import (
    tree_attention_mla_reference,
    tree_attention_reference,
)
from spec_kernels.ops.tree_attention.shards import WHOLE, ContextShard

_MAX_WORDS = 32
_WORD = (torch.int32,)
_F32 = (torch.float32,)
_FLOAT32 = torch.finfo(torch.float32)
_HAS_CPU_KERNEL = _library.has_kernel("tree_attention", "cpu")


def _call_kernel(function, q, v_dim_of, rest, scale, logit_cap, window, shard, out, lse):
    """The decode path on CPU: no checks here, since the kernel makes them all before it writes.

    Returns None when anything was wrong; the caller then takes the long way, which finds the fault
    again and words it as a ``ValueError``.
    """
    try:
        shape = q.shape[:3]
        if out is None:
            out = q.new_empty((*shape, v_dim_of.shape[3]))
        if lse is None:
            lse = q.new_empty(shape, dtype=torch.float32)
        part = WHOLE if shard is None else shard
        part = (part.index, part.num_shards, part.run)
        function(q, *rest, scale, logit_cap, window, *part, out, lse)
    except Exception:
        return None
    return out, lse


def _on_fast_path(q) -> bool:
    return (
        _HAS_CPU_KERNEL
        and isinstance(q, torch.Tensor)
        and q.is_cpu
        and q.dim() == 4
        and not torch.compiler.is_compiling()
    )


def _check_common(
    op, q, block_tables, context_lens, ancestors, sinks, scale, logit_cap, shard
) -> tuple[int, int, int]:
    """Checks what both forms share; returns the shard as the raw op takes it."""
    num_batch, num_rows = q.shape[:2]
    device = q.device
    check_tensor(op, "block_tables", block_tables, (num_batch, None), INTEGERS, device)
    check_tensor(op, "context_lens", context_lens, (num_batch,), INTEGERS, device)
    check_tensor(op, "ancestors", ancestors, (num_batch, num_rows, None), _WORD, device)
    if ancestors.shape[2] > _MAX_WORDS:
        fail(op, "ancestors", f"at most {_MAX_WORDS} words a row", ancestors.shape[2])
    # In fp32, in which scores are: a cap that became 0 there would be none.
    if not -_FLOAT32.max <= scale <= _FLOAT32.max:
        fail(op, "scale", "a finite float32", scale)
    if not -_FLOAT32.max <= logit_cap <= _FLOAT32.max or 0 < logit_cap < _FLOAT32.tiny:
        fail(op, "logit_cap", "a finite float32, normal if positive", logit_cap)
    if sinks is not None:
        check_tensor(op, "sinks", sinks, (q.shape[2],), _F32, device)
    shard = WHOLE if shard is None else shard
    if not isinstance(shard, ContextShard):
        fail(op, "shard", "a ContextShard", type(shard).__name__)
    return shard.index, shard.num_shards, shard.run


def _check_cache(op: str, name: str, cache: torch.Tensor) -> None:
    check_last_dim(op, name, cache)
    if cache.shape[1] < 1:
        fail(op, name, "a page size of at least 1", cache.shape[1])


def _outputs(op, q, v_dim, out, lse):
    shape = (*q.shape[:3], v_dim)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    else:
        check_tensor(op, "out", out, shape, (q.dtype,), q.device)
        check_last_dim(op, "out", out)
        check_no_overlap(op, "out", out)
    if lse is None:
        lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    else:
        check_tensor(op, "lse", lse, shape[:3], _F32, q.device)
        check_no_overlap(op, "lse", lse)
    return out, lse


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    window: int = 0,
    shard: ContextShard | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped-query attention of ``N`` tree rows over a paged cache; returns ``(out, lse)``.

    The tree's K/V stand in the cache at logical positions ``context_lens[b] + j``; bit ``j`` of a
    row's words makes tree row ``j`` visible. A query row sees the whole prefix (subject to
    ``window``) and the tree rows whose bits are set. A row without any bit is absent: out 0,
    lse -inf, nothing is read for it. ``N`` and ``W`` are independent, so a drafter may query only
    the newest level of its tree.

    A row's set bits in ascending order are its path: the k-th has position ``context_lens[b] + k``.
    The CPU kernel adds keys up by these positions alone, so a row has the same bits however its
    keys are divided between prefix and tree, alone or in any tree and batch, on any number of
    threads: decoding a path token by token and verifying it inside a tree agree bit for bit, at
    every length. Instruction sets may differ by rounding, and the reference promises no bits.

    With a ``shard`` the cache and its table hold only that part of the context (``ContextShard``
    says which), the lengths stay those of the whole, and ``out`` and ``lse`` are the part's own, to
    be combined by ``merge_states``; a row that sees nothing of the part gives 0 and -inf. Every
    shard is given the same ``ancestors``. Bits then depend on the keys by *local* position, so each
    part has the same bits in any tree and batch, but decoding a path, which deals its keys to
    several shards, agrees with verifying it only within rounding.

    Infinities and NaN reach the rows that see them and no others. A score is what IEEE arithmetic
    makes of it; a cap brings an infinite one to ``+-cap``. Then, for one row and head:

    - a score or a sink of -inf weighs nothing; if all are, ``lse`` is -inf and ``out`` 0;
    - a score or a sink that is NaN or +inf makes ``out`` and ``lse`` NaN;
    - a value that is not finite makes its column NaN, whatever the weight of its key.

    Finite numbers whose products or sums overflow float32 are not covered.

    Args:
        q: ``[B, N, H, Dk]`` float32, bfloat16 or float16. Rows may be strided.
        k_cache: ``[P, page, Hkv, Dk]``, same dtype or float8_e4m3fn, ``H`` a multiple of ``Hkv``.
            May be strided.
        v_cache: ``[P, page, Hkv, Dv]``, dtype of ``k_cache``. May be strided.
        block_tables: ``[B, M]`` int32 or int64: page of logical block ``m``. Only entries that
            hold a visible key are looked at.
        context_lens: ``[B]`` int32 or int64: length of the committed prefix; 0 is allowed.
            Negative = padded request: out 0, lse -inf, nothing of it is read.
        ancestors: ``[B, N, W <= 32]`` int32 words, least significant bit first.
        scale: factor of ``q . k``; ``Dk ** -0.5`` when None.
        k_scale, v_scale: of a float8_e4m3fn cache, ``[Hkv]`` float32 or one element: what it holds
            times this is the key (the value).
        sinks: ``[H]`` float32: ``exp(sinks[h])`` is added to the softmax denominator of every
            present row, and to its LSE, without a value (learnt attention sinks).
        logit_cap: when positive, scores become ``cap * tanh(score / cap)`` after scaling; sinks are
            not capped.
        window: when positive, a key is visible only if it is less than ``window`` positions behind.
        shard: the part of the context that the cache holds; all of it when None.
        out: ``[B, N, H, Dv]`` in q's dtype; allocated when None. May be strided.
        lse: ``[B, N, H]`` float32, natural log of the sum of ``exp(score)``; allocated when None.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or (on CPU) a
            table is too narrow, or a page that is needed out of range. On other devices, where
            looking would wait, such a request or key counts as absent.
    """
    op = "tree_attention"
    if backend is None and _on_fast_path(q):
        rest = (k_cache, v_cache, block_tables, context_lens, ancestors, k_scale, v_scale, sinks)
        factor = q.shape[3] ** -0.5 if scale is None and q.shape[3] else scale
        function = torch.ops.spec_kernels.tree_attention.default
        done = _call_kernel(function, q, v_cache, rest, factor, logit_cap, window, shard, out, lse)
        if done is not None:
            return done
    check_tensor(op, "q", q, (None, None, None, None), FLOATS_AND_HALF)
    num_heads, k_dim = q.shape[2:]
    device = q.device
    check_tensor(op, "k_cache", k_cache, (None, None, None, k_dim), (q.dtype, *FP8), device)
    check_tensor(op, "v_cache", v_cache, (*k_cache.shape[:3], None), (k_cache.dtype,), device)
    check_last_dim(op, "q", q)
    _check_cache(op, "k_cache", k_cache)
    check_last_dim(op, "v_cache", v_cache)
    num_kv_heads = k_cache.shape[2]
    if k_dim < 1:
        fail(op, "q", "at least one column", k_dim)
    if num_heads and (num_kv_heads < 1 or num_heads % num_kv_heads):
        fail(op, "k_cache", f"a number of heads that divides {num_heads}", num_kv_heads)
    if scale is None:
        scale = k_dim**-0.5
    k_scale = check_cache_scale(op, "k_scale", k_scale, k_cache, num_kv_heads)
    v_scale = check_cache_scale(op, "v_scale", v_scale, v_cache, num_kv_heads)
    indices = (block_tables, context_lens, ancestors)
    part = _check_common(op, q, *indices, sinks, scale, logit_cap, shard)
    out, lse = _outputs(op, q, v_cache.shape[3], out, lse)
    factors = (k_scale, v_scale, sinks, scale, logit_cap, window)
    args = (q, k_cache, v_cache, *indices, *factors, *part, out, lse)
    run(op, backend, device, args, tree_attention_reference)
    return out, lse


def tree_attention_mla(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    scale: float,
    cache_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    window: int = 0,
    shard: ContextShard | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of ``N`` tree rows.

    One cached row serves all heads: ``score = (q_latent . latent + q_rope . rope_key) * scale`` and
    ``out = sum(weight * latent)``. The caller has multiplied ``q_latent`` by the key up-projection
    and applies the value up-projection to ``out``. Visibility, window, cap, sinks, shards, lse,
    errors and the promise on bits are those of ``tree_attention``.

    Args:
        q_latent: ``[B, N, H, R]`` float32, bfloat16 or float16. Rows may be strided.
        q_rope: ``[B, N, H, Dr]``, same dtype.
        cache: ``[P, page, R + Dr]``, same dtype or float8_e4m3fn: latent, then rope key. May be
            strided.
        scale: softmax scale; it belongs to the head before absorption, so no default fits.
        cache_scale: of a float8_e4m3fn cache, one float32 element: what it holds times this is the
            row, once, whether as key or as value.
        out: ``[B, N, H, R]``; allocated when None.
        block_tables, context_lens, ancestors, sinks, logit_cap, window, shard, lse, backend: as in
            ``tree_attention``.
    """
    op = "tree_attention_mla"
    if backend is None and _on_fast_path(q_latent):
        rest = (q_rope, cache, block_tables, context_lens, ancestors, cache_scale, sinks)
        function = torch.ops.spec_kernels.tree_attention_mla.default
        q = q_latent
        done = _call_kernel(function, q, q, rest, scale, logit_cap, window, shard, out, lse)
        if done is not None:
            return done
    check_tensor(op, "q_latent", q_latent, (None, None, None, None), FLOATS_AND_HALF)
    rank = q_latent.shape[3]
    dtype, device = q_latent.dtype, q_latent.device
    check_tensor(op, "q_rope", q_rope, (*q_latent.shape[:3], None), (dtype,), device)
    columns = rank + q_rope.shape[3]
    check_tensor(op, "cache", cache, (None, None, columns), (dtype, *FP8), device)
    check_last_dim(op, "q_latent", q_latent)
    check_last_dim(op, "q_rope", q_rope)
    _check_cache(op, "cache", cache)
    if rank < 1:
        fail(op, "q_latent", "at least one column", rank)
    cache_scale = check_cache_scale(op, "cache_scale", cache_scale, cache, 1)
    indices = (block_tables, context_lens, ancestors)
    part = _check_common(op, q_latent, *indices, sinks, scale, logit_cap, shard)
    out, lse = _outputs(op, q_latent, rank, out, lse)
    factors = (cache_scale, sinks, scale, logit_cap, window)
    args = (q_latent, q_rope, cache, *indices, *factors, *part, out, lse)
    run(op, backend, device, args, tree_attention_mla_reference)
    return out, lse
