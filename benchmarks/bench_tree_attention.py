"""tree_attention against gather + SDPA and gather + compiled flex_attention: checked, then timed.

    python benchmarks/bench_tree_attention.py [--rounds N] [--no-flex] [--json FILE]

The rivals gather the pages (and dequantise, of an fp8 cache, to the queries' dtype), then attend
with a mask: scaled_dot_product_attention, where all rows that share a KV head are the queries of
one head (faster than repeating K/V for every head), and flex_attention under torch.compile, with
its block mask. Only calls are timed, no compilation. "GEMM" is the share of this machine's
matrix-multiply rate in the queries' dtype that the two products alone come to, "read" the cache
bytes over the best time as a share of its copy rate (read + write); both measured in the same run.
The larger of the two says how near the floor a shape is. A contender that cannot do a row says
"unsupported", and why below the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from spec_kernels import link_tree, tree_attention, tree_attention_mla
from spec_kernels.ops.tree_attention.reference import unpack_ancestors
from spec_kernels.ops.tree_attention.traffic import attention_traffic
from spec_kernels.testing.timing import (
    copy_gbps,
    gemm_gflops,
    ratio,
    time_in_turns,
    write_json,
)

CHAIN, TREE = 1, 4  # children of a node
# name: form, branching, nodes, context, heads, KV heads, Dk, Dv, page
SHAPES = {
    "bundled model, plain decoding": ("mla", CHAIN, 1, 300, 1, 1, 80, 64, 16),
    "bundled model, chain of 3": ("mla", CHAIN, 4, 300, 1, 1, 80, 64, 16),
    "bundled model, tree of 32": ("mla", TREE, 32, 300, 1, 1, 80, 64, 16),
    "Kimi, plain decoding": ("mla", CHAIN, 1, 8192, 8, 1, 576, 512, 16),
    "Kimi, chain of 3": ("mla", CHAIN, 4, 8192, 8, 1, 576, 512, 16),
    "Kimi, tree of 16": ("mla", TREE, 16, 8192, 8, 1, 576, 512, 16),
    "Kimi, tree of 16, short": ("mla", TREE, 16, 1024, 8, 1, 576, 512, 16),
    "Kimi, tree of 64": ("mla", TREE, 64, 8192, 8, 1, 576, 512, 16),
    "drafter, tree of 16": ("gqa", TREE, 16, 4096, 8, 8, 128, 128, 16),
    "grouped, chain of 3": ("gqa", CHAIN, 4, 4096, 32, 8, 128, 128, 64),
    "grouped, page of 1": ("gqa", CHAIN, 4, 4096, 32, 8, 128, 128, 1),
}
FP8 = torch.float8_e4m3fn
# name: queries, cache
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp8": (torch.bfloat16, FP8),
}
# fp16 and fp8 differ from the others in how they are packed, so a few shapes show them.
NARROW_SHAPES = (
    "Kimi, plain decoding",
    "Kimi, tree of 16",
    "Kimi, tree of 16, short",
    "grouped, chain of 3",
)
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-3, "fp8": 2e-2}


def make(form, branching, nodes, context, heads, kv_heads, k_dim, v_dim, page, dtype, cache_dtype):
    """The call of ours and of its rivals, as functions without arguments."""
    g = torch.Generator().manual_seed(0)
    length = context + nodes
    num_blocks = -(-length // page)
    num_pages = num_blocks + 1
    tables = torch.randperm(num_pages, generator=g)[:num_blocks][None].int()
    q = torch.randn(1, nodes, heads, k_dim, generator=g).to(dtype)
    k = torch.randn(num_pages, page, kv_heads, k_dim, generator=g).to(cache_dtype)
    parents = torch.tensor([-1] + [(i - 1) // branching for i in range(1, nodes)])
    ancestors = link_tree(torch.zeros(1, nodes, dtype=torch.int64), parents).ancestors
    lens = torch.tensor([context], dtype=torch.int32)
    scale = k_dim**-0.5
    options = dict(
        scale=scale,
        out=torch.empty(1, nodes, heads, v_dim, dtype=dtype),
        lse=torch.empty(1, nodes, heads),
    )
    factor = torch.full((1,), 0.75) if cache_dtype == FP8 else None
    if form == "mla":
        v = k[..., :v_dim]
        pieces = (q[..., :v_dim].contiguous(), q[..., v_dim:].contiguous(), k.squeeze(2))
        options |= dict(cache_scale=factor)

        def ours():
            return tree_attention_mla(*pieces, tables, lens, ancestors, **options)[0]
    else:
        v = torch.randn(*k.shape[:3], v_dim, generator=g).to(cache_dtype)
        factors = None if factor is None else factor.expand(kv_heads)
        options |= dict(k_scale=factors, v_scale=factors)

        def ours():
            return tree_attention(q, k, v, tables, lens, ancestors, **options)[0]

    group = heads // kv_heads
    tree_mask = torch.ones(nodes, length, dtype=torch.bool)
    tree_mask[:, context:] = unpack_ancestors(ancestors)[0, :, :nodes]
    mask = tree_mask.repeat_interleave(group, 0)
    table = tables[0].long()

    def gather(cache):
        """``[1, Hkv, length, D]`` in the queries' dtype."""
        if cache_dtype == FP8:
            codes = cache.view(torch.uint8)[table].view(FP8)
            rows = (codes.to(torch.float32) * factor).to(dtype)
        else:
            rows = cache[table]
        return rows.flatten(0, 1)[:length].transpose(0, 1)[None]

    def gathered():
        keys = gather(k)
        return keys, keys[..., :v_dim] if form == "mla" else gather(v)

    def sdpa():
        keys, values = gathered()
        rows = q[0].view(nodes, kv_heads, group, k_dim).transpose(0, 1).flatten(1, 2)
        result = F.scaled_dot_product_attention(
            rows[None], keys, values, attn_mask=mask, scale=scale
        )
        return result[0].view(kv_heads, nodes, group, v_dim).transpose(0, 1).flatten(1, 2)[None]

    blocks = create_block_mask(
        lambda b, h, row, key: tree_mask[row, key], None, None, nodes, length, device="cpu"
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def flex():
        keys, values = gathered()
        rows = q.transpose(1, 2)
        grouped = heads != kv_heads
        result = compiled(rows, keys, values, block_mask=blocks, scale=scale, enable_gqa=grouped)
        return result.transpose(1, 2)

    return {"ours": ours, "sdpa": sdpa, "flex": flex}


def check(contenders: dict[str, Callable], tolerance: float) -> dict[str, str]:
    """Compares every rival's result with ours; returns who cannot do it, and why."""
    right = contenders["ours"]().clone()
    refused = {}
    for name in ("sdpa", "flex"):
        if name not in contenders:
            continue
        try:
            result = contenders[name]()
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        torch.testing.assert_close(result, right, atol=tolerance, rtol=tolerance)
    return refused


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: all")
    parser.add_argument("--no-flex", action="store_true", help="it compiles for seconds a row")
    parser.add_argument("--json")
    options = parser.parse_args()

    copy = copy_gbps()
    gemm = {name: gemm_gflops(dtype) for name, (dtype, _) in DTYPES.items()}
    rates = ", ".join(f"{gemm[name]:.0f} ({name})" for name in ("fp32", "bf16", "fp16"))
    print(
        f"copy {copy:.1f} GB/s (read + write), GEMM {rates} GFLOP/s, "
        f"{torch.get_num_threads()} threads"
    )
    print(
        f"{'shape':32}{'dtype':6}{'us':>10}{'best':>10}{'sdpa us':>11}  {'ratio':24}"
        f"{'flex us':>11}  {'ratio':24}{'GEMM':>6}{'read':>6}"
    )
    rows, reasons = [], []
    for shape, spec in SHAPES.items():
        if options.shape and shape not in options.shape:
            continue
        form, _, nodes, context, heads, kv_heads, k_dim, v_dim, _ = spec
        for name, dtypes in DTYPES.items():
            if options.dtype and name not in options.dtype:
                continue
            if name in ("fp16", "fp8") and shape not in NARROW_SHAPES:
                continue
            torch.compiler.reset()  # or the compiler gives up after so many shapes
            contenders = make(*spec, *dtypes)
            if options.no_flex:
                del contenders["flex"]
            refused = check(contenders, TOLERANCE[name])
            reasons += [f"{shape}, {name}, {rival}: {why}" for rival, why in refused.items()]
            able = {rival: f for rival, f in contenders.items() if rival not in refused}
            t = time_in_turns(able, rounds=options.rounds)
            best = t["ours"].best
            counted = attention_traffic(
                context,
                nodes,
                num_heads=heads,
                num_kv_heads=kv_heads,
                k_dim=k_dim,
                v_dim=v_dim,
                latent=form == "mla",
                cache_itemsize=dtypes[1].itemsize,
            )
            of_gemm = counted.flops / best / 1e3 / gemm[name]
            of_copy = counted.cache / best / 1e3 / copy
            line = f"{shape:32}{name:6}{t['ours'].median:10.1f}{best:10.1f}"
            row = {
                "shape": shape,
                "form": form,
                "dtype": name,
                "num_nodes": nodes,
                "context": context,
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "us_median": t["ours"].median,
                "us_best": best,
                "gemm_gflops": gemm[name],
                "share_of_gemm": of_gemm,
                "copy_gbps": copy,
                "share_of_copy": of_copy,
            }
            for rival in ("sdpa", "flex"):
                if rival not in t:
                    word = "unsupported" if rival in refused else "not run"
                    line += f"{word:>11}  {'-':24}"
                    row[rival] = word
                    continue
                r = ratio(t[rival], t["ours"])
                line += f"{t[rival].median:11.1f}  {str(r):24}"
                row |= {
                    f"{rival}_us_median": t[rival].median,
                    f"{rival}_us_best": t[rival].best,
                    f"ratio_{rival}": r.median,
                    f"ratio_{rival}_low": r.low,
                    f"ratio_{rival}_high": r.high,
                }
            print(f"{line}{of_gemm:6.0%}{of_copy:6.0%}", flush=True)
            rows.append(row)
    for reason in reasons:
        print(f"unsupported: {reason}")
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
