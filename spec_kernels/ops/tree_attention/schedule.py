"""What the Triton kernels of tree attention do, and in what pieces, as pure functions.

The kernels derive the same on the device; tests hold the two together. A count here is exact, not
an estimate, as long as every page of the table is in range.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec_kernels.ops.tree_attention.shards import WHOLE, ContextShard
from spec_kernels.ops.tree_attention.splits import (
    FIRST_SPLITS,
    KEY_BLOCK,
    MAX_SPLITS,
    attention_split_size,
)

# Positions are 32-bit in the kernels, with room for a path behind them.
MAX_POSITION = (1 << 31) - (1 << 12)
# Splits that the merge takes at once, aligned, in ascending order.
MERGE_BLOCK = 8
# Columns of a program of the merge.
MERGE_COLUMNS = 128


@dataclass(frozen=True)
class Tile:
    """One program's share of rows and keys, and the compiler's options for it."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs_per_sm: int


def padded(dim: int) -> int:
    """Columns of a tile that holds ``dim``: a power of two that a dot takes; 0 stays 0."""
    return max(16, 1 << (dim - 1).bit_length()) if dim else 0


def attention_tile(k_dim: int, v_dim: int, itemsize: int, fp8: bool, arch: int) -> Tile:
    """The tile for a shape on ``arch`` (80, 90, 120): never by the number of rows, nodes or keys,
    so that a row is computed the same way in any company.

    Chosen by what compiles without spills, within 99 KiB of shared memory and the registers of two
    (wide heads: one) programs on a multiprocessor; ``tests/ops/test_tree_attention_budgets.py``
    holds the table. Nothing here was timed. An fp8 tile is converted in registers, so more stages
    than one would hold it twice.
    """
    wide = padded(max(k_dim, v_dim))
    if itemsize == 4:
        return Tile(16, 16, 8, 1, 1)
    if wide > 256 and arch < 89:
        return Tile(16, 16, 8, 1, 1) if fp8 else Tile(32, 16, 8, 2, 1)
    if wide > 256:
        return Tile(32, 16, 8, 1, 1) if fp8 else Tile(32, 32, 8, 2, 1)
    if wide > 128:
        return Tile(32, 32, 8, 1 if fp8 else 2, 1)
    if fp8:
        return Tile(32, 32, 4, 1, 2)
    return Tile(32, 64 if wide <= 64 else 32, 4, 2, 2)


