"""rope_append against the same through PyTorch ops: checked first, then timed in turns.

    python benchmarks/bench_rope_append.py [--rounds N] [--json FILE]

The rival rotates by the usual formula (in fp32, as rotary embeddings are), normalises the latent
with torch's rms_norm, and puts the rows into the pages with index_put; the cosines of the rows and
the flat places are computed for it beforehand. Into an fp8 cache it divides, clamps and casts.
"""

from __future__ import annotations

import argparse

import torch

from spec_kernels import rope_append, rope_append_mla
from spec_kernels.testing.timing import ratio, time_in_turns, write_json

PAGE, CONTEXT, NUM_PAGES, MAX_POSITIONS = 16, 1000, 80, 2048
FP8 = torch.float8_e4m3fn
# name: dtype, heads, head (or rope) size, KV heads, or latent rank and 0
SHAPES = {
    "bundled target": (torch.float32, 8, 8, 32, 0),
    "Kimi-K2.5, 8 heads": (torch.bfloat16, 8, 64, 512, 0),
    "Kimi-K2.5 drafter, 8 heads": (torch.bfloat16, 8, 128, 0, 8),
    "grouped, 32 over 8": (torch.bfloat16, 32, 128, 0, 8),
}


def turned(x, cos, sin, interleaved):
    """Rope as models write it: x * cos + turn(x) * sin in fp32."""
    x = x.float()
    if interleaved:
        turn = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        turn = torch.cat((-b, a), -1)
    return x * cos + turn * sin


def problem(dtype, heads, dim, rank, kv_heads, nodes, fp8):
    """Two calls of the same work, and the results of each."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=g).to(dtype)

    angles = torch.arange(MAX_POSITIONS)[:, None] * 10000.0 ** -torch.linspace(0, 1, dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    depths = torch.arange(nodes).view(1, -1) // 2
    lens = torch.tensor([CONTEXT])
    pages = torch.randperm(NUM_PAGES, generator=g)[None]
    position, place = CONTEXT + depths[0], CONTEXT + torch.arange(nodes)
    at = (pages[0, place // PAGE], place % PAGE)
    interleaved = rank > 0
    cos, sin = (
        t.repeat_interleave(2, 1) if interleaved else t.repeat(1, 2)
        for t in table[position].chunk(2, 1)
    )
    cos, sin = cos.view(1, nodes, 1, dim), sin.view(1, nodes, 1, dim)
    stored = FP8 if fp8 else dtype

    def cast(x, scale):
        return (x.float() / scale).clamp(-448, 448).to(FP8) if fp8 else x.to(dtype)

    q = randn(1, nodes, heads, dim)
    q_out, q_rival = torch.empty_like(q), torch.empty_like(q)
    where = (table, depths, lens, pages)
    if rank:
        latent, k_rope, weight = randn(1, nodes, rank), randn(1, nodes, dim), randn(rank)
        ours, theirs = (torch.zeros(NUM_PAGES, PAGE, rank + dim).to(stored) for _ in range(2))
        scale = torch.tensor([0.02])

        def call():
            rope_append_mla(
                q, latent, k_rope, ours, *where, interleaved=True, norm_weight=weight, eps=1e-6,
                cache_scale=scale if fp8 else None, q_out=q_out,
            )  # fmt: skip

        def rival():
            normed = torch.nn.functional.rms_norm(latent, (rank,), weight, 1e-6)
            key = turned(k_rope.unsqueeze(2), cos, sin, True).squeeze(2)
            row = torch.cat((cast(normed, scale), cast(key, scale)), -1)
            theirs.index_put_(at, row[0])
            q_rival.copy_(turned(q, cos, sin, True))

        return call, rival, [(q_out, q_rival), (ours, theirs)]
    k, v = randn(1, nodes, kv_heads, dim), randn(1, nodes, kv_heads, dim)
    caches = [torch.zeros(NUM_PAGES, PAGE, kv_heads, dim).to(stored) for _ in range(4)]
    scale = torch.full((kv_heads,), 0.02)

    def call():
        rope_append(
            q, k, v, *caches[:2], *where, interleaved=False, q_out=q_out,
            k_scale=scale if fp8 else None, v_scale=scale if fp8 else None,
        )  # fmt: skip

    def rival():
        caches[2].index_put_(at, cast(turned(k, cos, sin, False), 0.02)[0])
        caches[3].index_put_(at, cast(v, 0.02)[0])
        q_rival.copy_(turned(q, cos, sin, False))

    return call, rival, [(q_out, q_rival), (caches[0], caches[2]), (caches[1], caches[3])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json")
    options = parser.parse_args()

    rows = []
    print(f"{'shape':28}{'cache':>7}{'nodes':>7}{'us':>9}{'best':>9}{'torch us':>10}  ratio")
    for name, shape in SHAPES.items():
        for fp8 in (False, True):
            for nodes in (1, 4, 16, 64):
                call, rival, results = problem(*shape, nodes, fp8)
                call()
                rival()
                for ours, theirs in results:
                    if ours.dtype == FP8:  # rounded from values a little apart: one step
                        x, y = ours.float(), theirs.float()
                        assert ((x - y).abs() <= 0.125 * y.abs() + 2.0**-9).all()
                    else:
                        torch.testing.assert_close(ours, theirs)
                t = time_in_turns({"ours": call, "torch": rival}, rounds=options.rounds)
                r = ratio(t["torch"], t["ours"])
                cache = "fp8" if fp8 else str(shape[0]).removeprefix("torch.")[:8]
                print(
                    f"{name:28}{cache:>9}{nodes:5}{t['ours'].median:9.1f}{t['ours'].best:9.1f}"
                    f"{t['torch'].median:10.1f}  {r}",
                    flush=True,
                )
                rows.append(
                    {
                        "shape": name,
                        "cache": cache,
                        "nodes": nodes,
                        "us_median": t["ours"].median,
                        "us_best": t["ours"].best,
                        "torch_us_median": t["torch"].median,
                        "ratio": r.median,
                        "ratio_low": r.low,
                        "ratio_high": r.high,
                    }
                )
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
