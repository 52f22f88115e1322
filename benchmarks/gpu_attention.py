"""One request's paged attention on a device, and who else can compute it: for ``gpu_check.py``.

Every contender is a function of the number of its call: call ``i`` reads the ``i``-th of several
caches, so that calls in a row find nothing in the L2 cache. FlashInfer's was written from its
documentation and is tested nowhere without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from spec_kernels import link_tree, tree_attention, tree_attention_mla
from spec_kernels.ops.tree_attention.reference import unpack_ancestors
from spec_kernels.ops.tree_attention.traffic import attention_traffic

# form, cache, heads, KV heads, Dk, Dv
ATTENTION = {
    "MLA, 8 heads": ("mla", None, 8, 1, 576, 512),
    "MLA, 8 heads, fp8": ("mla", torch.float8_e4m3fn, 8, 1, 576, 512),
    "grouped, 32 over 8": ("gqa", None, 32, 8, 128, 128),
}
PAGE = 16


@dataclasses.dataclass
class Problem:
    """``caches`` hold different values of one shape."""

    form: str
    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # K and V; of the latent form, V is a view
    tables: torch.Tensor
    lens: torch.Tensor
    ancestors: torch.Tensor
    mask: torch.Tensor  # [rows of a KV head, keys], for the rivals
    scales: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def ours(self, i: int = 0) -> torch.Tensor:
        k, v = self.caches[i % len(self.caches)]
        rest = (self.tables, self.lens, self.ancestors)
        options = dict(scale=self.scale, **self.scales, **self.outputs)
        if self.form == "mla":
            rank = v.shape[-1]
            q = (self.q[..., :rank], self.q[..., rank:])
            return tree_attention_mla(*q, k.squeeze(2), *rest, **options)[0]
        return tree_attention(self.q, k, v, *rest, **options)[0]

    def gathered(self, i: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values ``[1, Hkv, rows or keys, D]``, out of the pages."""
        k, v = self.caches[i % len(self.caches)]
        kv_heads, num_keys = k.shape[2], self.mask.shape[1]
        pages = self.tables[0].long()

        def rows(cache):
            # PyTorch neither indexes nor multiplies fp8 everywhere; a scale of 1 is left out.
            if cache.itemsize == 1:
                pages_of = cache.view(torch.uint8)[pages].view(cache.dtype)
            else:
                pages_of = cache[pages]
            return pages_of.flatten(0, 1)[:num_keys].transpose(0, 1).to(self.q.dtype)

        keys = rows(k)
        values = keys[..., : v.shape[-1]] if self.form == "mla" else rows(v)
        q = self.q[0].unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        return q[None], keys[None], values[None]

    def as_ours(self, result: torch.Tensor) -> torch.Tensor:
        """``[1, Hkv, rows, D]`` as ``[1, N, H, D]``."""
        nodes = self.q.shape[1]
        return result[0].unflatten(1, (nodes, -1)).transpose(0, 1).flatten(1, 2)[None]

    def sdpa(self, i: int = 0) -> torch.Tensor:
        result = F.scaled_dot_product_attention(
            *self.gathered(i), attn_mask=self.mask, scale=self.scale
        )
        return self.as_ours(result)


