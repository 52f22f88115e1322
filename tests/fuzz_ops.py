"""Malformed calls for every compiled op: each must raise a clear error or equal the reference.

    python tests/fuzz_ops.py [--seconds 60] [--seed 0] [--op NAME] [--case N] [--verbose]
                             [--cuda-on-host | --triton]

Each case starts from a sound call with random sizes and damages some arguments: shape, dtype,
strides (zero ones on outputs too), device, aliasing, extreme integers, NaN and infinities. The call
goes straight to ``torch.ops.spec_kernels``, past the checks of the Python face. Sound is one of

- an error of the common form ``spec_kernels::op: argument: expected ..., got ...``;
- outputs equal to the reference's, and every input and every byte around the outputs untouched.

A crash ends the process; the last line printed before it (``--verbose``) names the case. ``make
sanitize`` runs this under AddressSanitizer and UBSan, which see what a crash does not show.

``--cuda-on-host`` calls the CUDA sources as compiled for the host (``tests/cuda_on_host``), each
case under a schedule of its own and with ``SPEC_KERNELS_CHECK=1``, so that they raise as well.
``--triton`` calls the Triton kernels in Triton's interpreter, likewise; as these stand behind the
Python face alone, so do the calls.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import random
import re
import sys
import time
import traceback
from pathlib import Path

import torch

from spec_kernels import _library, ops  # noqa: F401 (registers the references)

GUARD = 64  # elements before and after every tensor's storage that nobody may write
INTEGERS = (torch.int32, torch.int64)
EXTREMES = (
    -1,
    0,
    1,
    2,
    31,
    32,
    1023,
    2**31 - 1,
    -(2**31),
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    -(2**63),
)
FLOAT_EXTREMES = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e38, -1e38, 1e-45)
MESSAGE = re.compile(r"^spec_kernels::\w+: [\w\[\], .]+: expected .+, got .*", re.S)


class Case:
    """A random source for sizes, and tensors that stand between guards."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.guarded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def size(self, *choices: int) -> int:
        return self.random.choice(choices)

    def place(self, t: torch.Tensor) -> torch.Tensor:
        """``t`` inside a larger storage, sometimes with a gap after every row."""
        shape = list(t.shape)
        if shape and self.random.random() < 0.2:
            wide = [*shape[:-1], shape[-1] + self.random.choice((1, 3, 8))]
        else:
            wide = shape
        count = 1
        for s in wide:
            count *= s
        store = torch.zeros(count + 2 * GUARD, dtype=t.dtype)
        view = store[GUARD : GUARD + count].view(wide)
        if wide is not shape:
            view = view[..., : shape[-1]]
        view.copy_(t)
        return view

    def floats(self, *shape: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
        return self.place((torch.randn(shape, generator=self.torch) * scale).to(dtype))

    def cache_scales(self, num: int) -> torch.Tensor:
        return self.place(torch.rand(num, generator=self.torch) + 0.01)

    def ints(self, low: int, high: int, *shape: int, dtype=None) -> torch.Tensor:
        dtype = dtype or self.random.choice(INTEGERS)
        values = torch.randint(low, max(high, low + 1), shape, generator=self.torch)
        return self.place(values.to(dtype))

    def out(self, *shape: int, dtype) -> torch.Tensor:
        t = torch.zeros(shape, dtype=dtype)
        fill = float("nan") if dtype.is_floating_point else -7
        return self.place(t.fill_(fill)) if self.random.random() < 0.5 else t.fill_(fill)

    def float_type(self) -> torch.dtype:
        return self.random.choice((torch.float32, torch.bfloat16))

    def int_type(self) -> torch.dtype:
        return self.random.choice(INTEGERS)


def hidden_capture(c: Case):
    rows, hidden, dtype = c.size(0, 1, 2, 5, 33), c.size(0, 1, 3, 16, 37, 128), c.float_type()
    slots = c.size(1, 3)
    capture = c.floats(rows + c.size(0, 2), slots, hidden, dtype=dtype)
    return [
        c.random.choice((None, c.floats(rows, hidden, dtype=dtype))),
        c.floats(rows, hidden, dtype=dtype),
        c.floats(hidden, dtype=dtype),
        1e-5,
        c.out(rows, hidden, dtype=dtype),
        c.random.choice((None, capture)),
        c.size(0, slots - 1),
    ]


def tree_build(c: Case):
    batch, pool, nodes = c.size(0, 1, 3), c.size(0, 1, 8, 70), c.size(1, 2, 8, 33, 65)
    links = c.int_type()
    words = (nodes + 31) // 32
    slots = torch.randint(-1, max(pool, 1), (batch, pool), generator=c.torch)
    slots = torch.minimum(slots, torch.arange(pool) - 1) if c.random.random() < 0.7 else slots
    return [
        c.floats(batch, pool),
        c.ints(0, 50, batch, pool),
        c.place(slots.to(c.int_type())),
        c.ints(-1, 50, batch),
        torch.full((batch, nodes), -7, dtype=c.int_type()),
        torch.full((batch, nodes), -7, dtype=links),
        torch.full((batch, nodes), -7, dtype=links),
        torch.full((batch, nodes, words), -7, dtype=torch.int32),
        torch.full((batch, nodes), -7, dtype=links),
        torch.full((batch, nodes), -7, dtype=links),
        torch.full((batch, nodes), -7, dtype=links),
        torch.full((batch,), -7, dtype=c.int_type()),
    ]


def _attention(c: Case, mla: bool):
    batch, rows = c.size(0, 1, 2), c.size(0, 1, 3, 8)
    dtype = c.random.choice((torch.float32, torch.bfloat16, torch.float16))
    cache_dtype = c.random.choice((dtype, dtype, torch.float8_e4m3fn))
    kv_heads, group = c.size(1, 2), c.size(1, 3)
    heads = kv_heads * group
    k_dim, v_dim = c.size(1, 8, 17, 64), c.size(1, 8, 24)
    page, table, words = c.size(1, 3, 16), c.size(1, 4, 9), c.size(1, 1, 2)
    pages = c.size(1, 12, 40)
    num_shards = c.size(1, 1, 2, 8)
    room = page * table * num_shards
    ancestors = torch.zeros(batch, rows, words, dtype=torch.int64)
    for b in range(batch):
        for n in range(rows):
            bits = c.random.getrandbits(min(n + 1, 30)) | 1 << n
            ancestors[b, n, 0] = bits if c.random.random() < 0.9 else 0
    indices = [
        c.ints(0, pages, batch, table),
        c.ints(0, max(1, room - 32), batch),
        c.place(ancestors.to(torch.int32)),
    ]

    def scales(num):
        return c.cache_scales(num) if cache_dtype != dtype else None

    factors = [
        c.random.choice((None, c.floats(heads))),
        0.25,
        c.random.choice((0.0, 5.0)),
        c.size(0, 0, 1, 7),
        c.random.randrange(num_shards),
        num_shards,
        c.size(1, 3, 16),
    ]
    if mla:
        rope = c.size(0, 1, 8)
        return [
            c.floats(batch, rows, heads, k_dim, dtype=dtype),
            c.floats(batch, rows, heads, rope, dtype=dtype),
            c.floats(pages, page, k_dim + rope, dtype=cache_dtype),
            *indices,
            scales(1),
            *factors,
            c.out(batch, rows, heads, k_dim, dtype=dtype),
            c.out(batch, rows, heads, dtype=torch.float32),
        ]
    return [
        c.floats(batch, rows, heads, k_dim, dtype=dtype),
        c.floats(pages, page, kv_heads, k_dim, dtype=cache_dtype),
        c.floats(pages, page, kv_heads, v_dim, dtype=cache_dtype),
        *indices,
        scales(kv_heads),
        scales(kv_heads),
        *factors,
        c.out(batch, rows, heads, v_dim, dtype=dtype),
        c.out(batch, rows, heads, dtype=torch.float32),
    ]


def tree_attention(c: Case):
    return _attention(c, mla=False)


def tree_attention_mla(c: Case):
    return _attention(c, mla=True)


def merge_states(c: Case):
    parts, dim = c.size(0, 1, 2, 9), c.size(0, 1, 16, 33)
    shape = (c.size(0, 1, 2), c.size(0, 1, 3), c.size(1, 2))
    dtype = c.random.choice((torch.float32, torch.bfloat16, torch.float16))
    lses = torch.randn(parts, *shape, generator=c.torch)
    lses[torch.rand(lses.shape, generator=c.torch) < 0.2] = -float("inf")
    return [
        c.floats(parts, *shape, dim, dtype=dtype),
        c.place(lses),
        c.out(*shape, dim, dtype=dtype),
        c.out(*shape, dtype=torch.float32),
    ]


def tree_verify(c: Case):
    return _tree_verify(c, c.size(0, 1, 3), c.size(1, 2, 6, 40), c.ints(-1, 1000, 3))


def _tree_verify(c: Case, batch: int, nodes: int, lens: torch.Tensor):
    vocab = c.size(1, 2, 33, 300)
    steps = c.size(1, 2, nodes)
    dtype = c.float_type()

    def maybe(t):
        return c.random.choice((None, t))

    temperature = maybe(c.place(torch.tensor([0.0, 0.7, 1.5])[:batch]))
    seeds = c.ints(-(2**63), 2**63 - 1, batch, dtype=torch.int64)
    drafts = maybe(c.floats(batch, nodes, vocab, dtype=c.float_type(), scale=0.3))
    typical = (0.09, 0.3) if drafts is None and c.random.random() < 0.5 else (0.0, 0.0)
    return [
        c.floats(batch, nodes, vocab, dtype=dtype, scale=3.0),
        c.ints(0, vocab, batch, nodes),
        c.ints(-1, nodes, batch, nodes),
        c.ints(-1, nodes, batch, nodes),
        lens[:batch],
        temperature,
        maybe(c.ints(-1, vocab + 2, batch)),
        maybe(c.place(torch.rand(batch, generator=c.torch))),
        maybe(c.place(torch.rand(batch, generator=c.torch) * 0.2)),
        seeds if temperature is not None else maybe(seeds),
        maybe(c.floats(batch, vocab)),
        maybe(c.ints(-(2**31), 2**31, batch, nodes, (vocab + 31) // 32, dtype=torch.int32)),
        drafts,
        *typical,
        c.out(batch, steps, dtype=c.int_type()),
        c.out(batch, dtype=c.int_type()),
        c.out(batch, steps, dtype=c.int_type()),
        c.out(batch, dtype=c.int_type()),
    ]


def tree_verify_compact(c: Case):
    batch, nodes, page, table = c.size(0, 1, 3), c.size(1, 2, 6, 40), c.size(1, 3, 16), c.size(1, 8)
    lens = c.ints(-1, max(0, table * page - nodes), 3)
    verify = _tree_verify(c, batch, nodes, lens)
    tables, caches, rows = _moved(c, batch, nodes, page, table)
    return [*verify[:15], tables, *verify[15:], caches, rows]


def _flat(c: Case, batch: int, nodes: int, ids: int):
    """Tree, slots and outputs of the ops that take the caller's choices or coins."""
    slots = c.size(1, batch * nodes + 1, batch * nodes + 5)
    tree = [
        c.ints(0, ids, batch, nodes),
        c.ints(-1, nodes, batch, nodes),
        c.ints(-1, nodes, batch, nodes),
        c.place(torch.arange(batch * nodes).view(batch, nodes).to(c.int_type())),
    ]
    outs = [
        c.out(slots, dtype=c.int_type()),
        c.out(batch, c.size(1, 2, nodes), dtype=c.int_type()),
        c.out(batch, dtype=c.int_type()),
        c.out(batch, dtype=c.int_type()),
    ]
    return tree, slots, outs


def tree_verify_choices(c: Case):
    tree, slots, outs = _flat(c, c.size(0, 1, 3), c.size(1, 2, 6, 40), 3)
    return [*tree, c.ints(-1, 4, slots), *outs]


def tree_verify_coins(c: Case):
    batch, nodes, vocab = c.size(0, 1, 3), c.size(1, 2, 6, 40), c.size(1, 2, 33, 300)
    tree, _, outs = _flat(c, batch, nodes, vocab + 1)

    def probabilities():
        logits = torch.randn(batch, nodes, vocab, generator=c.torch) * 3.0
        return c.place(torch.softmax(logits, -1))

    return [
        *tree,
        probabilities(),
        c.random.choice((None, probabilities())),
        c.place(torch.rand(batch, nodes, generator=c.torch)),
        c.place(torch.rand(batch, generator=c.torch)),
        c.random.choice((1.0, 0.5)),
        c.random.choice((1.0, 0.5)),
        *outs,
    ]


def compact(c: Case):
    batch, steps, page = c.size(0, 1, 3), c.size(1, 4), c.size(1, 3, 16)
    table, nodes = c.size(1, 8), c.size(4, 9)
    path = torch.sort(torch.rand(batch, nodes, generator=c.torch).argsort(-1)[:, :steps]).values
    return [
        c.place(path.to(c.int_type())),
        c.ints(0, steps, batch),
        c.ints(-1, max(0, table * page - nodes), batch),
        *_moved(c, batch, nodes, page, table),
    ]


def _moved(c: Case, batch: int, nodes: int, page: int, table: int):
    """A table, caches and rows."""
    pages = max(1, batch * table)
    tables = torch.randperm(pages, generator=c.torch)[: batch * table].view(batch, table)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    return [
        c.place(tables.to(c.int_type())),
        [
            c.floats(pages, page, *dims).to(c.random.choice(dtypes))
            for dims in c.random.choice(((), ((2, 8),), ((3,), (2, 4)), ((), (0,))))
        ],
        [
            c.floats(batch, nodes, *dims).to(c.random.choice(dtypes))
            for dims in c.random.choice(((), ((),), ((5,), ())))
        ],
    ]


def draft_sample(c: Case):
    batch, rows, vocab = c.size(0, 1, 3), c.size(0, 1, 4), c.size(1, 2, 33, 300)
    drafts, num_ids = c.random.randint(1, min(vocab, 5)), vocab + c.size(0, 7)
    ids = torch.randperm(num_ids, generator=c.torch)[:vocab]
    probs = c.random.choice((None, c.out(batch, rows, num_ids, dtype=torch.float32)))
    return [
        c.floats(batch, rows, vocab, dtype=c.float_type(), scale=3.0),
        c.random.choice((None, c.place(ids))),
        c.ints(-1, 100, batch),
        c.size(1, 7),
        c.random.choice((None, c.floats(batch).abs().mul_(c.size(0, 1)))),
        c.ints(-9, 9, batch, dtype=torch.int64),
        c.out(batch, rows, drafts, dtype=torch.int64),
        c.out(batch, rows, drafts, dtype=torch.float32),
        probs,
    ]


def moe_experts(c: Case):
    rows, hidden, dtype = c.size(0, 1, 3, 9), c.size(0, 1, 16, 33, 64), c.float_type()
    groups = c.size(1, 1, 2)
    experts = groups * c.size(0, 1, 2, 5)
    inner, shared = c.size(0, 1, 8, 33), c.size(0, 7, 32)
    int4 = c.random.random() < 0.3
    if int4:
        hidden, inner = c.size(32, 64, 192), c.size(0, 32, 64)
    best = c.size(1, groups)
    top_k = c.random.randint(0, experts // groups * best)
    with_shared = c.random.random() < 0.5
    shapes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
    if int4:
        weights = [c.ints(-(2**31), 2**31, *s[:2], s[2] // 8, dtype=torch.int32) for s in shapes]
        weights += [
            c.floats(*s[:2], s[2] // c.size(32, s[2] or 32), dtype=torch.bfloat16, scale=0.05)
            for s in shapes
        ]
    else:
        weights = [*(c.floats(*s, dtype=dtype, scale=0.2) for s in shapes), None, None]
    return [
        c.floats(rows, hidden, dtype=dtype),
        c.floats(experts, hidden, dtype=c.random.choice((torch.float32, dtype))),
        c.random.choice((None, c.floats(experts, scale=0.1))),
        *weights,
        c.floats(2 * shared, hidden, dtype=dtype, scale=0.2) if with_shared else None,
        c.floats(hidden, shared, dtype=dtype, scale=0.2) if with_shared else None,
        top_k,
        groups,
        best,
        2.5,
        c.random.random() < 0.5,
        c.out(rows, hidden, dtype=dtype),
    ]


def _rope_append(c: Case, mla: bool):
    batch, rows, page = c.size(0, 1, 3), c.size(0, 1, 3, 20), c.size(1, 3, 16)
    heads, kv_heads, k_dim = c.size(0, 1, 3), c.size(1, 2), c.size(1, 8, 17, 64)
    dtype = c.random.choice((torch.float32, torch.bfloat16, torch.float16))
    is_fp8 = c.random.random() < 0.4
    cached = torch.float8_e4m3fn if is_fp8 else dtype
    table = 40 // page + 3
    pages = max(1, batch * table)
    tables = torch.randperm(pages, generator=c.torch)[: batch * table].view(batch, table)
    slots = torch.rand(batch, rows + 2, generator=c.torch).argsort(-1)[:, :rows] - 1

    def maybe(t):
        return c.random.choice((None, t))

    def scale(count):
        return c.cache_scales(count) if is_fp8 else None

    places = [
        c.floats(60, c.random.randint(0, k_dim // 2) * 2),
        c.ints(-1, 6, batch, rows),
        maybe(c.place(slots.to(c.int_type()))),
        c.ints(-1, 20, batch),
        maybe(c.ints(0, 15, batch)),
        c.place(tables.to(c.int_type())),
    ]
    interleaved, q_shape = c.random.random() < 0.5, (batch, rows, heads, k_dim)
    if mla:
        rank = c.size(0, 1, 16, 33)
        return [
            c.floats(*q_shape, dtype=dtype),
            c.floats(batch, rows, rank, dtype=dtype),
            c.floats(batch, rows, k_dim, dtype=dtype),
            maybe(c.floats(rank, dtype=dtype)),
            1e-5,
            *places,
            scale(1),
            interleaved,
            c.out(*q_shape, dtype=dtype),
            c.floats(pages, page, rank + k_dim, dtype=cached),
        ]
    v_dim = c.size(0, 1, 24)
    return [
        c.floats(*q_shape, dtype=dtype),
        c.floats(batch, rows, kv_heads, k_dim, dtype=dtype),
        c.floats(batch, rows, kv_heads, v_dim, dtype=dtype),
        *places,
        scale(kv_heads),
        scale(kv_heads),
        interleaved,
        c.out(*q_shape, dtype=dtype),
        c.floats(pages, page, kv_heads, k_dim, dtype=cached),
        c.floats(pages, page, kv_heads, v_dim, dtype=cached),
    ]


def rope_append(c: Case):
    return _rope_append(c, mla=False)


def rope_append_mla(c: Case):
    return _rope_append(c, mla=True)


def _collective(c: Case, outs: int):
    dtype = c.random.choice((torch.float32, torch.bfloat16, torch.float16))
    data = [torch.randn(c.size(0, 1, 7, 64), generator=c.torch).to(dtype)]
    data += [torch.empty_like(data[0])] * outs
    return data


def pcie_all_gather(c: Case):
    return [*_collective(c, 1), torch.zeros(c.size(0, 8192), dtype=torch.uint8), 0, 1, 50]


def pcie_allreduce(c: Case):
    return [*pcie_all_gather(c), c.random.randrange(5)]


def pcie_allreduce_norm(c: Case):
    x, residual, weight, eps, out, capture, slot = hidden_capture(c)
    if x is None:
        x = torch.zeros(residual.shape, dtype=residual.dtype)
    group = (torch.zeros(c.size(0, 8192), dtype=torch.uint8), 0, 1, 50, c.random.randrange(5))
    return [x.contiguous(), residual, weight, eps, out, capture, slot, *group]


def pcie_broadcast(c: Case):
    return [*_collective(c, 0), 0, torch.zeros(c.size(0, 8192), dtype=torch.uint8), 0, 1, 50]


def pcie_barrier(c: Case):
    return [torch.zeros(c.size(0, 8192), dtype=torch.uint8), 0, 1, 50]


MAKERS = {name: globals()[name] for name in _library.SCHEMAS}


def outputs_of(op: str) -> list[int]:
    arguments = _library.arguments(op)
    return [
        i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    ]


def damage(c: Case, op: str, args: list) -> str:
    """Spoils one argument in place of what stands in ``args``; says how."""
    i = c.random.randrange(len(args))
    arg = args[i]
    if isinstance(arg, list):
        if not arg:
            return "nothing"
        j = c.random.randrange(len(arg))
        how, arg[j] = damage_tensor(c, arg[j], [t for t in args if isinstance(t, torch.Tensor)])
        return f"argument {i}[{j}]: {how}"
    if isinstance(arg, torch.Tensor):
        how, args[i] = damage_tensor(c, arg, [t for t in args if isinstance(t, torch.Tensor)])
        return f"argument {i}: {how}"
    if isinstance(arg, bool) or arg is None:
        return "nothing"
    args[i] = c.random.choice(EXTREMES if isinstance(arg, int) else FLOAT_EXTREMES)
    return f"argument {i}: {args[i]}"


def damage_tensor(c: Case, t: torch.Tensor, others: list[torch.Tensor]):
    kind = c.random.choice(
        (
            "values",
            "values",
            "values",
            "shape",
            "dtype",
            "stride",
            "expand",
            "huge",
            "alias",
            "meta",
        )
    )
    if t.device.type == "meta" or is_huge([t]):
        return "nothing", t
    others = [o for o in others if o.device.type != "meta"]
    dim = c.random.randrange(t.dim()) if t.dim() else 0
    has_extremes = t.dtype.is_floating_point or t.dtype in (*INTEGERS, torch.uint8)
    if kind == "values" and t.numel() and has_extremes:
        flat = t.reshape(-1).clone()
        count = c.random.choice((1, flat.numel()))
        places = torch.randint(0, flat.numel(), (count,), generator=c.torch)
        if t.dtype.is_floating_point:
            value = c.random.choice(FLOAT_EXTREMES)
        else:
            limits = torch.iinfo(t.dtype)
            value = min(max(c.random.choice(EXTREMES), limits.min), limits.max)
        flat[places] = value
        t = t.clone() if 0 in t.stride() else t
        t.copy_(flat.view(t.shape))
        return f"{count} values {value}", t
    if kind == "shape" and t.dim():
        how = c.random.choice(("cut", "zero", "unsqueeze", "flatten", "more"))
        if how == "cut" and t.shape[dim] > 1:
            return f"one less in dimension {dim}", t.narrow(dim, 0, t.shape[dim] - 1)
        if how == "zero":
            return f"none in dimension {dim}", t.narrow(dim, 0, 0)
        if how == "unsqueeze":
            return "one more dimension", t.unsqueeze(dim)
        if how == "flatten":
            return "flat", t.reshape(-1)
        shape = list(t.shape)
        shape[dim] += 1
        return f"one more in dimension {dim}", torch.zeros(shape, dtype=t.dtype)
    if kind == "dtype":
        types = (
            torch.float32,
            torch.bfloat16,
            torch.float64,
            torch.int32,
            torch.int64,
            torch.uint8,
        )
        dtype = c.random.choice((*types, torch.bool, torch.complex64))
        return f"as {dtype}", torch.zeros(t.shape, dtype=dtype)
    if kind == "stride" and t.dim() > 1:
        return "transposed storage", t.transpose(0, -1).clone().transpose(0, -1)
    if kind == "expand" and t.dim() and t.shape[dim]:
        return f"stride 0 in dimension {dim}", t.narrow(dim, 0, 1).expand(t.shape)
    if kind == "huge" and t.dim() and t.numel():
        shape = list(t.shape)
        shape[dim] = c.random.choice((2**31, 2**40, 2**62))
        try:
            return f"{shape[dim]} in dimension {dim}", t.narrow(dim, 0, 1).expand(shape)
        except RuntimeError:  # torch itself refuses: the number of elements overflows
            return "nothing", t
    if kind == "alias" and others:
        base = c.random.choice(others)
        store = base.untyped_storage()
        room = store.nbytes() // t.element_size()
        if t.numel() and t.device == base.device and room >= t.numel():
            view = torch.empty(0, dtype=t.dtype).set_(store)
            start = min(
                base.storage_offset() * base.element_size() // t.element_size(), room - t.numel()
            )
            start = max(0, start - c.random.choice((0, 0, 1)))
            return "in another's memory", view[start : start + t.numel()].view(t.shape)
    if kind == "meta":
        return "on meta", t.to("meta")
    return "nothing", t


def storages(args) -> dict[int, torch.Tensor]:
    """Whole storages by address, as bytes, of every CPU tensor in ``args``."""
    found = {}
    for a in args:
        for t in a if isinstance(a, list) else [a]:
            if isinstance(t, torch.Tensor) and t.device.type == "cpu":
                store = t.untyped_storage()
                found[store.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(store)
    return found


def twin(args):
    """The same call on copied storages, with every view and alias kept."""
    copies = {address: s.clone() for address, s in storages(args).items()}

    def copy(t):
        if not isinstance(t, torch.Tensor) or t.device.type != "cpu":
            return t
        store = copies[t.untyped_storage().data_ptr()]
        empty = torch.empty(0, dtype=t.dtype).set_(store.untyped_storage())
        return empty.as_strided(t.shape, t.stride(), t.storage_offset())

    return [[copy(t) for t in a] if isinstance(a, list) else copy(a) for a in args], copies


def tensors_of(args) -> list[torch.Tensor]:
    flat = [t for a in args for t in (a if isinstance(a, list) else [a])]
    return [t for t in flat if isinstance(t, torch.Tensor)]


def is_huge(args) -> bool:
    return any(t.numel() > 1 << 24 for t in tensors_of(args))


def masked(stores, args, outs):
    """Copies of ``stores`` with the bytes of the outputs zeroed: what nobody may have changed."""
    left = {address: s.clone() for address, s in stores.items()}
    for i in outs:
        for t in args[i] if isinstance(args[i], list) else [args[i]]:
            if isinstance(t, torch.Tensor) and t.device.type == "cpu":
                store = left[t.untyped_storage().data_ptr()]
                view = torch.empty(0, dtype=t.dtype).set_(store.untyped_storage())
                view.as_strided(t.shape, t.stride(), t.storage_offset()).zero_()
    return left


def call(function, args) -> str | None:
    """None when it went through; the message when it raised."""
    try:
        function(*args)
    except (RuntimeError, ValueError) as error:
        return str(error).split("\nException raised from", 1)[0] or repr(error)
    return None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    if a.dtype == torch.float8_e4m3fn:  # one step apart
        return torch.allclose(a.float(), b.float(), rtol=0.13, atol=2e-3, equal_nan=True)
    if a.dtype in (torch.bfloat16, torch.float16):
        return torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2, equal_nan=True)
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


def run_case(op: str, seed: int, namespace: str) -> tuple[str, str | None]:
    """Returns what the case was, and what is wrong with its outcome, if anything."""
    c = Case(seed)
    args = MAKERS[op](c)
    hows = [damage(c, op, args) for _ in range(c.random.choice((0, 1, 1, 1, 2, 3)))]
    what = "; ".join(hows) or "sound"
    function = getattr(getattr(torch.ops, namespace), op).default
    outs = outputs_of(op)
    huge = is_huge(args)
    if huge and namespace == TRITON:
        return what, None  # the interpreter would go through all of it
    if huge:
        message = call(function, args)
    else:
        reference_args, _ = twin(args)
        before = storages(args)
        kept = masked(before, args, outs)
        message = call(function, args)
        for address, store in masked(before, args, outs).items():
            if not torch.equal(store, kept[address]):
                return what, "memory beside the outputs changed"
    if message is not None:
        if MESSAGE.match(message) or is_torchs_own(message):
            return what, None
        return what, f"unclear error: {message}"
    on_meta = any(t.device.type == "meta" for t in tensors_of(args))
    if huge or on_meta or op.startswith("pcie") or "alias" in what or "another's memory" in what:
        return what, None
    on_gpu = namespace != _library.NAMESPACE
    if op == "compact" and on_gpu and not any(t.numel() for t in [*args[4], *args[5]]):
        return what, None  # nothing to move: nothing is launched that could find a fault
    expected = call(_library.REFERENCES[op], reference_args)
    if expected is not None:
        return what, f"the reference raises {expected!r}, the kernel does not"
    # When a sum overflows depends on its order, and so does what comes of an infinity, save where
    # the contract says it.
    overflows = any("e+38" in how for how in hows)
    if op in ("merge_states", "tree_attention", "tree_attention_mla") and overflows:
        return what, None
    if op in ("hidden_capture", "moe_experts") and (overflows or any("inf" in h for h in hows)):
        return what, None
    table = {"compact": "argument 3:", "tree_verify_compact": "argument 15:"}.get(op)
    if table and on_gpu and table in what:
        return what, None  # requests that share a page move its rows in any order
    if op == "draft_sample" and "argument 1:" in what:
        return what, None  # of ids that are not distinct any may be the one that is written
    for i in outs:
        mine = args[i] if isinstance(args[i], list) else [args[i]]
        theirs = reference_args[i] if isinstance(args[i], list) else [reference_args[i]]
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(a, torch.Tensor) and not same(a, b):
                return what, f"argument {i} differs from the reference"
    return what, None


def is_torchs_own(message: str) -> bool:
    """Dispatch refuses some calls before any kernel sees them."""
    return "incompatible function arguments" in message or "Expected a value of type" in message


def cuda_on_host():
    """The machine that runs the CUDA sources, and the namespace of its ops."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from cuda_on_host import host_build

    os.environ["SPEC_KERNELS_CHECK"] = "1"
    return host_build.load(), host_build.NAMESPACE


TRITON = "spec_kernels_triton"


@functools.cache
def in_triton() -> str:
    """The namespace of the ops that have a Triton kernel, behind the checks of the Python face."""
    os.environ["SPEC_KERNELS_CHECK"] = os.environ["TRITON_INTERPRET"] = "1"
    from spec_kernels.testing import interpreter

    interpreter.speed_up()
    library = _library.define_schemas(TRITON)
    for op, function in FACES.items():
        library.impl(op, function, "CPU")
    LIBRARIES.append(library)
    return TRITON


def _attention_face(op: str, *args) -> None:
    named = dict(zip((argument.name for argument in _library.arguments(op)), args, strict=True))
    part = [named.pop(name) for name in ("shard_index", "num_shards", "shard_run")]
    try:
        shard = ops.ContextShard(*part)
    except ValueError as error:
        raise ValueError(f"spec_kernels::{op}: {error}") from None
    getattr(ops, op)(**named, shard=shard, backend="triton")


def _face(op: str, *args) -> None:
    names = [argument.name for argument in _library.arguments(op)]
    getattr(ops, op)(**dict(zip(names, args, strict=True)), backend="triton")


FACES = {
    "tree_attention": functools.partial(_attention_face, "tree_attention"),
    "tree_attention_mla": functools.partial(_attention_face, "tree_attention_mla"),
    "hidden_capture": functools.partial(_face, "hidden_capture"),
    "merge_states": functools.partial(_face, "merge_states"),
    "moe_experts": functools.partial(_face, "moe_experts"),
    "rope_append": functools.partial(_face, "rope_append"),
    "rope_append_mla": functools.partial(_face, "rope_append_mla"),
}
LIBRARIES: list[torch.library.Library] = []


def has_kernel(op: str, namespace: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{op}", "CPU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of this process's own time")
    parser.add_argument("--seed", type=int, default=0, help="first case of each op")
    parser.add_argument("--op", choices=sorted(MAKERS), action="append")
    parser.add_argument("--case", type=int, help="this one case only")
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--cuda-on-host", action="store_true")
    gpu.add_argument("--triton", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--faults", type=int, default=20, help="stop after so many")
    options = parser.parse_args()
    torch.set_num_threads(2)
    names = options.op or sorted(MAKERS)
    namespace, machine = _library.NAMESPACE, None
    if options.cuda_on_host:
        machine, namespace = cuda_on_host()
        names = [name for name in names if has_kernel(name, namespace)]
    elif options.triton:
        namespace = in_triton()
        names = [name for name in names if name in FACES]
    elif not _library.LIBRARIES["cpu"].loaded:
        sys.exit(f"fuzz_ops: _C_cpu: {_library.LIBRARIES['cpu'].reason}")
    # The processor's time: what is tried must not depend on what else the machine does.
    deadline = time.process_time() + options.seconds
    seed, num_cases, faults = options.seed if options.case is None else options.case, 0, 0
    while time.process_time() < deadline and faults < options.faults:
        for op in names:
            if options.verbose:
                print(f"{op} --case {seed}", flush=True)
            # A case takes milliseconds; one that hangs is ended with its stack.
            faulthandler.dump_traceback_later(60, exit=True)
            try:
                if machine:
                    machine.configure(seed)
                what, wrong = run_case(op, seed, namespace)
            except Exception:
                what, wrong = "?", traceback.format_exc()
            num_cases += 1
            if wrong is not None:
                faults += 1
                print(f"FAULT --op {op} --case {seed}: {what}: {wrong}", flush=True)
        if options.case is not None:
            break
        seed += 1
    faulthandler.cancel_dump_traceback_later()
    print(f"fuzz_ops: {num_cases} calls, {faults} faults", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
