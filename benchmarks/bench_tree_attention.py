"""tree_attention against gather + scaled_dot_product_attention with a mask: checked, then timed.

    python benchmarks/bench_tree_attention.py [--rounds N] [--json FILE]

The rival gathers the pages, lets all rows that share a KV head be the queries of one SDPA head
(faster than repeating K/V for every head) and masks. "GEMM" is the share of this machine's
matrix-multiply rate in the same dtype that the two products alone come to, "read" the cache bytes
over the best time as a share of its copy rate (read + write); both measured in the same run. The
larger of the two says how near the floor a shape is.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from spec_kernels import link_tree, tree_attention, tree_attention_mla
from spec_kernels.ops.tree_attention.reference import unpack_ancestors
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
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(form, branching, nodes, context, heads, kv_heads, k_dim, v_dim, page, dtype):
    """The call of ours and of its rival, as functions without arguments."""
    g = torch.Generator().manual_seed(0)
    length = context + nodes
    num_blocks = -(-length // page)
    num_pages = num_blocks + 1
    tables = torch.randperm(num_pages, generator=g)[:num_blocks][None].int()
    q = torch.randn(1, nodes, heads, k_dim, generator=g).to(dtype)
    k = torch.randn(num_pages, page, kv_heads, k_dim, generator=g).to(dtype)
    parents = torch.tensor([-1] + [(i - 1) // branching for i in range(1, nodes)])
    ancestors = link_tree(torch.zeros(1, nodes, dtype=torch.int64), parents).ancestors
    lens = torch.tensor([context], dtype=torch.int32)
    scale = k_dim**-0.5
    out = torch.empty(1, nodes, heads, v_dim, dtype=dtype)
    lse = torch.empty(1, nodes, heads)
    outputs = dict(out=out, lse=lse)
    if form == "mla":
        v = k[..., :v_dim]
        pieces = (q[..., :v_dim].contiguous(), q[..., v_dim:].contiguous(), k.squeeze(2))

        def ours():
            tree_attention_mla(*pieces, tables, lens, ancestors, scale=scale, **outputs)
            return out
    else:
        v = torch.randn(*k.shape[:3], v_dim, generator=g).to(dtype)

        def ours():
            tree_attention(q, k, v, tables, lens, ancestors, scale=scale, **outputs)
            return out

    group = heads // kv_heads
    mask = torch.ones(nodes, length, dtype=torch.bool)
    mask[:, context:] = unpack_ancestors(ancestors)[0, :, :nodes]
    mask = mask.repeat_interleave(group, 0)
    table = tables[0].long()

    def rival():
        keys = k[table].flatten(0, 1)[:length].transpose(0, 1)
        values = (
            keys[..., :v_dim] if form == "mla" else v[table].flatten(0, 1)[:length].transpose(0, 1)
        )
        rows = q[0].view(nodes, kv_heads, group, k_dim).transpose(0, 1).flatten(1, 2)
        result = F.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=mask, scale=scale
        )
        return result[0].view(kv_heads, nodes, group, v_dim).transpose(0, 1).flatten(1, 2)[None]

    return ours, rival


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()

    copy = copy_gbps()
    gemm = {name: gemm_gflops(dtype) for name, dtype in DTYPES.items()}
    print(
        f"copy {copy:.1f} GB/s (read + write), GEMM {gemm['fp32']:.0f} (fp32) and "
        f"{gemm['bf16']:.0f} (bf16) GFLOP/s, {torch.get_num_threads()} threads"
    )
    header = f"{'shape':32}{'dtype':6}{'us':>10}{'best':>10}{'sdpa us':>11}{'best':>10}"
    print(f"{header}  {'ratio':24}{'GEMM':>6}{'read':>6}")
    rows = []
    for shape, spec in SHAPES.items():
        form, _, nodes, context, heads, kv_heads, k_dim, v_dim, _ = spec
        for name, dtype in DTYPES.items():
            ours, rival = make(*spec, dtype)
            tolerance = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours(), rival(), atol=tolerance, rtol=tolerance)
            t = time_in_turns({"ours": ours, "sdpa": rival}, rounds=options.rounds)
            r = ratio(t["sdpa"], t["ours"])
            flops = 2 * nodes * heads * context * (k_dim + v_dim)
            columns = k_dim if form == "mla" else k_dim + v_dim
            num_bytes = context * kv_heads * columns * dtype.itemsize
            of_gemm = flops / t["ours"].best / 1e3 / gemm[name]
            of_copy = num_bytes / t["ours"].best / 1e3 / copy
            print(
                f"{shape:32}{name:6}{t['ours'].median:10.1f}{t['ours'].best:10.1f}"
                f"{t['sdpa'].median:11.1f}{t['sdpa'].best:10.1f}  {str(r):24}"
                f"{of_gemm:6.0%}{of_copy:6.0%}",
                flush=True,
            )
            rows.append(
                {
                    "shape": shape,
                    "form": form,
                    "dtype": name,
                    "num_nodes": nodes,
                    "context": context,
                    "num_heads": heads,
                    "num_kv_heads": kv_heads,
                    "us_median": t["ours"].median,
                    "us_best": t["ours"].best,
                    "sdpa_us_median": t["sdpa"].median,
                    "sdpa_us_best": t["sdpa"].best,
                    "ratio": r.median,
                    "ratio_low": r.low,
                    "ratio_high": r.high,
                    "gemm_gflops": gemm[name],
                    "share_of_gemm": of_gemm,
                    "copy_gbps": copy,
                    "share_of_copy": of_copy,
                }
            )
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
