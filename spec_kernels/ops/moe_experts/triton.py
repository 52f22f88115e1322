"""Triton kernels of ``moe_experts``: scores, choice, gate and up, down and sum. Four launches.

**Few rows.** Weights are what a call reads: each program takes a tile of the weights of one expert,
for all rows that chose it. Weight rows are the left operand of every dot, so that the rows, of
which an expert rarely has more than a few, fill the narrow side of a tensor core tile; and a block
of the depth is cut into slices with an accumulator of their own, so that dots do not wait for each
other. Slices and blocks are added in one order for every row: a row's bits depend on that row
alone, on whatever tile it stands.

**Work.** The grid depends on sizes alone. ``choose_kernel`` leaves the ids on the device, and every
program finds its work among them: with fewer pairs (row, expert) than experts a program stands for
a pair and goes on if no earlier pair has its expert; else it stands for an expert. A tile of
weights is read once for every ``ROWS`` rows of its expert.

**Sum.** Products of the down matrix are kept in fp32 for each pair. The last program of a tile of
columns to arrive, by an integer counter that the launch before has cleared, sums them in the order
of choice, so nothing is added by atomics.

**INT4.** Nibbles are integers -8..7, exact in 16 bits; a dot covers 32 elements that
share a scale, and the scale is applied to its fp32 result. No weight is rounded.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from spec_kernels.ops.common import fail
from spec_kernels.ops.moe_experts.api import INT4_GROUP, INT4_PER_WORD
from spec_kernels.ops.triton_common import check_device, operand, round_to

_OP = "moe_experts"
# Rows of x a dot has room for.
ROWS = 16
# Depth of a program of the router.
SPLIT = 1024
# Ids that a program compares at once: the least that holds all of them, else the last.
CHUNKS = (32, 128, 512)
# As many as the CPU kernel takes: tiles of ids and counts of columns are 32-bit.
MAX_EXPERTS, MAX_INNER = 1 << 16, 1 << 24
# Rows of a pass: bounds the scratch, of which the fp32 products of every pair are the most.
MAX_ROWS = 1024
CHOICE_WARPS = 4

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_PER_WORD = tl.constexpr(INT4_PER_WORD)
_GROUP_DEPTH = tl.constexpr(INT4_GROUP)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Weight rows of one program, slices of a block of the depth, and their length."""

    outs: int
    slices: int
    depth: int
    warps: int
    stages: int
    int4_slices: int = 0

    @property
    def constants(self) -> dict[str, int]:
        return dict(
            OUTS=self.outs, SLICES=self.slices, DEPTH=self.depth, INT4_SLICES=self.int4_slices
        )

    @property
    def launch(self) -> dict[str, int]:
        return dict(num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=False)


