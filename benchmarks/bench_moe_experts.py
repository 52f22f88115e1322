"""moe_experts against a loop over experts in PyTorch: checked first, then timed in turns.

    python benchmarks/bench_moe_experts.py [--kind fp32|bf16|int4 ...] [--rounds N] [--json FILE]

Shapes are one rank's share. int4: routed experts packed, all else in bf16; the loop dequantises an
expert before it multiplies. "MB" is what a call reads of weights: those of the distinct experts
that its rows chose, the shared expert and the router. "ceiling" is the time that this machine's own
copy bandwidth (weights read once) or matrix-multiply rate needs, whichever is longer, both measured
in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
import torch.nn.functional as F

from spec_kernels.ops import moe_experts
from spec_kernels.ops.moe_experts import dequantize_int4, router_topk
from spec_kernels.testing.compare import assert_as_accurate
from spec_kernels.testing.int4 import random_int4
from spec_kernels.testing.timing import copy_gbps, gemm_gflops, ratio, time_in_turns, write_json

# name: H, I a rank, Is a rank, E, top_k, token counts
SHAPES = {
    "bundled model, tp 8": (192, 12, 12, 16, 4, (1, 4, 16)),
    "bundled model, tp 1": (192, 96, 96, 16, 4, (1, 4, 64)),
    "wide, 16 experts, tp 8": (7168, 256, 256, 16, 4, (1, 4, 16, 64)),
    "wide, 64 experts top-8, tp 8": (7168, 256, 256, 64, 8, (1, 4, 16, 64)),
    "Kimi-K2.5, tp 8": (7168, 256, 256, 384, 8, (1, 4)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int4": torch.bfloat16}
# Routed experts of a shape, in bytes: more take longer to make than to time.
MAX_BYTES = 2 << 30


def make(hidden, inner, shared_inner, num_experts, kind, generator):
    """Arguments of ``moe_experts`` but for x, on the generator's device."""
    dtype, device = DTYPES[kind], generator.device

    def weight(*shape):
        values = torch.randn(*shape, generator=generator, device=device)
        return (values / shape[-1] ** 0.5).to(dtype)

    w = {
        "router_weight": weight(num_experts, hidden),
        "correction_bias": torch.randn(num_experts, generator=generator, device=device) * 0.1,
        "shared_gate_up": weight(2 * shared_inner, hidden),
        "shared_down": weight(hidden, shared_inner),
    }
    shapes = {"w_gate_up": (num_experts, 2 * inner, hidden), "w_down": (num_experts, hidden, inner)}
    for name, shape in shapes.items():
        if kind == "int4":
            w[name], w[f"{name}_scale"] = random_int4(*shape, generator=generator)
        else:
            # By expert: fp32 values of all of them would be the larger part of the memory.
            w[name] = torch.empty(shape, dtype=dtype, device=device)
            for e in range(num_experts):
                w[name][e] = weight(*shape[1:])
    return w


def experts_of(w, ids):
    """Their matrices, dequantised if need be, in the dtype of the shared expert."""
    dtype = w["shared_down"].dtype
    for name in ("w_gate_up", "w_down"):
        scale = w.get(f"{name}_scale")
        whole = w[name][ids] if scale is None else dequantize_int4(w[name][ids], scale[ids])
        yield whole.to(dtype)


def mlp(x, gate_up, down):
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def loop_over_experts(x, w, top_k):
    """What a PyTorch model file does: every expert gathers its rows and adds its share."""
    ids, weights = router_topk(x, w["router_weight"], w["correction_bias"], top_k)
    out = mlp(x, w["shared_gate_up"], w["shared_down"])
    for e in ids.unique().tolist():
        rows, slots = torch.where(ids == e)
        y = mlp(x[rows], *experts_of(w, e))
        out.index_add_(0, rows, y * weights[rows, slots, None].to(y.dtype))
    return out


