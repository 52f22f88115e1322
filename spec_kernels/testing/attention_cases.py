"""Attention problems for tests and benchmarks: random trees, paged caches, right values.

Caches are NaN wherever no row may look, outputs start as NaN, and ``exact`` is a loop over rows in
float64 that shares nothing with the reference.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import torch

from spec_kernels.ops.tree_attention import ContextShard, tree_attention, tree_attention_mla
from spec_kernels.ops.tree_attention.reference import attend
from spec_kernels.testing.compare import assert_as_accurate, poisoned

FP8 = torch.float8_e4m3fn


def random_paths(num_nodes: int, rng: random.Random, shape: str) -> list[list[int]]:
    """The path of every node of a random tree, itself last; ``shape``: chain, bushy or deep."""
    paths = []
    for i in range(num_nodes):
        if i == 0:
            parent = None
        elif shape == "chain":
            parent = i - 1
        elif shape == "bushy":
            parent = rng.randrange(i)
        else:  # deep: mostly the newest nodes have children
            parent = max(0, i - 1 - min(rng.randrange(4), rng.randrange(4)))
        paths.append(([] if parent is None else paths[parent]) + [i])
    return paths


def words_of(paths: list[list[int]], num_words: int) -> torch.Tensor:
    """Ancestor words ``[len(paths), num_words]`` int32."""
    words = [[0] * num_words for _ in paths]
    for row, path in zip(words, paths, strict=True):
        for node in path:
            row[node // 32] |= 1 << (node % 32)
    signed = [[w - (1 << 32) if w >> 31 else w for w in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32).view(len(paths), num_words)


def paths_of(words: torch.Tensor) -> list[list[int]]:
    """The inverse of ``words_of``."""
    return [
        [32 * w + i for w, word in enumerate(row) for i in range(32) if word >> i & 1]
        for row in words.tolist()
    ]


@dataclasses.dataclass
class Problem:
    """One call of either form; ``q``, ``k``, ``v`` are what both mean by it.

    ``k`` ``[P, page, Hkv, Dk]`` and ``v`` ``[P, page, Hkv, Dv]`` hold the rows of ``shard`` alone;
    in the latent form ``v`` is a view of ``k``, and so is ``v_scale`` of ``k_scale``.
    """

    form: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    context: torch.Tensor
    ancestors: torch.Tensor
    scale: float
    logit_cap: float = 0.0
    window: int = 0
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    shard: ContextShard = ContextShard()

    def replace(self, **changes) -> Problem:
        return dataclasses.replace(self, **changes)

    def to(self, device: str | torch.device) -> Problem:
        moved = {
            f.name: getattr(self, f.name).to(device)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor)
        }
        if self.form == "mla":
            moved["v"] = moved["k"][..., : self.v.shape[-1]]
        return self.replace(**moved)

    def rows(self, b: slice, n: slice) -> Problem:
        return self.replace(
            q=self.q[b, n],
            tables=self.tables[b],
            context=self.context[b],
            ancestors=self.ancestors[b, n],
        )

    def inputs(self) -> tuple:
        """The tensors that either form cannot do without."""
        rest = (self.tables, self.context, self.ancestors)
        if self.form == "gqa":
            return (self.q, self.k, self.v, *rest)
        rank = self.v.shape[-1]
        return (self.q[..., :rank], self.q[..., rank:], self.k.squeeze(2), *rest)

    def scales(self) -> dict[str, torch.Tensor | None]:
        if self.form == "gqa":
            return dict(k_scale=self.k_scale, v_scale=self.v_scale)
        return dict(cache_scale=self.k_scale)

    def options(self) -> dict[str, object]:
        return self.scales() | dict(
            sinks=self.sinks,
            scale=self.scale,
            logit_cap=self.logit_cap,
            window=self.window,
            shard=self.shard,
        )

    def args(self) -> tuple:
        """What the raw op takes."""
        part = (self.shard.index, self.shard.num_shards, self.shard.run)
        factors = (*self.scales().values(), self.sinks, self.scale, self.logit_cap, self.window)
        return (*self.inputs(), *factors, *part, *self.outputs())

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape, device = (*self.q.shape[:3], self.v.shape[-1]), self.q.device
        out = poisoned(*shape, dtype=self.q.dtype, device=device)
        return out, poisoned(*shape[:3], dtype=torch.float32, device=device)

    def run(self, backend: str | None = None, **changes) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.outputs()
        function = tree_attention if self.form == "gqa" else tree_attention_mla
        options = self.options() | dict(out=out, lse=lse) | changes
        return function(*self.inputs(), backend=backend, **options)

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The PyTorch expression in fp32 that errors are measured against, in q's dtype."""
        p = self
        indices = (p.tables, p.context, p.ancestors)
        factors = (p.k_scale, p.v_scale, p.sinks, p.scale, p.logit_cap, p.window)
        part = (p.shard.index, p.shard.num_shards, p.shard.run)
        out, lse = attend("plain", p.q, p.k, p.v, *indices, *factors, *part)
        return out.to(p.q.dtype), lse

    def seen(self, b: int, path: list[int]) -> list[int]:
        """Rows of the cache that a path sees, by their place in the request's table."""
        if not path:
            return []
        context, shard = int(self.context[b]), self.shard
        held = shard.local_positions(context)
        keys = list(zip(held, range(len(held)), strict=True))
        if shard.index == 0:
            keys += [(context + depth, len(held) + j) for depth, j in enumerate(path)]
        last = context + len(path) - 1
        return [row for p, row in keys if self.window <= 0 or last - p < self.window]