def max_splits(capacity: int, num_words: int) -> int:
    """Most splits that a row can have when ``capacity`` positions fit its table: the places in
    scratch for each row. A path has at most ``32 * num_words`` nodes.
    """
    most, size, splits = 1, KEY_BLOCK, FIRST_SPLITS
    while True:
        # Within a step of the rule the longest prefix has the most splits.
        context = min(size * splits, capacity)
        most = max(most, -(-min(context + 32 * num_words, capacity) // size))
        if size * splits >= capacity:
            return most
        size, splits = 2 * size, min(2 * splits, MAX_SPLITS)


def scratch_sizes(num_rows: int, capacity: int, num_words: int, v_dim: int) -> tuple[int, int]:
    """Floats in which the splits of ``num_rows = B * N * H`` rows leave their partial results:
    values; a maximum and a sum for each.

    A row has a place for each split that the table's ``capacity`` positions admit by the split
    rule, not for each block of keys: at most 33 up to 2k and a path, 65 up to 8k, and above 32k 129
    whatever the capacity. Who knows that no request is longer passes fewer columns of the table.
    """
    splits = max_splits(capacity, num_words)
    return (0, 0) if splits == 1 else (num_rows * splits * v_dim, num_rows * splits * 2)


@dataclass(frozen=True)
class Plan:
    """How the splits of a request are cut: ``[first, shared_begin)`` by node, then
    ``[shared_begin, shared_end)`` by tile, then ``[shared_end, end)`` by node."""

    length: int
    size: int
    first: int
    shared_begin: int
    shared_end: int
    end: int


def plan(context: int, capacity: int, num_words: int, window: int = 0, shard=None) -> Plan | None:
    """The plan of a request, or None where its length is impossible."""
    shard = shard or WHOLE
    if not 0 <= context <= MAX_POSITION or shard.local_length(context) > capacity:
        return None
    length, max_path = shard.local_length(context), 32 * num_words
    size = attention_split_size(length)
    if shard.index == 0:
        shared_end = length // size
        end = -(-min(length + max_path, capacity) // size)
    else:
        shared_end = end = -(-length // size)
    first = shared_begin = 0
    if window > 0:
        # A row with a path of n sees positions from context + n - window on.
        first = min(path_position(context, 1 - window, shard) // size, shared_end)
        shared_begin = -(-path_position(context, max_path - window, shard) // size)
        shared_begin = min(max(shared_begin, first), shared_end)
    return Plan(length, size, first, shared_begin, shared_end, end)


def path_position(context: int, offset: int, shard: ContextShard) -> int:
    """Local position of global position ``context + offset`` on a path; 0 for what is below."""
    if offset < 0:
        return shard.local_length(max(context + offset, 0))
    return shard.local_length(context) + (offset if shard.index == 0 else 0)


@dataclass(frozen=True)
class Work:
    """What a call does: items on the list, items that read keys, blocks of keys that they pass
    over, and keys that they read from the cache (each once for K and once for V; a latent row
    once)."""

    num_items: int
    num_busy: int
    num_blocks: int
    num_keys: int


def count_work(
    contexts: list[int],
    path_lengths: list[list[int]],
    *,
    capacity: int,
    num_words: int,
    group: int,
    num_kv_heads: int,
    tile: Tile,
    window: int = 0,
    shard: ContextShard | None = None,
) -> Work:
    """The work of a call whose node ``n`` of request ``b`` has ``path_lengths[b][n]`` set bits.

    It depends on neither the table's width (``capacity``, as long as the request fits) nor on
    requests without rows.
    """
    shard = shard or WHOLE
    num_items = num_busy = num_blocks = num_keys = 0
    for context, lengths in zip(contexts, path_lengths, strict=True):
        p = plan(context, capacity, num_words, window, shard)
        if p is None:
            continue
        tiles_of_all = -(-len(lengths) * group // tile.rows)
        tiles_of_node = -(-group // tile.rows)
        by_node = [*range(p.first, p.shared_begin), *range(p.shared_end, p.end)]
        num_items += num_kv_heads * (p.shared_end - p.shared_begin) * tiles_of_all
        num_items += num_kv_heads * len(by_node) * len(lengths) * tiles_of_node

        work = []  # (first position, end) of each item with something to read
        for split in range(p.shared_begin, p.shared_end):
            for t in range(tiles_of_all):
                last_row = min((t + 1) * tile.rows, len(lengths) * group) - 1
                nodes = lengths[t * tile.rows // group : last_row // group + 1]
                if any(nodes):
                    work.append((split * p.size, min((split + 1) * p.size, p.length)))
        for split in by_node:
            for n in filter(None, lengths):
                end = min(p.length + (n if shard.index == 0 else 0), capacity)
                begin = path_position(context, n - window, shard) if window > 0 else 0
                begin, end = max(begin, split * p.size), min(end, (split + 1) * p.size)
                if begin < end:
                    work += [(begin, end)] * tiles_of_node
        num_busy += num_kv_heads * len(work)
        num_blocks += num_kv_heads * sum(-(-e // tile.keys) - b // tile.keys for b, e in work)
        num_keys += num_kv_heads * sum(e - b for b, e in work)
    return Work(num_items, num_busy, num_blocks, num_keys)


def num_launches(capacity: int, num_words: int) -> int:
    """Kernels that one call launches: splits, and their merge where there can be several."""
    return 1 if max_splits(capacity, num_words) == 1 else 2