def make(
    form, branching, nodes, context, heads, kv_heads, k_dim, v_dim, page, dtype,
    cache_dtype=None, device="cpu", num_copies=1,
):  # fmt: skip
    g = torch.Generator().manual_seed(0)
    length = context + nodes
    num_blocks = -(-length // page)
    num_pages = num_blocks + 1
    tables = torch.randperm(num_pages, generator=g)[:num_blocks][None].int()
    q = torch.randn(1, nodes, heads, k_dim, generator=g).to(device, dtype)
    shape = (num_pages, page, kv_heads, k_dim if form == "mla" else k_dim + v_dim)
    on_device = torch.Generator(device).manual_seed(1)
    caches = []
    for _ in range(num_copies):
        values = torch.randn(shape, generator=on_device, device=device).to(cache_dtype or dtype)
        if form == "mla":
            caches.append((values, values[..., :v_dim]))
        else:
            caches.append(tuple(t.contiguous() for t in values.split((k_dim, v_dim), -1)))
    parents = torch.tensor([-1] + [(i - 1) // branching for i in range(1, nodes)])
    ancestors = link_tree(torch.zeros(1, nodes, dtype=torch.int64), parents).ancestors
    mask = torch.ones(nodes, length, dtype=torch.bool)
    mask[:, context:] = unpack_ancestors(ancestors)[0, :, :nodes]
    names = ("cache_scale",) if form == "mla" else ("k_scale", "v_scale")
    return Problem(
        form,
        q,
        caches,
        tables.to(device),
        torch.tensor([context], dtype=torch.int32, device=device),
        ancestors.to(device),
        mask.repeat_interleave(heads // kv_heads, 0).to(device),
        {n: torch.ones(1, device=device) for n in names} if cache_dtype else {},
        dict(
            out=torch.empty(1, nodes, heads, v_dim, dtype=dtype, device=device),
            lse=torch.empty(1, nodes, heads, device=device),
        ),
    )


def problem_of(shape: str, context: int, num_nodes: int, device: str, flush: int):
    form, cache_dtype, heads, kv_heads, k_dim, v_dim = ATTENTION[shape]
    branching = 1 if form == "mla" else 4  # rivals of the latent form know chains alone
    traffic = attention_traffic(
        context, num_nodes, num_heads=heads, k_dim=k_dim, v_dim=v_dim, num_kv_heads=kv_heads,
        latent=form == "mla", cache_itemsize=1 if cache_dtype else 2,
    )  # fmt: skip
    problem = make(
        form, branching, num_nodes, context, heads, kv_heads, k_dim, v_dim, PAGE, torch.bfloat16,
        cache_dtype, device, max(1, min(256, flush // traffic.cache)),
    )  # fmt: skip
    return problem, traffic


def _flex(p) -> Callable[[int], object]:
    mask = p.mask

    def sees(b, h, row, key):
        return mask[row, key]

    blocks = create_block_mask(sees, None, None, *mask.shape, device=mask.device)
    compiled = torch.compile(flex_attention)
    return lambda i: p.as_ours(compiled(*p.gathered(i), block_mask=blocks, scale=p.scale))


def _flashinfer(p) -> Callable[[int], object]:
    import flashinfer

    device, (num_nodes, num_heads) = p.q.device, p.q.shape[1:3]
    num_keys, num_pages = p.mask.shape[1], p.tables.shape[1]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows, pages = ints(0, num_nodes), ints(0, num_pages)
    k, v = p.caches[0]
    types = dict(q_data_type=p.q.dtype, kv_data_type=k.dtype)
    if p.form == "mla":
        rank, rope = v.shape[-1], k.shape[-1] - v.shape[-1]
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
        wrapper.plan(
            rows, pages, p.tables[0], ints(num_keys), num_heads, rank, rope, PAGE, True, p.scale,
            **types,
        )  # fmt: skip
        q, q_rope = (t[0].contiguous() for t in p.q.split((rank, rope), -1))

        def run(i):
            cache = p.caches[i % len(p.caches)][0].squeeze(2)
            return wrapper.run(q, q_rope, cache[..., :rank], cache[..., rank:])[None]

    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        last = (num_keys - 1) % PAGE + 1
        mask = p.mask.unflatten(0, (num_nodes, -1))[:, 0]
        wrapper.plan(
            rows, pages, p.tables[0], ints(last), num_heads, k.shape[2], k.shape[3], PAGE,
            custom_mask=mask.flatten(), sm_scale=p.scale, **types,
        )  # fmt: skip

        def run(i):
            return wrapper.run(p.q[0], p.caches[i % len(p.caches)])[None]

    return run


RIVALS = {"flex_attention": _flex, "flashinfer": _flashinfer}