def make(
    form: str = "gqa",
    dtype: torch.dtype = torch.float32,
    *,
    contexts: Sequence[int] = (40,),
    paths: list[list[list[int]]] | None = None,
    num_nodes: int = 4,
    shape: str = "deep",
    num_words: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    k_dim: int = 32,
    v_dim: int = 32,
    page: int = 16,
    window: int = 0,
    logit_cap: float = 0.0,
    scale: float | None = None,
    seed: int = 0,
    int_dtype: torch.dtype = torch.int64,
    values: Callable[[torch.Tensor, torch.Tensor, int], None] | None = None,
    cache_dtype: torch.dtype | None = None,
    with_sinks: bool = False,
    shard: ContextShard | None = None,
    poison: float = math.nan,
) -> Problem:
    """A call whose caches hold random values where a row looks, and ``poison`` elsewhere.

    Args:
        paths: of every request, the path of every query row; else a random tree, all queried.
        values: changes ``(keys, values, place)`` of one cached row, before it is stored.
        cache_dtype: ``torch.float8_e4m3fn`` for a quantised cache, with scales per KV head (one
            for all in the latent form); ``dtype`` when None.
        with_sinks: random attention sinks.
        shard: the caches then hold that part of the context alone (see also ``shards_of``).
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shard = ContextShard() if shard is None else shard
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    if paths is None:
        paths = [random_paths(num_nodes, rng, shape) for _ in contexts]
    num_rows = len(paths[0])
    slots = max((j + 1 for request in paths for path in request for j in path), default=1)
    num_words = num_words or (slots + 31) // 32
    kv_heads = 1 if form == "mla" else kv_heads
    in_cache = [shard.local_length(c) + (slots if shard.index == 0 else 0) for c in contexts]
    blocks = max(1, *(-(-length // page) for length in in_cache))
    num_pages = len(contexts) * blocks + 2
    order = torch.randperm(num_pages, generator=generator)[: len(contexts) * blocks]
    tables = order.view(len(contexts), blocks).to(int_dtype)
    q = torch.randn(len(contexts), num_rows, heads, k_dim, generator=generator).to(dtype)
    # Values are placed in fp32 and cast once: fp8 tensors do not support assignment by index.
    k = torch.full((num_pages, page, kv_heads, k_dim), poison)
    v = k[..., :v_dim] if form == "mla" else torch.full((*k.shape[:3], v_dim), poison)
    problem = Problem(
        form,
        q,
        k,
        v,
        tables,
        torch.tensor(contexts, dtype=int_dtype),
        torch.stack([words_of(request, num_words) for request in paths]),
        k_dim**-0.5 if scale is None else scale,
        logit_cap,
        window,
        shard=shard,
    )
    for b, request in enumerate(paths):
        used = sorted({row for path in request for row in problem.seen(b, path)})
        places = torch.tensor(used, dtype=torch.int64)
        at = tables[b].long()[places // page], places % page
        k[at] = torch.randn(len(used), kv_heads, k_dim, generator=generator)
        if form == "gqa":
            v[at] = torch.randn(len(used), kv_heads, v_dim, generator=generator)
        if values is not None:
            for row in used:
                where = int(tables[b, row // page]), row % page
                values(k[where], v[where], row)
    k = k.to(cache_dtype)
    problem.k, problem.v = k, k[..., :v_dim] if form == "mla" else v.to(cache_dtype)
    if cache_dtype == FP8:
        problem.k_scale = 0.25 + torch.rand(kv_heads, generator=generator)
        problem.v_scale = problem.k_scale
        if form == "gqa":
            problem.v_scale = 1.5 + torch.rand(kv_heads, generator=generator)
    if with_sinks:
        problem.sinks = 2 * torch.randn(heads, generator=generator)
    return problem


def shards_of(problem: Problem, num_shards: int, run: int) -> list[Problem]:
    """The same call on the parts of a context: each holds its own rows, and NaN elsewhere."""
    p = problem
    page = p.k.shape[1]
    tree_rows = 32 * p.ancestors.shape[2]
    parts = []
    for index in range(num_shards):
        shard = ContextShard(index, num_shards, run)
        rows = []  # of each request: place in the whole cache, by place in the part's
        for context, table in zip(p.context.tolist(), p.tables, strict=True):
            own = shard.local_positions(context)
            if index == 0:
                room = len(table) * page
                own += range(context, min(context + tree_rows, room))
            rows.append(own)
        blocks = max(1, *(-(-len(own) // page) for own in rows))
        tables = torch.arange(len(rows) * blocks).flip(0).view(len(rows), blocks)
        caches = []
        for cache in (p.k, p.v):
            part = poisoned(len(rows) * blocks, page, *cache.shape[2:], dtype=torch.float32)
            for b, own in enumerate(rows):
                source = torch.tensor(own, dtype=torch.int64)
                target = torch.arange(len(own))
                pages = p.tables[b].long()[source // page]
                part[tables[b][target // page], target % page] = cache.float()[pages, source % page]
            caches.append(part.to(cache.dtype))
        k, v = caches
        if p.form == "mla":
            v = k[..., : p.v.shape[-1]]
        parts.append(p.replace(k=k, v=v, tables=tables.to(p.tables.dtype), shard=shard))
    return parts


def exact(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row in float64."""
    p = problem
    page, group = p.k.shape[1], p.q.shape[2] // max(1, p.k.shape[2])
    k, v = p.k.double(), p.v.double()
    if p.k_scale is not None:
        k, v = k * p.k_scale.double().view(-1, 1), v * p.v_scale.double().view(-1, 1)
    out = torch.zeros(*p.q.shape[:3], v.shape[-1], dtype=torch.float64)
    lse = torch.full(p.q.shape[:3], -math.inf, dtype=torch.float64)
    for b in range(p.q.shape[0]):
        table = p.tables[b].tolist()
        for n, path in enumerate(paths_of(p.ancestors[b])):
            rows = p.seen(b, path)
            if not rows:
                continue
            pages = torch.tensor([table[r // page] for r in rows])
            slots = torch.tensor([r % page for r in rows])
            keys = k[pages, slots].repeat_interleave(group, 1)
            values = v[pages, slots].repeat_interleave(group, 1)
            scores = torch.einsum("hd,shd->hs", p.q[b, n].double(), keys) * p.scale
            if p.logit_cap > 0:
                scores = p.logit_cap * torch.tanh(scores / p.logit_cap)
            if p.sinks is not None and p.shard.index == 0:
                scores = torch.cat((scores, p.sinks.double()[:, None]), 1)
            top = scores.amax(1, keepdim=True)
            weights = torch.exp(scores - torch.where(top == -math.inf, 0, top))
            total = weights.sum(1, keepdim=True)
            bad = scores.isnan().any(1) | (scores == math.inf).any(1)
            lse[b, n] = (top + total.log()).squeeze(1).masked_fill(bad, math.nan)
            weights = torch.where(total == 0, 0, weights / total)[:, : len(rows)]
            finite = values.isfinite()
            mixed = torch.einsum("hs,shd->hd", weights, torch.where(finite, values, 0))
            nan = bad[:, None] | ~finite.all(0)
            out[b, n] = mixed.masked_fill(nan, math.nan)
    return out, lse


def check(problem: Problem, backend: str | None, run: Callable | None = None) -> None:
    """Runs ``problem`` where it stands; errors may be at most twice those of PyTorch on the CPU.

    ``run`` takes the place of ``problem.run``: of a problem that differs, as a negative control.
    """
    out, lse = (run or problem.run)(backend)
    host = problem.to("cpu")
    right, right_lse = exact(host)
    plain, plain_lse = host.plain()
    assert_as_accurate(out.cpu(), right, plain)
    assert_as_accurate(lse.cpu(), right_lse, plain_lse)
