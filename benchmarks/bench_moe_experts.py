"""moe_experts against a loop over experts in PyTorch: checked first, then timed in turns.

    python benchmarks/bench_moe_experts.py [--dtype fp32|bf16] [--rounds N] [--json FILE]

Shapes are one rank's share. "ceiling" is the time that this machine's own copy bandwidth (weights
read once) or matrix-multiply rate needs, whichever is longer, both measured in the same run.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from spec_kernels.ops import moe_experts
from spec_kernels.ops.moe_experts import router_topk
from spec_kernels.testing.compare import assert_as_accurate
from spec_kernels.testing.timing import copy_gbps, gemm_gflops, ratio, time_in_turns, write_json

# name: H, I a rank, Is a rank, E, top_k, token counts
SHAPES = {
    "bundled model, tp 8": (192, 12, 12, 16, 4, (1, 4, 16)),
    "bundled model, tp 1": (192, 96, 96, 16, 4, (1, 4, 64)),
    "wide, 16 experts, tp 8": (7168, 256, 256, 16, 4, (1, 4, 16, 64)),
    "wide, 64 experts top-8, tp 8": (7168, 256, 256, 64, 8, (1, 4, 16, 64)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(num_rows, hidden, inner, shared_inner, num_experts, dtype):
    g = torch.Generator().manual_seed(0)

    def weight(*shape):
        return (torch.randn(*shape, generator=g) / shape[-1] ** 0.5).to(dtype)

    return {
        "x": torch.randn(num_rows, hidden, generator=g).to(dtype),
        "router_weight": weight(num_experts, hidden),
        "w_gate_up": weight(num_experts, 2 * inner, hidden),
        "w_down": weight(num_experts, hidden, inner),
        "correction_bias": torch.randn(num_experts, generator=g) * 0.1,
        "shared_gate_up": weight(2 * shared_inner, hidden),
        "shared_down": weight(hidden, shared_inner),
    }


def mlp(x, gate_up, down):
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def loop_over_experts(a, top_k):
    """What a PyTorch model file does: every expert gathers its rows and adds its share."""
    x = a["x"]
    ids, weights = router_topk(x, a["router_weight"], a["correction_bias"], top_k)
    out = mlp(x, a["shared_gate_up"], a["shared_down"])
    for e in ids.unique().tolist():
        rows, slots = torch.where(ids == e)
        y = mlp(x[rows], a["w_gate_up"][e], a["w_down"][e])
        out.index_add_(0, rows, y * weights[rows, slots, None].to(y.dtype))
    return out


def ceiling_us(a, top_k, gbps, gflops):
    """Microseconds for the weights that are touched, and for the arithmetic; the longer one."""
    x, gate_up, shared = a["x"], a["w_gate_up"], a["shared_gate_up"]
    ids, _ = router_topk(x, a["router_weight"], a["correction_bias"], top_k)
    routed, dense = 3 * gate_up[0].numel() // 2, 3 * shared.numel() // 2
    elements = ids.unique().numel() * routed + dense + a["router_weight"].numel()
    macs = x.shape[0] * (top_k * routed + dense + a["router_weight"].numel())
    return {
        "copy": elements * x.element_size() / gbps / 1e3,
        "gemm": 2 * macs / gflops / 1e3,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json")
    options = parser.parse_args()

    torch.manual_seed(0)
    gbps = copy_gbps()
    rows = []
    print(f"copy {gbps:.1f} GB/s (read + write), {torch.get_num_threads()} threads")
    for name in options.dtype or DTYPES:
        dtype = DTYPES[name]
        gflops = gemm_gflops(dtype)
        print(f"\n{name}: matrix multiply {gflops:.0f} GFLOP/s")
        print(f"{'shape':30}{'T':>4}{'us':>10}{'best':>10}{'loop us':>10}  {'ratio':22}ceiling")
        for shape, (hidden, inner, shared, num_experts, top_k, counts) in SHAPES.items():
            whole = make(max(counts), hidden, inner, shared, num_experts, dtype)
            for num_rows in counts:
                a = whole | {"x": whole["x"][:num_rows]}
                out = torch.empty_like(a["x"])
                exact = {k: v.double() for k, v in a.items()} if num_experts <= 16 else None
                if exact is not None:
                    assert_as_accurate(
                        moe_experts(**a, top_k=top_k),
                        loop_over_experts(exact, top_k),
                        loop_over_experts(a, top_k),
                    )
                t = time_in_turns(
                    {
                        "ours": lambda a=a, out=out, k=top_k: moe_experts(**a, top_k=k, out=out),
                        "loop": lambda a=a, k=top_k: loop_over_experts(a, k),
                    },
                    rounds=options.rounds,
                )
                r = ratio(t["loop"], t["ours"])
                ceilings = ceiling_us(a, top_k, gbps, gflops)
                bound = max(ceilings, key=ceilings.get)
                share = ceilings[bound] / t["ours"].best
                print(
                    f"{shape:30}{num_rows:4}{t['ours'].median:10.1f}{t['ours'].best:10.1f}"
                    f"{t['loop'].median:10.1f}  {str(r):22}{share:.0%} of {bound}",
                    flush=True,
                )
                rows.append(
                    {
                        "shape": shape,
                        "dtype": name,
                        "tokens": num_rows,
                        "us_median": t["ours"].median,
                        "us_best": t["ours"].best,
                        "loop_us_median": t["loop"].median,
                        "ratio": r.median,
                        "ratio_low": r.low,
                        "ratio_high": r.high,
                        "bound": bound,
                        "share_of_bound": share,
                        "copy_gbps": gbps,
                        "gemm_gflops": gflops,
                    }
                )
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
