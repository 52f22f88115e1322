"""Triton kernels of ``tree_attention`` and ``tree_attention_mla``: splits, then merge.

**Positions.** All arithmetic is laid out by the absolute position of a key on the row's own path.
Split ``s`` holds positions ``[s * S, (s + 1) * S)``, ``S = attention_split_size`` of the request;
inside a split, blocks of ``BLOCK_KEYS`` keys at multiples of ``BLOCK_KEYS`` go through an online
softmax in ascending order, and the splits of a row are merged in ascending blocks of
``MERGE_BLOCK``. A key that a row does not see adds exact zeros, a split that it does not see is the
exact identity. So within one step of the split rule a row has the same bits whether its keys are
committed or still in the tree, alone or in any tree and batch, on any grid. (Of a shard, positions
are local, and the tree's rows all stand on shard 0: there the promise is independence of company.)

**Work.** A split that every row sees whole is cut into tiles of ``BLOCK_ROWS`` rows, which are all
heads of a KV head times all nodes: each key is fetched once for a tile. Splits that hold the end of
the prefix, tree rows, or the edge of a window are cut by node, whose path then says which cache
slot stands at which position. ``schedule`` has the same rules in Python. The grid depends on the
device alone; every program derives the list of items from ``context_lens`` and takes every
``num_programs``-th, so nothing costs more because a table is wider or a batch is padded.

**Scratch.** Each (row, split) leaves its weighted values, its maximum and its sum in fp32
(``schedule.scratch_sizes``). How many splits there can be follows the split rule, so from 32k
positions on a wider table costs nothing; only the part that is in use is ever touched. Where the
capacity allows one split alone, there is no scratch and no second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.ops.common import asked_to_check
from spec_kernels.ops.tree_attention.reference import check_values, unpack_ancestors
from spec_kernels.ops.tree_attention.schedule import (
    MAX_POSITION,
    MERGE_BLOCK,
    MERGE_COLUMNS,
    Tile,
    attention_tile,
    max_splits,
    padded,
    scratch_sizes,
)
from spec_kernels.ops.tree_attention.shards import ContextShard
from spec_kernels.ops.tree_attention.splits import FIRST_SPLITS, KEY_BLOCK, MAX_SPLITS
from spec_kernels.ops.triton_common import (
    LOG2E,
    check_device,
    device_facts,
    finite_or_nan,
    fp8_conversion,
    from_cache,
    operand,
    round_to,
)

# Requests whose items a program counts at once.
_BLOCK_BATCH = 128
MERGE_WARPS = 4

_MAX_POSITION = tl.constexpr(MAX_POSITION)
# The split rule in logarithms: sizes grow with the splits up to MAX_SPLITS, then alone.
_LOG_KEY_BLOCK = tl.constexpr(KEY_BLOCK.bit_length() - 1)
_LOG_MAX_SPLITS = tl.constexpr(MAX_SPLITS.bit_length() - 1)
_FIRST_EDGE = tl.constexpr(KEY_BLOCK * FIRST_SPLITS)
_GROWING_STEPS = tl.constexpr((MAX_SPLITS // FIRST_SPLITS).bit_length() - 1)


@triton.jit
def _tanh(x):
    # Near zero the continued fraction keeps the relative error of small scores.
    size = tl.abs(x)
    z = x * x
    small = x * (945.0 + z * (105.0 + z)) / (945.0 + z * (420.0 + z * 15.0))
    large = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2E)) + 1.0)
    return tl.where(size < 0.75, small, tl.where(x < 0, -large, large))


@triton.jit
def _popcount(word):
    word = word.to(tl.uint32, bitcast=True)
    word = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word & 0x0F0F0F0F) + ((word >> 4) & 0x0F0F0F0F)
    word = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF)
    return ((word & 0xFFFF) + (word >> 16)).to(tl.int32)


@triton.jit
def _path_slots(words, stride_w, num_words, ranks):
    """Tree rows of the set bits that have ``ranks`` set bits below them: so many rows have at most
    that many set bits up to and with themselves.
    """
    lane = tl.arange(0, 32)
    num_before = 0
    slots = ranks * 0
    for w in range(num_words):
        bits = (tl.load(words + w * stride_w) >> lane) & 1
        counts = num_before + tl.cumsum(bits, 0)
        slots += tl.sum((counts[None, :] <= ranks[:, None]).to(tl.int32), 1)
        num_before += tl.sum(bits, 0)
    return slots


@triton.jit
def _shard_length(length, shard_index, num_shards, shard_run):
    """``ContextShard.local_length`` without products that could pass 32 bits."""
    run = length // shard_run
    mine = run % num_shards
    rest = tl.where(mine == shard_index, length % shard_run, 0)
    rest = tl.where(mine > shard_index, shard_run, rest)
    return run // num_shards * shard_run + rest


@triton.jit
def _local(position, context, shard_index, num_shards, shard_run, SHARDED: tl.constexpr):
    """Positions of the shard below global ``position`` of a path; tree rows follow the prefix."""
    if SHARDED:
        prefix = tl.minimum(position, context)
        local = _shard_length(prefix, shard_index, num_shards, shard_run)
        return local + tl.where(shard_index == 0, position - prefix, 0)
    else:
        return position


@triton.jit
def _length(context, capacity, shard_index, num_shards, shard_run, SHARDED: tl.constexpr):
    """Global length, local length and log2 of the split size, of one request or of many.

    A request whose length is impossible is absent: its lengths come back as -1 and 0.
    """
    sound = (context >= 0) & (context <= (_MAX_POSITION if SHARDED else capacity))
    context = tl.where(sound, context, 0).to(tl.int32)
    length = _local(context, context, shard_index, num_shards, shard_run, SHARDED)
    sound = sound & (length <= capacity)
    context = tl.where(sound, context, -1)
    length = tl.where(sound, length, 0)
    # ceil(log2(length)) from the exponent of length - 1, which fp64 holds exactly.
    exponent = ((length - 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1022
    shift = tl.maximum(tl.where(length > 1, exponent, 0) - _LOG_MAX_SPLITS, _LOG_KEY_BLOCK)
    for i in tl.static_range(_GROWING_STEPS):
        grown = length > (_FIRST_EDGE << 2 * i)
        shift = tl.maximum(shift, tl.where(grown, _LOG_KEY_BLOCK + i + 1, 0))
    return context, length, shift


@triton.jit
def _plan(
    context,
    length,
    shift,
    capacity,
    max_path,
    window,
    shard_index,
    num_shards,
    shard_run,
    SHARDED: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Twin of ``schedule.plan``, for one request or for many: the splits where those by node, by
    tile, by node again, and none at all begin.
    """
    below = (1 << shift) - 1
    shared_end = length >> shift
    end = (tl.minimum(length + max_path, capacity) + below) >> shift
    if SHARDED:
        all_of_prefix = (length + below) >> shift
        shared_end = tl.where(shard_index == 0, shared_end, all_of_prefix)
        end = tl.where(shard_index == 0, end, all_of_prefix)
    end = tl.where(context >= 0, end, 0)
    first = shift * 0
    shared_begin = shift * 0
    if WINDOW:
        # The first position that a row sees lies between those of a path of one and of max_path.
        known = tl.maximum(context, 0)
        low = tl.maximum(known + 1 - window, 0)
        high = tl.maximum(known + max_path - window, 0)
        low = _local(low, known, shard_index, num_shards, shard_run, SHARDED)
        high = _local(high, known, shard_index, num_shards, shard_run, SHARDED)
        first = tl.minimum(low >> shift, shared_end)
        shared_begin = (high + below) >> shift
        shared_begin = tl.minimum(tl.maximum(shared_begin, first), shared_end)
    if DIRECT:
        # Without a merge an item must stand for every row, be it to say that it sees nothing.
        end = tl.maximum(end, 1)
    return first, shared_begin, shared_end, end