def gathered(x, w, top_k):
    """The same without a word to the host: the experts of every row are copied side by side."""
    ids, weights = router_topk(x, w["router_weight"], w["correction_bias"], top_k)
    gate_up, down = experts_of(w, ids.flatten())
    rows = x.repeat_interleave(top_k, 0)[..., None]
    gate, up = torch.bmm(gate_up, rows)[..., 0].chunk(2, dim=-1)
    y = torch.bmm(down, (F.silu(gate) * up)[..., None])[..., 0].view(*ids.shape, -1)
    routed = (y * weights[..., None].to(y.dtype)).sum(1)
    return routed + mlp(x, w["shared_gate_up"], w["shared_down"])


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a call reads of weights, each once, and its multiply-adds."""

    num_experts: int
    bytes: int
    macs: int


def traffic(x, w, top_k) -> Traffic:
    ids, _ = router_topk(x, w["router_weight"], w["correction_bias"], top_k)
    distinct = ids.unique().numel()
    routed = sum(w[n][0].nbytes for n in w if n.startswith("w_"))
    dense = [w[n] for n in ("shared_gate_up", "shared_down", "router_weight")]
    hidden = x.shape[1]
    per_row = top_k * 3 * hidden * (w["w_gate_up"].shape[1] // 2) + sum(t.numel() for t in dense)
    num_bytes = distinct * routed + sum(t.nbytes for t in dense)
    return Traffic(distinct, num_bytes, x.shape[0] * per_row)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=DTYPES, action="append")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json")
    options = parser.parse_args()

    torch.manual_seed(0)
    gbps = copy_gbps()
    rows = []
    print(f"copy {gbps:.1f} GB/s (read + write), {torch.get_num_threads()} threads")
    for kind in options.kind or DTYPES:
        dtype = DTYPES[kind]
        gflops = gemm_gflops(dtype)
        print(f"\n{kind}: matrix multiply {gflops:.0f} GFLOP/s")
        print(
            f"{'shape':30}{'T':>4}{'experts':>9}{'MB':>8}{'us':>10}{'best':>10}{'loop us':>10}"
            f"  {'ratio':22}ceiling"
        )
        for shape, (hidden, inner, shared, num_experts, top_k, counts) in SHAPES.items():
            size = 0.5625 if kind == "int4" else dtype.itemsize
            if 3 * num_experts * hidden * inner * size > MAX_BYTES:
                print(f"{shape:30}not timed: more than {MAX_BYTES >> 30} GiB of experts")
                continue
            if kind == "int4" and inner % 32:
                print(f"{shape:30}unsupported: groups of 32 among {inner} columns")
                continue
            g = torch.Generator().manual_seed(0)
            w = make(hidden, inner, shared, num_experts, kind, g)
            inputs = torch.randn(max(counts), hidden, generator=g).to(dtype)
            for num_rows in counts:
                x = inputs[:num_rows]
                out = torch.empty_like(x)
                if num_experts <= 16:
                    exact = {k: v.double() for k, v in w.items() if "scale" not in k}
                    everyone = torch.arange(num_experts)
                    exact["w_gate_up"], exact["w_down"] = experts_of(
                        w | {"shared_down": exact["shared_down"]}, everyone
                    )
                    assert_as_accurate(
                        moe_experts(x, **w, top_k=top_k),
                        loop_over_experts(x.double(), exact, top_k),
                        loop_over_experts(x, w, top_k),
                    )
                t = time_in_turns(
                    {
                        "ours": lambda x=x, w=w, out=out, k=top_k: moe_experts(
                            x, **w, top_k=k, out=out
                        ),
                        "loop": lambda x=x, w=w, k=top_k: loop_over_experts(x, w, k),
                    },
                    rounds=options.rounds,
                )
                r = ratio(t["loop"], t["ours"])
                reads = traffic(x, w, top_k)
                ceilings = {"copy": reads.bytes / gbps / 1e3, "gemm": 2 * reads.macs / gflops / 1e3}
                bound = max(ceilings, key=ceilings.get)
                share = ceilings[bound] / t["ours"].best
                print(
                    f"{shape:30}{num_rows:4}{reads.num_experts:9}{reads.bytes / 1e6:8.1f}"
                    f"{t['ours'].median:10.1f}{t['ours'].best:10.1f}"
                    f"{t['loop'].median:10.1f}  {str(r):22}{share:.0%} of {bound}",
                    flush=True,
                )
                rows.append(
                    {
                        "shape": shape,
                        "kind": kind,
                        "tokens": num_rows,
                        "distinct_experts": reads.num_experts,
                        "weight_bytes": reads.bytes,
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
