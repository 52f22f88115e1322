"""Bytes and operations of tree attention on a GPU, counted on paper, and the floors they imply.

    python -m spec_kernels.ops.tree_attention.traffic

prints the tables for the MLA form of one of eight GPUs (8 heads, 512 + 64 columns). Nothing here is
measured. What a kernel must move:

- the cache: every visible row once a request, whatever the number of nodes and heads (grouped-query
  ``Hkv * (Dk + Dv)`` elements a position, latent ``R + Dr``, since a row is key and value at once);
- queries, outputs and log-sum-exps, once;
- partial results, where a row's positions fill more than one split: ``Dv + 2`` fp32 numbers a row,
  head and split, written by the splits and read by the merge. They grow with the rows, the cache
  does not: with many nodes and heads they exceed it, and whether they reach memory or stay in the
  L2 cache then decides. ``partials`` is therefore counted apart.

And what it must compute: ``2 * (Dk + Dv)`` operations a head, node and visible key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_kernels.ops.tree_attention.splits import attention_split_size

# Memory bandwidth, GB/s.
GPUS = {"RTX PRO 6000": 1800.0, "H200": 4800.0}


@dataclass(frozen=True)
class Traffic:
    """One call, one request: bytes by purpose, and operations."""

    cache: int
    queries: int
    outputs: int
    partials: int  # written and read
    flops: int
    num_splits: int  # of the longest row

    @property
    def least_bytes(self) -> int:
        """What must cross the memory bus: everything, if the L2 cache holds the partial results."""
        return self.cache + self.queries + self.outputs

    @property
    def most_bytes(self) -> int:
        return self.least_bytes + self.partials

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.least_bytes

    def floor_us(self, gbps: float) -> tuple[float, float]:
        """Microseconds at ``gbps`` GB/s, with partial results in the L2 cache and in memory."""
        return self.least_bytes / gbps / 1e3, self.most_bytes / gbps / 1e3


def attention_traffic(
    context_len: int,
    num_nodes: int,
    *,
    num_heads: int,
    k_dim: int,
    v_dim: int,
    num_kv_heads: int = 1,
    latent: bool = False,
    cache_itemsize: int = 2,
    itemsize: int = 2,
    path_lengths: Sequence[int] | None = None,
) -> Traffic:
    """Counts one request without a window.

    Args:
        k_dim, v_dim: columns of a key and of a value; of a latent row ``R + Dr`` and ``R``.
        latent: one row serves all heads, as key and as value.
        cache_itemsize: bytes of a cached element (1: fp8).
        itemsize: bytes of an element of the queries and outputs.
        path_lengths: tree rows that each node sees, itself included; a chain when None.
    """
    paths = range(1, num_nodes + 1) if path_lengths is None else path_lengths
    if len(paths) != num_nodes:
        raise ValueError(f"path_lengths: expected {num_nodes} of them, got {len(paths)}")
    columns = k_dim if latent else num_kv_heads * (k_dim + v_dim)
    rows = num_nodes * num_heads
    size = attention_split_size(context_len)
    splits = [-(-(context_len + path) // size) for path in paths]
    # A row that fills one split is finished there.
    partial_rows = num_heads * sum(n for n in splits if n > 1)
    return Traffic(
        cache=(context_len + num_nodes) * columns * cache_itemsize,
        queries=rows * k_dim * itemsize,
        outputs=rows * (v_dim * itemsize + 4),
        partials=2 * partial_rows * (v_dim + 2) * 4,
        flops=2 * num_heads * (k_dim + v_dim) * sum(context_len + path for path in paths),
        num_splits=max(splits, default=0),
    )


def mla_traffic(context_len: int, num_nodes: int, cache_itemsize: int = 2) -> Traffic:
    """The case that the project answers: Kimi-K2.5 on eight GPUs, 8 heads each, bf16 queries."""
    return attention_traffic(
        context_len,
        num_nodes,
        num_heads=8,
        k_dim=576,
        v_dim=512,
        latent=True,
        cache_itemsize=cache_itemsize,
    )


def floors_table() -> str:
    """Markdown: floors of one layer's call on each GPU, partial results in L2 / in memory."""
    head = ["context", "nodes", "cache MB", "partials MB", "GFLOP", *(f"{g}, us" for g in GPUS)]
    lines = [_row(head), _row(["---"] * len(head))]
    for context in (1024, 8192, 65536):
        for nodes in (4, 16, 64):
            t = mla_traffic(context, nodes)
            floors = (t.floor_us(gbps) for gbps in GPUS.values())
            cells = [f"{context // 1024}k", str(nodes), f"{t.cache / 1e6:.2f}"]
            cells += [f"{t.partials / 1e6:.1f}", f"{t.flops / 1e9:.2f}"]
            lines.append(_row([*cells, *(f"{low:.1f} / {high:.1f}" for low, high in floors)]))
    return "\n".join(lines)


def partials_table() -> str:
    """Markdown: partial results over cache bytes, by context and nodes, bf16 and fp8 cache."""
    nodes = (1, 4, 16, 64)
    head = ["context", "split", "splits", *(f"{n}: bf16, fp8" for n in nodes)]
    lines = [_row(head), _row(["---"] * len(head))]
    for exponent in range(9):
        context = 1024 << exponent
        cells = [f"{context // 1024}k", str(attention_split_size(context))]
        cells.append(str(mla_traffic(context, 1).num_splits))
        for n in nodes:
            shares = (mla_traffic(context, n, item) for item in (2, 1))
            cells.append(", ".join(f"{t.partials / t.cache:.2f}" for t in shares))
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("MLA, 8 heads, 512 + 64 columns, one layer, bf16. us: partials in L2 / in memory\n")
    print(floors_table())
    print("\nBytes of partial results, written and read, over bytes of the cache, by nodes\n")
    print(partials_table())