@triton.jit
def _count_items(
    contexts,
    capacity,
    max_path,
    window,
    shard_index,
    num_shards,
    shard_run,
    tiles_of_all,
    tiles_by_node,
    SHARDED: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Items of each request for one KV head."""
    context, length, shift = _length(
        contexts, capacity, shard_index, num_shards, shard_run, SHARDED
    )
    first, shared_begin, shared_end, end = _plan(
        context, length, shift, capacity, max_path, window,
        shard_index, num_shards, shard_run, SHARDED, WINDOW, DIRECT,
    )  # fmt: skip
    by_node = shared_begin - first + end - shared_end
    return (shared_end - shared_begin) * tiles_of_all + by_node * tiles_by_node


@triton.jit
def _visible_range(
    context,
    length,
    path_length,
    capacity,
    window,
    shard_index,
    num_shards,
    shard_run,
    SHARDED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Positions ``[begin, end)`` that a node sees of its path."""
    end = length
    if SHARDED:
        end += tl.where(shard_index == 0, path_length, 0)
    else:
        end += path_length
    begin = end * 0
    if WINDOW:
        first = tl.maximum(context + path_length - window, 0)
        begin = _local(first, context, shard_index, num_shards, shard_run, SHARDED)
    end = tl.where(path_length > 0, tl.minimum(end, capacity), 0)
    return begin, end


@triton.jit
def _finish(acc, top, total, sink, HAS_SINKS: tl.constexpr):
    """Adds the sink, which has a score and no value; returns the quotient and the natural LSE."""
    if HAS_SINKS:
        new = tl.maximum(top, sink)
        shift = tl.where(new == -float("inf"), 0.0, new)
        keep = tl.exp2((top - shift) * LOG2E)
        total = total * keep + tl.exp2((sink - shift) * LOG2E)
        acc = acc * keep[:, None]
        top = new
    empty = total == 0
    out = finite_or_nan(acc / tl.where(empty, 1.0, total)[:, None])
    lse = tl.where(empty, -float("inf"), top + tl.log2(tl.where(empty, 1.0, total)) / LOG2E)
    return out, lse


# A count of 1 must not become a kernel of its own: its bits could differ.
_SAME_FOR_ALL = [
    *("num_requests", "num_nodes", "num_words", "group", "num_kv_heads", "num_pages", "capacity"),
    *("num_splits", "window", "shard_index", "num_shards", "shard_run"),
]


@triton.jit(do_not_specialize=_SAME_FOR_ALL)
def split_kernel(
    q,
    q_rope,
    k_cache,
    v_cache,
    tables,
    context_lens,
    ancestors,
    k_scale,
    v_scale,
    sinks,
    values,
    sums,
    out,
    lse,
    scale,
    logit_cap,
    window,
    shard_index,
    num_shards,
    shard_run,
    num_requests,
    num_nodes,
    num_words,
    group,
    num_kv_heads,
    num_pages,
    capacity,
    num_splits,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_rb,
    stride_rn,
    stride_rh,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_tb,
    stride_tm,
    stride_c,
    stride_ab,
    stride_an,
    stride_aw,
    stride_ob,
    stride_on,
    stride_oh,
    stride_lb,
    stride_ln,
    stride_lh,
    stride_k_scale,
    stride_v_scale,
    stride_sink,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    MLA: tl.constexpr,
    FP8: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARDED: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Attends tiles of rows to the keys of one split each; see the module's docstring.

    MLA: ``q`` is the latent query, a key is the latent row and ``ROPE_DIM`` more columns, and the
    latent row is the value too: it is fetched once. DIRECT: there is one split, so the result is
    final.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    max_path = num_words * 32
    tiles_of_all = (num_nodes * group + BLOCK_ROWS - 1) // BLOCK_ROWS
    tiles_of_node = (group + BLOCK_ROWS - 1) // BLOCK_ROWS
    lane_b = tl.arange(0, BLOCK_BATCH)
    columns_k = tl.arange(0, BLOCK_K)
    columns_v = tl.arange(0, BLOCK_V)
    key_lane = tl.arange(0, BLOCK_KEYS)
    row_lane = tl.arange(0, BLOCK_ROWS)

    num_before = 0
    item = tl.program_id(0)
    for chunk in range(0, num_requests, BLOCK_BATCH):
        requests = chunk + lane_b
        real = requests < num_requests
        contexts = context_lens + requests.to(tl.int64) * stride_c
        counts = _count_items(
            tl.load(contexts, mask=real, other=-1), capacity, max_path, window,
            shard_index, num_shards, shard_run, tiles_of_all, num_nodes * tiles_of_node,
            SHARDED, WINDOW, DIRECT,
        )  # fmt: skip
        counts = tl.where(real, counts * num_kv_heads, 0)
        ends = num_before + tl.cumsum(counts, 0)
        num_before_next = num_before + tl.sum(counts, 0)
        while item < num_before_next:
            # -------------------------------------------------- which request, split, rows, KV head
            passed = ends <= item
            b = (chunk + tl.sum(passed.to(tl.int32), 0)).to(tl.int64)
            rest = item - num_before - tl.sum(tl.where(passed, counts, 0), 0)
            context, length, shift = _length(
                tl.load(context_lens + b * stride_c), capacity,
                shard_index, num_shards, shard_run, SHARDED,
            )  # fmt: skip
            first, shared_begin, shared_end, _ = _plan(
                context, length, shift, capacity, max_path, window,
                shard_index, num_shards, shard_run, SHARDED, WINDOW, DIRECT,
            )  # fmt: skip
            num_tiles = (shared_end - shared_begin) * num_kv_heads * tiles_of_all
            is_tile = rest < num_tiles
            rest = tl.where(is_tile, rest, rest - num_tiles)
            of_head = tl.where(is_tile, tiles_of_all, num_nodes * tiles_of_node)
            split = rest // (of_head * num_kv_heads)
            rest = rest % (of_head * num_kv_heads)
            kv_head = (rest // of_head).to(tl.int64)
            tile = rest % of_head
            num_head_splits = shared_begin - first
            split = tl.where(
                is_tile,
                shared_begin + split,
                tl.where(
                    split < num_head_splits,
                    first + split,
                    shared_end + split - num_head_splits,
                ),
            )
            the_node = tl.where(is_tile, 0, tile // tiles_of_node)
            row_begin = (
                tl.where(is_tile, tile, tile % tiles_of_node) * BLOCK_ROWS + the_node * group
            )
            row_end = tl.where(is_tile, num_nodes, the_node + 1) * group

            # ------------------------------------------------------------- which rows are there
            rows = row_begin + row_lane
            node = (rows // group).to(tl.int64)
            head = kv_head * group + rows % group
            valid = rows < row_end
            word_lane = tl.arange(0, BLOCK_W)
            words = tl.load(
                ancestors
                + b * stride_ab
                + node[:, None] * stride_an
                + word_lane[None, :] * stride_aw,
                mask=valid[:, None] & (word_lane < num_words)[None, :],
                other=0,
            )
            path_lengths = tl.where(context >= 0, tl.sum(_popcount(words), 1), 0)
            path_length = tl.max(path_lengths, 0)
            begin, end = _visible_range(
                context, length, path_length, capacity, window,
                shard_index, num_shards, shard_run, SHARDED, WINDOW,
            )  # fmt: skip
            # Whoever is present sees all of a split that is shared; nobody reads what the others
            # leave in scratch.
            begin = tl.where(is_tile, 0, begin)
            end = tl.where(is_tile & (path_length > 0), length, end)
            begin = tl.maximum(begin, split << shift)
            end = tl.minimum(end, (split + 1) << shift)
            if DIRECT or (begin < end):
                # ------------------------------------------------------------------- attend
                q_rows = q + b * stride_qb + node * stride_qn + head * stride_qh
                q_tile = tl.load(
                    q_rows[:, None] + columns_k[None, :],
                    mask=valid[:, None] & (columns_k < K_DIM)[None, :],
                    other=0.0,
                )
                q_tile = operand(q_tile)
                if ROPE_DIM:
                    columns_r = tl.arange(0, BLOCK_ROPE)
                    r_rows = q_rope + b * stride_rb + node * stride_rn + head * stride_rh
                    r_tile = tl.load(
                        r_rows[:, None] + columns_r[None, :],
                        mask=valid[:, None] & (columns_r < ROPE_DIM)[None, :],
                        other=0.0,
                    )
                    r_tile = operand(r_tile)
                factor = scale
                if FP8 != "":
                    factor = scale * tl.load(k_scale + kv_head * stride_k_scale)
                top = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
                total = tl.zeros([BLOCK_ROWS], tl.float32)
                acc = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
                node_words = ancestors + b * stride_ab + the_node.to(tl.int64) * stride_an
                table = tables + b * stride_tb
                k_head = k_cache + kv_head * stride_kh
                v_head = v_cache + kv_head * stride_vh
                for start in range(begin // BLOCK_KEYS * BLOCK_KEYS, end, BLOCK_KEYS):
                    position = start + key_lane
                    seen = (position >= begin) & (position < end)
                    slot = position
                    if start + BLOCK_KEYS > length:
                        ranks = tl.maximum(position - length, 0)
                        slots = _path_slots(node_words, stride_aw, num_words, ranks)
                        slot = tl.where(position < length, position, length + slots)
                        seen = seen & (slot < capacity)
                    page = tl.load(
                        table + (slot // PAGE).to(tl.int64) * stride_tm, mask=seen, other=-1
                    )
                    seen = seen & (page >= 0) & (page < num_pages)
                    page = page.to(tl.int64)
                    in_page = (slot % PAGE).to(tl.int64)
                    k_rows = k_head + (page * stride_kp + in_page * stride_ks)
                    k_tile = tl.load(
                        k_rows[:, None] + columns_k[None, :],
                        mask=seen[:, None] & (columns_k < K_DIM)[None, :],
                        other=0,
                    )
                    k_tile = operand(from_cache(k_tile, dtype, FP8))
                    score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                    if ROPE_DIM:
                        kr_tile = tl.load(
                            k_rows[:, None] + (K_DIM + columns_r)[None, :],
                            mask=seen[:, None] & (columns_r < ROPE_DIM)[None, :],
                            other=0,
                        )
                        kr_tile = operand(from_cache(kr_tile, dtype, FP8))
                        score = tl.dot(r_tile, tl.trans(kr_tile), score, input_precision="ieee")
                    score = score * factor
                    if HAS_CAP:
                        score = _tanh(score / logit_cap) * logit_cap
                    score = tl.where(seen[None, :], score, -float("inf"))
                    new = tl.maximum(top, tl.max(score, 1))
                    base = tl.where(new == -float("inf"), 0.0, new)
                    keep = tl.exp2((top - base) * LOG2E)
                    weight = tl.exp2((score - base[:, None]) * LOG2E)
                    total = total * keep + tl.sum(weight, 1)
                    acc = acc * keep[:, None]
                    if MLA:
                        v_tile = k_tile
                    else:
                        v_rows = v_head + (page * stride_vp + in_page * stride_vs)
                        v_tile = tl.load(
                            v_rows[:, None] + columns_v[None, :],
                            mask=seen[:, None] & (columns_v < V_DIM)[None, :],
                            other=0,
                        )
                        v_tile = operand(from_cache(v_tile, dtype, FP8))
                    weight = operand(round_to(weight, dtype))
                    acc = tl.dot(weight, v_tile, acc, input_precision="ieee")
                    top = new
                if FP8 != "":
                    acc = acc * tl.load(v_scale + kv_head * stride_v_scale)

                # -------------------------------------------------------------------- leave
                if DIRECT:
                    present = path_lengths > 0
                    total = tl.where(present, total, 0.0)
                    acc = tl.where(present[:, None], acc, 0.0)
                    if HAS_SINKS:
                        sink = tl.load(
                            sinks + head * stride_sink, mask=present, other=-float("inf")
                        )
                        result, log_sum = _finish(acc, top, total, sink, True)
                    else:
                        result, log_sum = _finish(acc, top, total, top, False)
                    o_rows = out + b * stride_ob + node * stride_on + head * stride_oh
                    tl.store(
                        o_rows[:, None] + columns_v[None, :],
                        round_to(result, dtype),
                        mask=valid[:, None] & (columns_v < V_DIM)[None, :],
                    )
                    tl.store(
                        lse + b * stride_lb + node * stride_ln + head * stride_lh,
                        log_sum,
                        mask=valid,
                    )
                else:
                    row = (b * num_kv_heads + kv_head) * (num_nodes * group) + rows
                    place = row * num_splits + split
                    tl.store(
                        values + place[:, None] * V_DIM + columns_v[None, :],
                        acc,
                        mask=valid[:, None] & (columns_v < V_DIM)[None, :],
                    )
                    tl.store(sums + place * 2, top, mask=valid)
                    tl.store(sums + place * 2 + 1, total, mask=valid)
            item += tl.num_programs(0)
        num_before = num_before_next


@triton.jit(do_not_specialize=[n for n in _SAME_FOR_ALL if n not in ("num_requests", "num_pages")])
def merge_kernel(
    values,
    sums,
    context_lens,
    ancestors,
    sinks,
    out,
    lse,
    window,
    shard_index,
    num_shards,
    shard_run,
    num_nodes,
    num_words,
    group,
    num_kv_heads,
    capacity,
    num_splits,
    stride_c,
    stride_ab,
    stride_an,
    stride_aw,
    stride_ob,
    stride_on,
    stride_oh,
    stride_lb,
    stride_ln,
    stride_lh,
    stride_sink,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MERGE_BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARDED: tl.constexpr,
):
    """One program for each row and ``BLOCK_V`` columns: folds the splits that the row sees."""
    # Rows stand in scratch as the tiles have them: [B, Hkv, N, H / Hkv].
    row = tl.program_id(0).to(tl.int64)
    rest = row // group
    node = rest % num_nodes
    rest = rest // num_nodes
    head = rest % num_kv_heads * group + row % group
    b = rest // num_kv_heads
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    lane = tl.arange(0, MERGE_BLOCK)
    word_lane = tl.arange(0, BLOCK_W)
    words = tl.load(
        ancestors + b * stride_ab + node * stride_an + word_lane * stride_aw,
        mask=word_lane < num_words,
        other=0,
    )
    context, length, shift = _length(
        tl.load(context_lens + b * stride_c), capacity,
        shard_index, num_shards, shard_run, SHARDED,
    )  # fmt: skip
    path_length = tl.where(context >= 0, tl.sum(_popcount(words), 0), 0)
    begin, end = _visible_range(
        context, length, path_length, capacity, window,
        shard_index, num_shards, shard_run, SHARDED, WINDOW,
    )  # fmt: skip
    first = begin >> shift
    last = tl.where(begin < end, (end + (1 << shift) - 1) >> shift, 0)
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_V], tl.float32)
    for start in range(first // MERGE_BLOCK * MERGE_BLOCK, last, MERGE_BLOCK):
        split = start + lane
        seen = (split >= first) & (split < last)
        place = row * num_splits + split
        tops = tl.load(sums + place * 2, mask=seen, other=-float("inf"))
        totals = tl.load(sums + place * 2 + 1, mask=seen, other=0.0)
        part = tl.load(
            values + place[:, None] * V_DIM + columns[None, :],
            mask=seen[:, None] & (columns < V_DIM)[None, :],
            other=0.0,
        )
        new = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new == -float("inf"), 0.0, new)
        keep = tl.exp2((top - base) * LOG2E)
        weight = tl.exp2((tops - base) * LOG2E)
        total = total * keep + tl.sum(totals * weight, 0)
        acc = acc * keep[:, None] + tl.sum(part * weight[:, None], 0)[None, :]
        top = new
    if HAS_SINKS:
        sink = tl.load(sinks + head * stride_sink + tl.zeros([1], tl.int32))
        sink = tl.where(path_length > 0, sink, -float("inf"))
        result, log_sum = _finish(acc, top, total, sink, True)
    else:
        result, log_sum = _finish(acc, top, total, top, False)
    o_row = out + b * stride_ob + node * stride_on + head * stride_oh
    tl.store(
        o_row + columns[None, :],
        round_to(result, out.dtype.element_ty),
        mask=(columns < V_DIM)[None, :],
    )
    if tl.program_id(1) == 0:
        place = b * stride_lb + node * stride_ln + head * stride_lh
        tl.store(lse + place + tl.zeros([1], tl.int32), log_sum)


# ------------------------------------------------------------------------------------- launching


def split_constants(
    *, page, k_dim, v_dim, rope_dim, num_words, tile, latent, fp8, capped, sinks, window, sharded,
    direct,
) -> dict[str, object]:  # fmt: skip
    """What ``split_kernel`` is compiled for."""
    return dict(
        PAGE=page,
        K_DIM=k_dim,
        V_DIM=v_dim,
        ROPE_DIM=rope_dim,
        BLOCK_K=padded(k_dim),
        BLOCK_V=padded(v_dim),
        BLOCK_ROPE=padded(rope_dim),
        BLOCK_W=triton.next_power_of_2(num_words),
        BLOCK_ROWS=tile.rows,
        BLOCK_KEYS=tile.keys,
        BLOCK_BATCH=_BLOCK_BATCH,
        MLA=latent,
        FP8=fp8,
        HAS_CAP=capped,
        HAS_SINKS=sinks,
        WINDOW=window,
        SHARDED=sharded,
        DIRECT=direct,
    )


def split_stages(tile: Tile, direct: bool, arch: int) -> int:
    """One split is a few blocks of keys: nothing is worth fetching ahead, and on sm_90 finishing
    the rows needs the registers. Elsewhere one stage spills more, or takes more than 99 KiB.
    """
    return 1 if direct and 90 <= arch < 120 else tile.stages


def merge_constants(*, v_dim, num_words, sinks, window, sharded) -> dict[str, object]:
    """What ``merge_kernel`` is compiled for."""
    return dict(
        V_DIM=v_dim,
        BLOCK_V=min(padded(v_dim), MERGE_COLUMNS),
        BLOCK_W=triton.next_power_of_2(num_words),
        MERGE_BLOCK=MERGE_BLOCK,
        HAS_SINKS=sinks,
        WINDOW=window,
        SHARDED=sharded,
    )


def _launch(
    op, q, q_rope, k_cache, v_cache, block_tables, context_lens, ancestors, k_scale, v_scale,
    sinks, scale, logit_cap, window, shard_index, num_shards, shard_run, out, lse, latent,
):  # fmt: skip
    """Both forms. ``q_rope`` is None in the grouped-query form; a latent cache is 4-dimensional
    here, with one head."""
    check_device(op, q.device)
    num_requests, num_nodes, num_heads, k_dim = q.shape
    num_words = ancestors.shape[2]
    num_pages, page, num_kv_heads, _ = k_cache.shape
    v_dim = out.shape[3]
    if lse.numel() == 0:
        return
    if asked_to_check(q.device):
        shard = ContextShard(shard_index, num_shards, shard_run)
        rest = (unpack_ancestors(ancestors), window, shard, k_scale, v_scale)
        check_values(op, num_pages, page, block_tables, context_lens, *rest)
    capacity = min(block_tables.shape[1] * page, MAX_POSITION)
    if num_words == 0 or capacity == 0 or num_pages == 0 or num_kv_heads == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    if ancestors.stride(2) * 32 >= 1 << 31:  # the kernels count words in 32 bits
        ancestors = ancestors.contiguous()
    arch, num_sms = device_facts(q.device)
    rope_dim = 0 if q_rope is None else q_rope.shape[3]
    fp8 = fp8_conversion(k_cache.dtype, arch)
    tile = attention_tile(k_dim, v_dim, q.element_size(), bool(fp8), arch)
    num_splits = max_splits(capacity, num_words)
    direct = num_splits == 1
    num_rows = num_requests * num_nodes * num_heads
    if direct:
        values = sums = lse
    else:
        sizes = scratch_sizes(num_rows, capacity, num_words, v_dim)
        values, sums = (torch.empty(n, dtype=torch.float32, device=q.device) for n in sizes)
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    has_sinks = sinks is not None and shard_index == 0
    sinks = sinks if has_sinks else lse
    if q_rope is None:
        q_rope = q
    # One scale for all heads is a view of stride 0.
    scale_strides = (k_scale.stride(0), v_scale.stride(0)) if fp8 else (0, 0)
    features = dict(
        v_dim=v_dim,
        num_words=num_words,
        sinks=has_sinks,
        window=window > 0,
        sharded=num_shards > 1,
    )
    constants = split_constants(
        page=page,
        k_dim=k_dim,
        rope_dim=rope_dim,
        tile=tile,
        latent=latent,
        fp8=fp8,
        capped=logit_cap > 0,
        direct=direct,
        **features,
    )
    split_kernel[(num_sms * tile.programs_per_sm,)](
        q,
        q_rope,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        ancestors,
        k_scale if fp8 else lse,
        v_scale if fp8 else lse,
        sinks,
        values,
        sums,
        out,
        lse,
        scale,
        logit_cap,
        min(window, MAX_POSITION),
        shard_index,
        num_shards,
        min(shard_run, MAX_POSITION),
        num_requests,
        num_nodes,
        num_words,
        num_heads // num_kv_heads,
        num_kv_heads,
        num_pages,
        capacity,
        num_splits,
        *q.stride()[:3],
        *q_rope.stride()[:3],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *block_tables.stride(),
        context_lens.stride(0),
        *ancestors.stride(),
        *out.stride()[:3],
        *lse.stride(),
        *scale_strides,
        sinks.stride(0),
        num_warps=tile.warps,
        num_stages=split_stages(tile, direct, arch),
        enable_fp_fusion=False,
        **constants,
    )
    if direct:
        return
    constants = merge_constants(**features)
    merge_kernel[(num_rows, triton.cdiv(v_dim, constants["BLOCK_V"]))](
        values,
        sums,
        context_lens,
        ancestors,
        sinks,
        out,
        lse,
        min(window, MAX_POSITION),
        shard_index,
        num_shards,
        min(shard_run, MAX_POSITION),
        num_nodes,
        num_words,
        num_heads // num_kv_heads,
        num_kv_heads,
        capacity,
        num_splits,
        context_lens.stride(0),
        *ancestors.stride(),
        *out.stride()[:3],
        *lse.stride(),
        sinks.stride(0),
        num_warps=MERGE_WARPS,
        enable_fp_fusion=False,
        **constants,
    )


def tree_attention_triton(
    q, k_cache, v_cache, block_tables, context_lens, ancestors, k_scale, v_scale, sinks, scale,
    logit_cap, window, shard_index, num_shards, shard_run, out, lse,
) -> None:  # fmt: skip
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _launch(
            "tree_attention", q, None, k_cache, v_cache, block_tables, context_lens, ancestors,
            k_scale, v_scale, sinks, scale, logit_cap, window, shard_index, num_shards, shard_run,
            out, lse, False,
        )  # fmt: skip


def tree_attention_mla_triton(
    q_latent, q_rope, cache, block_tables, context_lens, ancestors, cache_scale, sinks, scale,
    logit_cap, window, shard_index, num_shards, shard_run, out, lse,
) -> None:  # fmt: skip
    rows = cache.unsqueeze(2)
    with torch.cuda.device_of(q_latent):
        _launch(
            "tree_attention_mla", q_latent, q_rope, rows, rows, block_tables, context_lens,
            ancestors, cache_scale, cache_scale, sinks, scale, logit_cap, window, shard_index,
            num_shards, shard_run, out, lse, True,
        )  # fmt: skip