@triton.jit
def _product(
    x, x_at, x_real, w, w_at, w_real, begin, end,
    OUTS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``[OUTS, ROWS]`` fp32 sums over columns ``begin .. end`` of weight rows at ``w_at`` times
    rows at ``x_at``; what is not real counts as zero and is not read.
    """
    slices = tl.arange(0, SLICES)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
    for start in range(begin, end, SLICES * DEPTH):
        k = start + slices
        real = k < end
        a = tl.load(
            w + w_at[None, :, None] + k[:, None, :],
            mask=w_real[None, :, None] & real[:, None, :],
            other=0.0,
        )
        b = tl.load(
            x + x_at[None, None, :] + k[:, :, None],
            mask=x_real[None, None, :] & real[:, :, None],
            other=0.0,
        )
        if a.dtype != b.dtype:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(operand(a), operand(b), acc, input_precision="ieee")
    return tl.sum(acc, 0)


@triton.jit
def _int4_product(
    x, x_at, x_real, w, w_at, w_real, scale, scale_at, end,
    OUTS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``_product`` with packed weights, over columns ``0 .. end``."""
    words: tl.constexpr = SLICES * _GROUP_DEPTH // _PER_WORD
    word = tl.arange(0, words)
    group = tl.arange(0, SLICES)
    k = group[:, None] * _GROUP_DEPTH + tl.arange(0, _GROUP_DEPTH)[None, :]
    shifts = 4 * tl.arange(0, _PER_WORD)
    acc = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
    for start in range(0, end, SLICES * _GROUP_DEPTH):
        at = word + start // _PER_WORD
        packed = tl.load(
            w + w_at[:, None] + at[None, :],
            mask=w_real[:, None] & (at < end // _PER_WORD)[None, :],
            other=0,
        )
        first = group * _GROUP_DEPTH + start
        factor = tl.load(
            scale + scale_at[:, None] + (first // GROUP)[None, :],
            mask=w_real[:, None] & (first < end)[None, :],
            other=0.0,
        )
        column = k + start
        b = tl.load(
            x + x_at[None, None, :] + column[:, :, None],
            mask=x_real[None, None, :] & (column < end)[:, :, None],
            other=0.0,
        )
        b = operand(b)
        # 2 ** 23 + n in fp32: an instruction cheaper than a conversion, and as exact.
        bits = ((packed[:, :, None] >> shifts[None, None, :]) & 15) | 0x4B000000
        values = bits.to(tl.float32, bitcast=True) - 8388616.0
        values = tl.reshape(values.to(b.dtype), [OUTS, SLICES, _GROUP_DEPTH])
        part = tl.dot(tl.permute(values, (1, 0, 2)), b, input_precision="ieee")
        acc += part * tl.permute(factor.to(tl.float32), (1, 0))[:, :, None]
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["num_rows"])
def scores_kernel(
    x, weight, logits, num_rows, hidden, num_experts, stride_x, stride_w,
    OUTS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """``logits [splits, T, E]``: the router's products, each over a part of the depth."""
    e = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(1)
    t = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    begin = split * SPLIT
    sums = _product(
        x, t.to(tl.int64) * stride_x, t < num_rows,
        weight, e.to(tl.int64) * stride_w, e < num_experts,
        begin, tl.minimum(begin + SPLIT, hidden), OUTS, ROWS, SLICES, DEPTH,
    )  # fmt: skip
    at = (split.to(tl.int64) * num_rows + t)[None, :] * num_experts + e[:, None]
    tl.store(logits + at, sums, mask=(t < num_rows)[None, :] & (e < num_experts)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    logits, bias, ids, weights, num_rows, num_experts, num_splits, topk_group, scaling, stride_bias,
    NUM_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_TOP: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """``ids`` and ``weights [T, top_k]`` of one row a program; see ``router_topk``."""
    t = tl.program_id(0).to(tl.int64)
    size = num_experts // NUM_GROUPS
    group = tl.arange(0, BLOCK_GROUPS)
    member = tl.arange(0, BLOCK_SIZE)
    e = group[:, None] * size + member[None, :]
    real = (group < NUM_GROUPS)[:, None] & (member < size)[None, :]
    logit = tl.zeros([BLOCK_GROUPS, BLOCK_SIZE], tl.float32)
    for split in range(num_splits):
        at = (split * num_rows + t) * num_experts + e
        logit += tl.load(logits + at, mask=real, other=0.0)
    score = tl.math.div_rn(tl.full(logit.shape, 1.0, tl.float32), 1.0 + tl.exp(-logit))
    value = score
    if HAS_BIAS:
        value += tl.load(bias + e.to(tl.int64) * stride_bias, mask=real, other=0.0)
    # Sound values are finite; what may not be chosen is -inf, and so less than each of them.
    value = tl.where(value == value, value, _LOWEST)
    value = tl.minimum(tl.maximum(value, _LOWEST), -_LOWEST)
    value = tl.where(real, value, -float("inf"))
    if NUM_GROUPS > 1:
        best = tl.max(value, 1)
        at_best = tl.argmax(value, 1, tie_break_left=True)
        others = tl.where(member[None, :] == at_best[:, None], -float("inf"), value)
        worth = best + tl.where(size > 1, tl.max(others, 1), 0.0)
        known = (group < NUM_GROUPS)[None, :]
        ahead = (worth[None, :] > worth[:, None]) | (
            (worth[None, :] == worth[:, None]) & (group[None, :] < group[:, None])
        )
        place = tl.sum((ahead & known).to(tl.int32), 1)
        value = tl.where((place < topk_group)[:, None], value, -float("inf"))
    value = tl.reshape(value, [BLOCK_GROUPS * BLOCK_SIZE])
    score = tl.reshape(tl.where(score == score, score, 0.0), [BLOCK_GROUPS * BLOCK_SIZE])
    lane = tl.arange(0, BLOCK_GROUPS * BLOCK_SIZE)
    order = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros([BLOCK_TOP], tl.int32)
    weight = tl.zeros([BLOCK_TOP], tl.float32)
    total = 0.0
    for i in range(TOP_K):
        first = tl.argmax(value, 0, tie_break_left=True)
        value = tl.where(lane == first, -float("inf"), value)
        own = tl.sum(tl.where(lane == first, score, 0.0), 0)
        total += own
        chosen = tl.where(order == i, first // BLOCK_SIZE * size + first % BLOCK_SIZE, chosen)
        weight = tl.where(order == i, own, weight)
    if NORMALIZE:
        weight = tl.math.div_rn(weight, tl.zeros_like(weight) + (total + 1e-20))
    at = t * TOP_K + order
    tl.store(ids + at, chosen, mask=order < TOP_K)
    tl.store(weights + at, weight * scaling, mask=order < TOP_K)


@triton.jit
def _pairs_of(ids, num_pairs, e, CHUNK: tl.constexpr):
    """The first pair that has expert ``e`` (``num_pairs``: none), and how many have it."""
    lane = tl.arange(0, CHUNK)
    first = num_pairs
    count = num_pairs * 0
    for start in range(0, num_pairs, CHUNK):
        pair = start + lane
        same = tl.load(ids + pair, mask=pair < num_pairs, other=-1) == e
        count += tl.sum(same.to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(same, pair, num_pairs), 0))
    return first, count


@triton.jit
def _pairs_at(ids, num_pairs, e, ranks, CHUNK: tl.constexpr):
    """The pairs that have ``ranks`` pairs of the same expert before them."""
    lane = tl.arange(0, CHUNK)
    before = num_pairs * 0
    pairs = ranks * 0
    for start in range(0, num_pairs, CHUNK):
        pair = start + lane
        same = (tl.load(ids + pair, mask=pair < num_pairs, other=-1) == e).to(tl.int32)
        rank = tl.where(same == 1, before + tl.cumsum(same, 0) - 1, -1)
        hit = rank[None, :] == ranks[:, None]
        pairs += tl.sum(tl.where(hit, pair[None, :], 0), 1)
        before += tl.sum(same, 0)
    return pairs


@triton.jit
def _expert_of(ids, item, num_pairs, BY_EXPERT: tl.constexpr, CHUNK: tl.constexpr):
    """The expert that routed item ``item`` stands for, and its number of pairs, 0 if none."""
    if BY_EXPERT:
        e = item
    else:
        e = tl.load(ids + item)
    first, count = _pairs_of(ids, num_pairs, e, CHUNK)
    if not BY_EXPERT:
        count = tl.where(first == item, count, 0)
    return e.to(tl.int64), count


@triton.jit
def _gate_up(
    x, x_at, x_real, w, scale, act, act_at, tile, inner, hidden, stride_row, stride_scale,
    OUTS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
    INT4: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Activations of a tile: half of the weight rows are gates, half the ups that go with them."""
    half: tl.constexpr = OUTS // 2
    lane = tl.arange(0, OUTS)
    i = tile * half + lane % half
    row = (i + tl.where(lane < half, 0, inner)).to(tl.int64)
    real = i < inner
    if INT4:
        sums = _int4_product(
            x, x_at, x_real, w, row * stride_row, real, scale, row * stride_scale, hidden,
            OUTS, ROWS, SLICES, GROUP,
        )  # fmt: skip
    else:
        sums = _product(
            x, x_at, x_real, w, row * stride_row, real, 0, hidden, OUTS, ROWS, SLICES, DEPTH
        )
    gate, up = tl.split(tl.permute(tl.reshape(sums, [2, half, ROWS]), (1, 2, 0)))
    result = round_to(gate / (1.0 + tl.exp(-gate)) * up, act.dtype.element_ty)
    i = tile * half + tl.arange(0, half)
    mask = (i < inner)[:, None] & x_real[None, :]
    tl.store(act + act_at[None, :] * inner + i[:, None], result, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_pairs", "num_shared", "num_tiles", "num_counters"])
def gate_up_kernel(
    x, ids, w, scale, shared_w, act, shared_act, counters,
    num_rows, num_pairs, num_shared, num_tiles, num_counters, hidden, inner, shared_inner,
    stride_x, stride_we, stride_wr, stride_se, stride_sr, stride_shared,
    TOP_K: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr, INT4_SLICES: tl.constexpr, INT4: tl.constexpr, GROUP: tl.constexpr,
    HAS_ROUTED: tl.constexpr, HAS_SHARED: tl.constexpr, BY_EXPERT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """``act [pairs, I]`` and ``shared_act [T, Is]``: silu(gate) * up.

    Items are blocks of rows of the shared expert, which every row goes through, then routed ones.
    """
    program = tl.program_id(0)
    # A counter for each tile of the next launch.
    lane = tl.arange(0, CHUNK)
    if program == 0:
        for start in range(0, num_counters, CHUNK):
            tl.store(
                counters + start + lane,
                tl.zeros([CHUNK], tl.int32),
                mask=start + lane < num_counters,
            )
    tile = program % num_tiles
    item = program // num_tiles
    r = tl.arange(0, ROWS)
    if HAS_SHARED:
        if (item < num_shared) & (tile * (OUTS // 2) < shared_inner):
            t = item * ROWS + r
            _gate_up(
                x, t.to(tl.int64) * stride_x, t < num_rows, shared_w, scale, shared_act,
                t.to(tl.int64), tile, shared_inner, hidden, stride_shared, stride_sr,
                OUTS, ROWS, SLICES, DEPTH, False, GROUP,
            )  # fmt: skip
    if HAS_ROUTED:
        if (item >= num_shared) & (tile * (OUTS // 2) < inner):
            e, count = _expert_of(ids, item - num_shared, num_pairs, BY_EXPERT, CHUNK)
            for start in range(0, count, ROWS):
                pair = _pairs_at(ids, num_pairs, e, start + r, CHUNK).to(tl.int64)
                _gate_up(
                    x, pair // TOP_K * stride_x, start + r < count,
                    w + e * stride_we, scale + e * stride_se, act, pair,
                    tile, inner, hidden, stride_wr, stride_sr,
                    OUTS, ROWS, INT4_SLICES if INT4 else SLICES, DEPTH, INT4, GROUP,
                )  # fmt: skip


@triton.jit
def _down(
    act, act_at, real, w, scale, parts, tile, inner, hidden, stride_row, stride_scale,
    OUTS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
    INT4: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows ``act_at`` of ``parts``: activations times a tile of the down matrix."""
    h = tile * OUTS + tl.arange(0, OUTS)
    row = h.to(tl.int64)
    if INT4:
        sums = _int4_product(
            act, act_at * inner, real, w, row * stride_row, h < hidden, scale, row * stride_scale,
            inner, OUTS, ROWS, SLICES, GROUP,
        )  # fmt: skip
    else:
        sums = _product(
            act, act_at * inner, real, w, row * stride_row, h < hidden, 0, inner,
            OUTS, ROWS, SLICES, DEPTH,
        )  # fmt: skip
    mask = (h < hidden)[:, None] & real[None, :]
    tl.store(parts + act_at[None, :] * hidden + h[:, None], sums, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_pairs", "num_shared", "num_tiles", "num_items"])
def down_kernel(
    ids, weights, w, scale, shared_w, act, shared_act, parts, shared_parts, counters, out,
    num_rows, num_pairs, num_shared, num_tiles, num_items, hidden, inner, shared_inner,
    stride_we, stride_wr, stride_se, stride_sr, stride_shared, stride_out,
    TOP_K: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr, INT4_SLICES: tl.constexpr, INT4: tl.constexpr, GROUP: tl.constexpr,
    HAS_ROUTED: tl.constexpr, HAS_SHARED: tl.constexpr, BY_EXPERT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """``parts [pairs, H]`` and ``shared_parts [T, H]``, items as in ``gate_up_kernel``; the last
    item of a tile to arrive sums them into ``out``."""
    program = tl.program_id(0)
    tile = program % num_tiles
    item = program // num_tiles
    r = tl.arange(0, ROWS)
    if HAS_SHARED:
        if item < num_shared:
            t = item * ROWS + r
            _down(
                shared_act, t.to(tl.int64), t < num_rows, shared_w, scale, shared_parts,
                tile, shared_inner, hidden, stride_shared, stride_sr,
                OUTS, ROWS, SLICES, DEPTH, False, GROUP,
            )  # fmt: skip
    if HAS_ROUTED:
        if item >= num_shared:
            e, count = _expert_of(ids, item - num_shared, num_pairs, BY_EXPERT, CHUNK)
            for start in range(0, count, ROWS):
                pair = _pairs_at(ids, num_pairs, e, start + r, CHUNK).to(tl.int64)
                _down(
                    act, pair, start + r < count, w + e * stride_we, scale + e * stride_se, parts,
                    tile, inner, hidden, stride_wr, stride_sr,
                    OUTS, ROWS, INT4_SLICES if INT4 else SLICES, DEPTH, INT4, GROUP,
                )  # fmt: skip
    # All threads have stored before the one that counts says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == num_items - 1:
        h = tile * OUTS + tl.arange(0, OUTS)
        for start in range(0, num_rows, ROWS):
            t = (start + r).to(tl.int64)
            mask = (t < num_rows)[:, None] & (h < hidden)[None, :]
            total = tl.zeros([ROWS, OUTS], tl.float32)
            if HAS_ROUTED:
                for i in range(TOP_K):
                    pair = t * TOP_K + i
                    weight = tl.load(weights + pair, mask=t < num_rows, other=0.0)
                    # Past the first cache, which may hold what was there before.
                    part = tl.load(
                        parts + pair[:, None] * hidden + h[None, :],
                        mask=mask,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    total += weight[:, None] * part
            if HAS_SHARED:
                total += tl.load(
                    shared_parts + t[:, None] * hidden + h[None, :],
                    mask=mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
            place = out + t[:, None] * stride_out + h[None, :]
            tl.store(place, round_to(total, out.dtype.element_ty), mask=mask)


def router_tile(fp32: bool) -> Tile:
    return Tile(outs=16, slices=4, depth=16 if fp32 else 64, warps=4, stages=3)


def gate_up_tile(fp32: bool) -> Tile:
    if fp32:
        return Tile(outs=32, slices=4, depth=16, warps=4, stages=2, int4_slices=4)
    return Tile(outs=32, slices=4, depth=32, warps=4, stages=3, int4_slices=8)


def down_tile(fp32: bool) -> Tile:
    """The depth is a rank's share of an expert, a few blocks: more programs hide its latency."""
    if fp32:
        return Tile(outs=32, slices=4, depth=16, warps=4, stages=2, int4_slices=2)
    return Tile(outs=64, slices=4, depth=32, warps=4, stages=3, int4_slices=4)


def choice_blocks(num_experts: int, n_group: int, top_k: int) -> dict[str, int]:
    """Sizes that ``choose_kernel`` is compiled for."""
    power = triton.next_power_of_2
    return {
        "NUM_GROUPS": n_group,
        "BLOCK_GROUPS": power(n_group),
        "BLOCK_SIZE": power(num_experts // n_group),
        "TOP_K": top_k,
        "BLOCK_TOP": power(top_k),
    }


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Matrices of all experts: ``[E, rows, columns]``, and their scales if they are packed."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    group: int

    @classmethod
    def of(cls, weight: torch.Tensor, scale: torch.Tensor | None) -> _Stack:
        if scale is None:
            return cls(weight, None, INT4_GROUP)
        columns = weight.shape[2] * INT4_PER_WORD
        return cls(weight, scale, max(INT4_GROUP, columns // max(1, scale.shape[2])))

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a call does not have is never looked at."""
        return self.weight, self.weight if self.scale is None else self.scale

    @property
    def strides(self) -> tuple[int, ...]:
        scale = (0, 0) if self.scale is None else self.scale.stride()[:2]
        return (*self.weight.stride()[:2], *scale)


def _scratch(x: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _choose(x, router_weight, bias, top_k, n_group, topk_group, scaling, normalize):
    """Ids and weights ``[T, top_k]``, in two launches."""
    num_rows, hidden = x.shape
    num_experts = router_weight.shape[0]
    num_splits = triton.cdiv(hidden, SPLIT)
    tile = router_tile(router_weight.dtype == torch.float32)
    logits = _scratch(x, num_splits, num_rows, num_experts)
    ids = _scratch(x, num_rows, top_k, dtype=torch.int32)
    weights = _scratch(x, num_rows, top_k)
    scores_kernel[(triton.cdiv(num_experts, tile.outs), num_splits, triton.cdiv(num_rows, ROWS))](
        x,
        router_weight,
        logits,
        num_rows,
        hidden,
        num_experts,
        x.stride(0),
        router_weight.stride(0),
        OUTS=tile.outs,
        ROWS=ROWS,
        SPLIT=SPLIT,
        SLICES=tile.slices,
        DEPTH=tile.depth,
        **tile.launch,
    )
    choose_kernel[(num_rows,)](
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        num_rows,
        num_experts,
        num_splits,
        topk_group,
        scaling,
        0 if bias is None else bias.stride(0),
        **choice_blocks(num_experts, n_group, top_k),
        HAS_BIAS=bias is not None,
        NORMALIZE=normalize,
        num_warps=CHOICE_WARPS,
        enable_fp_fusion=False,
    )
    return ids, weights


def _pass(x, route, gate_up, down, shared_gate_up, shared_down, top_k, out) -> None:
    """A pass over at most ``MAX_ROWS`` rows; ``route`` as ``_choose`` takes it."""
    num_rows, hidden = x.shape
    num_experts, inner = gate_up.weight.shape[0], gate_up.weight.shape[1] // 2
    num_pairs = num_rows * top_k
    has_shared = shared_down is not None
    num_shared = triton.cdiv(num_rows, ROWS) if has_shared else 0
    shared_inner = shared_down.shape[1] if has_shared else 0
    by_expert = num_pairs > num_experts
    num_items = num_shared + (num_experts if by_expert else num_pairs)
    fp32 = x.dtype == torch.float32
    tile, down_of = gate_up_tile(fp32), down_tile(fp32)
    num_tiles = max(1, triton.cdiv(2 * max(inner if top_k else 0, shared_inner), tile.outs))
    num_down_tiles = triton.cdiv(hidden, down_of.outs)
    act = _scratch(x, num_pairs, inner, dtype=x.dtype)
    shared_act = _scratch(x, num_rows * has_shared, shared_inner, dtype=x.dtype)
    parts = _scratch(x, num_pairs, hidden)
    shared_parts = _scratch(x, num_rows * has_shared, hidden)
    counters = _scratch(x, num_down_tiles, dtype=torch.int32)
    ids = weights = counters
    if top_k:
        ids, weights = _choose(x, *route)
    constants = dict(
        TOP_K=max(1, top_k),
        ROWS=ROWS,
        INT4=gate_up.scale is not None,
        HAS_ROUTED=top_k > 0,
        HAS_SHARED=has_shared,
        BY_EXPERT=by_expert,
        CHUNK=next((chunk for chunk in CHUNKS if num_pairs <= chunk), CHUNKS[-1]),
    )
    gate_up_kernel[(num_items * num_tiles,)](
        x,
        ids,
        *gate_up.pointers,
        shared_gate_up if has_shared else x,
        act,
        shared_act,
        counters,
        num_rows,
        num_pairs,
        num_shared,
        num_tiles,
        num_down_tiles,
        hidden,
        inner,
        shared_inner,
        x.stride(0),
        *gate_up.strides,
        shared_gate_up.stride(0) if has_shared else 0,
        GROUP=gate_up.group,
        **constants,
        **tile.constants,
        **tile.launch,
    )
    down_kernel[(num_items * num_down_tiles,)](
        ids,
        weights,
        *down.pointers,
        shared_down if has_shared else x,
        act,
        shared_act,
        parts,
        shared_parts,
        counters,
        out,
        num_rows,
        num_pairs,
        num_shared,
        num_down_tiles,
        num_items,
        hidden,
        inner,
        shared_inner,
        *down.strides,
        shared_down.stride(0) if has_shared else 0,
        out.stride(0),
        GROUP=down.group,
        **constants,
        **down_of.constants,
        **down_of.launch,
    )


def moe_experts_triton(
    x, router_weight, correction_bias, w_gate_up, w_down, w_gate_up_scale, w_down_scale,
    shared_gate_up, shared_down, top_k, n_group, topk_group, routed_scaling, normalize, out,
) -> None:  # fmt: skip
    """The arguments of the schema."""
    check_device(_OP, x.device)
    if len(router_weight) > MAX_EXPERTS:
        fail(_OP, "router_weight", f"at most {MAX_EXPERTS} experts", len(router_weight))
    for name, down in (("w_down", w_down), ("shared_down", shared_down)):
        if down is not None and down.shape[-1] > MAX_INNER:
            fail(_OP, name, f"at most {MAX_INNER} columns", down.shape[-1])
    if out.numel() == 0:
        return
    if top_k == 0 and shared_down is None:
        out.zero_()
        return
    route = (
        router_weight, correction_bias, top_k, n_group, topk_group, routed_scaling, normalize
    )  # fmt: skip
    stacks = _Stack.of(w_gate_up, w_gate_up_scale), _Stack.of(w_down, w_down_scale)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        for first in range(0, len(x), MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            _pass(x[rows], route, *stacks, shared_gate_up, shared_down, top_k, out[rows])
