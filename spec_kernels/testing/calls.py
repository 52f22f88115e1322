"""Sound calls of every op that has a kernel for a GPU, at the shapes of decoding, and their judge.

A ``Call`` holds the arguments of the raw op, outputs poisoned. The references say what is right:
integers and moved bytes must be theirs bit for bit, computed floats within a few roundings. The
suites in ``tests/ops`` are what proves a kernel; this is what a new machine is shown first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from spec_kernels import DraftTree, _library, link_tree
from spec_kernels.ops import common
from spec_kernels.testing import attention_cases
from spec_kernels.testing.compare import assert_same_bits, poisoned
from spec_kernels.testing.int4 import random_int4

FP8 = torch.float8_e4m3fn
EPS = 1e-5
VOCAB = 163840
# Floats that an op moves, or rounds once: right to the bit.
EXACT = {
    "compact": ("caches", "rows"),
    "draft_sample": ("confidence", "probs"),
    "hidden_capture": ("residual", "capture"),
    "tree_verify_compact": ("caches", "rows"),
}
# Roundings of the greatest value; fp32 sums are ordered differently by every backend.
ROUNDINGS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


@dataclasses.dataclass(frozen=True)
class Call:
    """``args`` as ``spec_kernels::<op>`` takes them."""

    op: str
    name: str
    args: tuple

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Every tensor replaced by what ``function`` makes of it."""

        def change(value):
            if isinstance(value, list):
                return [change(v) for v in value]
            return function(value) if isinstance(value, torch.Tensor) else value

        return dataclasses.replace(self, args=tuple(change(value) for value in self.args))

    def tensors(self, *, written: bool) -> list[tuple[str, torch.Tensor]]:
        """The tensors that the op writes, or those that it only reads, by argument."""
        found = []
        for argument, value in zip(_library.arguments(self.op), self.args, strict=True):
            if written is (argument.alias_info is not None and argument.alias_info.is_write):
                many = value if isinstance(value, list) else [value]
                found += [(argument.name, t) for t in many if isinstance(t, torch.Tensor)]
        return found

    def run(self, backend: str | None) -> None:
        """In place."""
        device = next(t.device for _, t in self.tensors(written=True))
        common.run(self.op, backend, device, self.args, _library.REFERENCES[self.op])

    def result(self, backend: str | None) -> Call:
        """The call after a run on copies."""
        done = self.map(torch.clone)
        done.run(backend)
        return done


def assert_alike(got: Call, want: Call) -> None:
    """Fails unless everything that ``got`` wrote is what ``want``, the reference's, is."""
    pairs = zip(got.tensors(written=True), want.tensors(written=True), strict=True)
    for (name, a), (_, b) in pairs:
        try:
            if not b.dtype.is_floating_point or name in EXACT.get(got.op, ()):
                assert_same_bits(a.cpu(), b.cpu())
            else:
                _assert_near(a.cpu(), b.cpu())
        except AssertionError as error:
            raise AssertionError(f"{got.op}, {got.name}: {name}: {error}") from None


def _assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    x, y = got.double(), want.double()
    if want.dtype == FP8:  # rounded from values a little apart: one step
        limit = 0.125 * y.abs() + 2.0**-9
    else:
        finite = y[y.isfinite()]
        grain = torch.finfo(want.dtype).eps * (finite.abs().max() if finite.numel() else 0.0)
        limit = torch.full_like(y, ROUNDINGS[want.dtype] * float(grain))
    wrong = ~((x == y) | (x.isnan() & y.isnan()) | ((x - y).abs() <= limit))
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} elements, e.g. {float(x[wrong][0])} "
        f"for {float(y[wrong][0])}"
    )


def check(op: str, backend: str, *, full: bool) -> Iterator[str]:
    """Runs the calls of ``op``; yields the name of each that was right."""
    for call in CALLS[op](full):
        assert_alike(call.result(backend), call.result("reference"))
        yield call.name


def draft_pool(batch: int, k: int, num_levels: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """A pool as EAGLE-2 drafts it: k children of the root, then k of each of the k best.

    Returns scores, candidates, parent slots, root tokens.
    """
    g = torch.Generator().manual_seed(seed)
    scores, slots, start, live = [], [], 0, None
    for level in range(num_levels):
        step = torch.rand(batch, 1 if level == 0 else k, k, generator=g).add(0.01).log()
        if level == 0:
            own, parent = step[:, 0], torch.full((batch, k), -1)
        else:
            own = (live.values[..., None] + step).flatten(1)
            parent = (live.indices + start).repeat_interleave(k, 1)
            start += scores[-1].shape[1]
        live = own.topk(k, dim=1)
        scores.append(own)
        slots.append(parent)
    scores, slots = torch.cat(scores, 1), torch.cat(slots, 1)
    candidates = torch.randint(0, VOCAB, scores.shape, generator=g)
    return scores, candidates, slots, torch.randint(0, VOCAB, (batch,), generator=g)


def _poison(t: torch.Tensor) -> torch.Tensor:
    return poisoned(*t.shape, dtype=t.dtype)


def _tree_build(full: bool, seed: int = 0) -> Iterator[Call]:
    shapes = [(1, 1, 3, 4), (2, 4, 3, 16)]
    shapes += [(8, 8, 5, 64), (2, 16, 8, 256), (1, 32, 6, 1024)] if full else []
    for batch, k, num_levels, num_nodes in shapes:
        for dtype in (torch.int32, torch.int64):
            scores, *rest = draft_pool(batch, k, num_levels, seed)
            scores[:, -1] = -torch.inf  # an absent candidate
            outputs = [_poison(t) for t in DraftTree.allocate(batch, num_nodes).tensors()]
            args = (scores, *(t.to(dtype) for t in rest), *outputs)
            name = f"B {batch}, pool {scores.shape[1]}, N {num_nodes}, {_short(dtype)}"
            yield Call("tree_build", name, args)


def _attention(form: str, full: bool, seed: int = 0) -> Iterator[Call]:
    op = "tree_attention" if form == "gqa" else "tree_attention_mla"
    sizes = dict(heads=4, kv_heads=2, k_dim=32, v_dim=32)
    if form == "mla":
        sizes = dict(heads=4, k_dim=40, v_dim=32)
    contexts = [((5, 70), 4, "chain"), ((0,), 33, "deep")]
    if full:
        sizes = dict(heads=32, kv_heads=8, k_dim=128, v_dim=128)
        if form == "mla":
            sizes = dict(heads=8, k_dim=576, v_dim=512)
        contexts = [((5, 1000), 4, "chain"), ((0, 8192, 700), 16, "bushy"), ((300,), 1024, "deep")]
        contexts += [((65536,), 4, "chain")]
    options = {
        "": {},
        "fp8 cache, ": dict(cache_dtype=FP8),
        "window, cap, sinks, ": dict(window=50, logit_cap=20.0, with_sinks=True),
    }
    for lengths, num_nodes, shape in contexts:
        for label, extra in options.items():
            for dtype in (torch.bfloat16, torch.float32):
                if dtype == torch.float32 and (extra or max(lengths) > 1000):
                    continue  # fp32 is shown plain and short: the reference takes seconds
                if not full and num_nodes > 32 and (extra or dtype == torch.float32):
                    continue  # a minute in Triton's interpreter
                problem = attention_cases.make(
                    form, dtype, contexts=lengths, num_nodes=num_nodes, shape=shape, seed=seed,
                    int_dtype=torch.int32, **sizes, **extra,
                )  # fmt: skip
                name = f"context {lengths}, N {num_nodes}, {label}{_short(dtype)}"
                yield Call(op, name, problem.args())


def _merge_states(full: bool, seed: int = 0) -> Iterator[Call]:
    for parts, rows, heads, dim in ((2, 4, 3, 33), (8, 64, 64, 512) if full else (8, 2, 2, 64)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            g = torch.Generator().manual_seed(seed)
            outs = torch.randn(parts, 2, rows, heads, dim, generator=g).to(dtype)
            lses = 5 * torch.randn(parts, 2, rows, heads, generator=g)
            empty = torch.rand(lses.shape, generator=g) < 0.2
            lses[empty], outs[empty] = -torch.inf, torch.nan
            lses[:, 0, 0], outs[:, 0, 0] = -torch.inf, torch.nan  # nothing at all
            name = f"{parts} parts of {[2, rows, heads, dim]}, {_short(dtype)}"
            yield Call("merge_states", name, (outs, lses, _poison(outs[0]), _poison(lses[0])))


def _draft_sample(full: bool, seed: int = 0) -> Iterator[Call]:
    shapes = [(301, 310, 2, 3), (40, 40, 1, 1)]
    shapes += [(32000, VOCAB, 4, 4), (VOCAB, VOCAB, 1, 1), (VOCAB, VOCAB, 10, 10)] if full else []
    for vocab, num_ids, num_rows, width in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for draws in (False, True):
                g = torch.Generator().manual_seed(seed)
                logits = torch.randn(4, num_rows, vocab, generator=g).mul(2.5).to(dtype)
                ids = torch.randperm(num_ids, generator=g)[:vocab]
                lens = torch.tensor([5, 1000, -1, 0])  # the third is padding
                warm = torch.tensor([0.8, 0.0, 1.0, 1.5])  # the second is greedy
                given = (warm, torch.arange(4) + seed) if draws else (None, None)
                tokens = poisoned(4, num_rows, width, dtype=torch.int64)
                probs = torch.zeros(4, num_rows, num_ids) if draws else None
                args = (logits, ids, lens, 2, *given, tokens, _poison(tokens.float()), probs)
                name = f"{width} of {vocab} ids x {num_rows}, {_short(dtype)}"
                yield Call("draft_sample", f"{name}{', drawn' if draws else ''}", args)


def sampled_logits(
    vocab: int, parents: list[int], num_agreed: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, DraftTree]:
    """``[1, N, V]`` and its tree; the target surely agrees with ``num_agreed`` drafts."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, len(parents), vocab, generator=g) * 2.5
    tokens = torch.randperm(vocab, generator=g)[: len(parents)]
    node = 0
    for _ in range(num_agreed):
        child = parents.index(node)
        logits[0, node, tokens[child]] = 60.0
        node = child
    return logits.to(dtype), link_tree(tokens[None], torch.tensor(parents))


def _tree_verify(full: bool, seed: int = 0) -> Iterator[Call]:
    vocab, num_nodes, batch = (VOCAB, 16, 4) if full else (301, 6, 2)
    parents = [-1] + [(i - 1) // 2 for i in range(1, num_nodes)]
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (batch, num_nodes, -(-vocab // 32)), generator=g)

    def each(value, dtype=torch.float32):
        return torch.full((batch,), value, dtype=dtype)

    hot = dict(temperature=each(0.9), seeds=torch.arange(batch) + seed)
    rules = {
        "greedy": {},
        "greedy, bias, mask": dict(
            logit_bias=torch.randn(batch, vocab, generator=g), allowed=words.to(torch.int32)
        ),
        "temperature": hot,
        "top-k": hot | dict(top_k=each(50, torch.int64)),
        "top-p": hot | dict(top_p=each(0.9)),
        "top-k, top-p, min-p": hot
        | dict(top_k=each(50, torch.int64), top_p=each(0.9), min_p=each(0.02)),
        "drafts from q": hot | dict(draft_probs=True),
        "drafts from q, top-p": hot | dict(draft_probs=True, top_p=each(0.9)),
        "typical": hot | dict(typical=(0.09, 0.3)),
    }
    for dtype in (torch.float32, torch.bfloat16):
        pieces = [
            sampled_logits(vocab, parents, b % 3, dtype, seed + 100 * b) for b in range(batch)
        ]
        logits = torch.cat([piece for piece, _ in pieces])
        links = [
            torch.cat([getattr(tree, name) for _, tree in pieces])
            for name in ("tokens", "first_child", "next_sibling")
        ]
        lens = torch.arange(batch) * 1000
        lens[-1] = -1  # padding
        for name, rule in rules.items():
            rule = dict(rule)
            if "draft_probs" in rule:
                rule["draft_probs"] = torch.randn(logits.shape, generator=g).mul(3).softmax(-1)
            factors = [
                rule.get(n)
                for n in (
                    "temperature", "top_k", "top_p", "min_p", "seeds", "logit_bias", "allowed",
                    "draft_probs",
                )
            ]  # fmt: skip
            steps = poisoned(batch, 6, dtype=torch.int32)
            outputs = (steps, steps[:, 0].clone(), steps.long(), steps[:, 0].clone())
            args = (logits, *links, lens, *factors, *rule.get("typical", (0.0, 0.0)), *outputs)
            yield Call("tree_verify", f"V {vocab}, {name}, {_short(dtype)}", args)


def _tree_verify_compact(full: bool, seed: int = 0) -> Iterator[Call]:
    """The calls of ``tree_verify`` over lengths that a small cache holds."""
    g = torch.Generator().manual_seed(seed)
    page, num_layers = 16, 64 if full else 3
    for call in _tree_verify(full, seed):
        logits, *links, lens = call.args[:5]
        rule, outputs = call.args[5:15], call.args[15:]
        batch, num_nodes = logits.shape[:2]
        lens = lens.clamp(max=3 * page + 1)
        columns = -(-(3 * page + 1 + num_nodes) // page)
        tables = torch.randperm(batch * columns, generator=g).view(batch, columns)
        shape = (batch * columns, page, 576 if full else 20)
        caches = [torch.randn(shape, generator=g).bfloat16() for _ in range(num_layers)]
        moved = caches, [torch.randn(batch, num_nodes, 3, 7, generator=g)]
        args = (logits, *links, lens, *rule, tables, *outputs, *moved)
        yield Call("tree_verify_compact", f"{call.name}, {num_layers} caches", args)


def _flat_walk(vocab: int, num_nodes: int, batch: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    parents = torch.tensor([-1] + [(i - 1) // 2 for i in range(1, num_nodes)])
    tree = link_tree(torch.randint(0, vocab, (batch, num_nodes), generator=g), parents)
    slots = torch.arange(batch * num_nodes).view(batch, num_nodes)
    # The target agrees with every node's first child.
    wanted = tree.tokens.gather(1, tree.first_child.long().clamp(min=0))
    outputs = (
        poisoned(batch * num_nodes, dtype=torch.int32),
        poisoned(batch, 5, dtype=torch.int32),
        *(poisoned(batch, dtype=torch.int32) for _ in range(2)),
    )
    return g, (tree.tokens, tree.first_child, tree.next_sibling, slots), wanted, outputs


def _tree_verify_choices(full: bool, seed: int = 0) -> Iterator[Call]:
    for batch, num_nodes in ((1, 4), (3, 16), (64, 64) if full else (2, 33)):
        _, tree, wanted, outputs = _flat_walk(50, num_nodes, batch, seed)
        args = (*tree, wanted.flatten(), *outputs)
        yield Call("tree_verify_choices", f"B {batch}, N {num_nodes}", args)


def _tree_verify_coins(full: bool, seed: int = 0) -> Iterator[Call]:
    vocab = VOCAB if full else 301
    for batch, num_nodes in ((1, 4), (3, 16)):
        for with_drafts in (False, True):
            g, tree, wanted, outputs = _flat_walk(vocab, num_nodes, batch, seed)
            target = torch.randn(batch, num_nodes, vocab, generator=g).mul(3).softmax(-1)
            target = target.scatter_add(2, wanted[..., None], torch.full_like(target[..., :1], 0.7))
            target = target / target.sum(-1, keepdim=True)
            drafts = torch.randn(target.shape, generator=g).softmax(-1) if with_drafts else None
            coins = torch.rand(batch, num_nodes, generator=g)
            given = (target, drafts, coins, torch.rand(batch, generator=g), 1.0, 1.0)
            name = f"B {batch}, N {num_nodes}, V {vocab}{', drafts' if with_drafts else ''}"
            yield Call("tree_verify_coins", name, (*tree, *given, *outputs))


def _compact(full: bool, seed: int = 0) -> Iterator[Call]:
    shapes = [(3, 20, 1), (2, 33, 5)]
    shapes += [(61, 576, 16), (64, 1024, 16)] if full else []
    for num_layers, width, page in shapes:
        g = torch.Generator().manual_seed(seed)
        context, num_nodes = 3 * page + 1, 9
        columns = -(-(context + num_nodes) // page)
        num_pages = 3 * columns + 2
        caches = [
            torch.randn(num_pages, page, width, generator=g).to(torch.bfloat16)
            for _ in range(num_layers)
        ]
        rows = [torch.randn(3, num_nodes, 7, generator=g), torch.arange(27).view(3, num_nodes)]
        paths = torch.tensor([[0, 3, 4, 8], [0, 1, 5, -1], [0, 1, 2, 3]])
        tables = torch.randperm(num_pages, generator=g)[: 3 * columns].view(3, columns)
        lens = torch.tensor([context, 0, -1])  # the last is padding
        args = (paths, torch.tensor([3, 2, 3]), lens, tables, caches, rows)
        yield Call("compact", f"{num_layers} caches of {width}, page {page}", args)


def _hidden_capture(full: bool, seed: int = 0) -> Iterator[Call]:
    shapes = [(1, 1), (3, 255), (0, 64), (2, 1024)]
    shapes += [(4, 7168), (64, 7168), (2, 16384)] if full else []
    for num_rows, hidden in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for with_x in (True, False):
                g = torch.Generator().manual_seed(seed)
                x, residual = torch.randn(2, num_rows, hidden, generator=g).to(dtype)
                weight = torch.rand(hidden, generator=g).to(dtype)
                capture = poisoned(num_rows + 2, 3, hidden, dtype=dtype)
                out = poisoned(num_rows, hidden, dtype=dtype)
                args = (x if with_x else None, residual, weight, EPS, out, capture, 1)
                name = f"[{num_rows}, {hidden}] {_short(dtype)}{'' if with_x else ' without x'}"
                yield Call("hidden_capture", name, args)


def _rope_append(mla: bool, full: bool, seed: int = 0) -> Iterator[Call]:
    op = "rope_append_mla" if mla else "rope_append"
    heads, kv_heads, dim, rank = (32, 8, 128, 512) if full else (3, 3, 8, 33)
    if mla and full:
        heads, dim = 8, 64
    batch, num_nodes, page, columns = 2, 16 if full else 4, 16, 4
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for stored in (dtype, FP8):
            for interleaved in (False, True):
                g = torch.Generator().manual_seed(seed)

                def randn(*shape, g=g, dtype=dtype):
                    return torch.randn(batch, num_nodes, *shape, generator=g).to(dtype)

                angles = torch.arange(200)[:, None] * 10.0 ** -torch.linspace(0, 3, dim // 2)
                depths = torch.randint(-1, 4, (batch, num_nodes), generator=g)
                slots = torch.arange(num_nodes).repeat(batch, 1)
                slots[:, 2] = -1
                tables = torch.randperm(10, generator=g)[: batch * columns].view(batch, columns)
                where = (
                    torch.cat((angles.cos(), angles.sin()), 1), depths, slots,
                    torch.tensor([7, 20]), None, tables,
                )  # fmt: skip
                q = randn(heads, dim)

                def scale(num, g=g, stored=stored):
                    return 0.02 + 0.02 * torch.rand(num, generator=g) if stored == FP8 else None

                def cache(*width, stored=stored):
                    return poisoned(10, page, *width, dtype=torch.float32).to(stored)

                if mla:
                    weight = 1 + 0.2 * torch.randn(rank, generator=g)
                    args = (q, randn(rank), randn(dim), weight.to(dtype), EPS, *where, scale(1))
                    args += (interleaved, _poison(q), cache(rank + dim))
                else:
                    args = (q, randn(kv_heads, dim), randn(kv_heads, dim), *where)
                    args += (scale(kv_heads), scale(kv_heads), interleaved, _poison(q))
                    args += (cache(kv_heads, dim), cache(kv_heads, dim))
                form = "interleaved" if interleaved else "half-split"
                yield Call(op, f"{form}, {_short(dtype)} into {_short(stored)}", args)


def _moe_experts(full: bool, seed: int = 0) -> Iterator[Call]:
    # Rows, hidden, I, Is, experts, top-k, groups: a chain of Kimi-K2.5 on one of eight ranks, then
    # more pairs than experts.
    shapes = [(2, 64, 32, 12, 6, 2, (1, 1)), (9, 96, 32, 40, 4, 2, (2, 1))]
    if full:
        shapes += [(4, 7168, 256, 256, 48, 8, (1, 1)), (70, 2048, 96, 192, 16, 4, (4, 2))]
    for num_rows, hidden, inner, shared, num_experts, top_k, groups in shapes:
        matrices = ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
        for kind in ("int4", "bfloat16", "float32"):
            dtype = torch.float32 if kind == "float32" else torch.bfloat16
            g = torch.Generator().manual_seed(seed)

            def weight(*shape, g=g, dtype=dtype):
                return (torch.randn(*shape, generator=g) / shape[-1] ** 0.5).to(dtype)

            if kind == "int4":
                pairs = [random_int4(*shape, generator=g) for shape in matrices]
                experts = [*(words for words, _ in pairs), *(scale for _, scale in pairs)]
            else:
                experts = [*(weight(*shape) for shape in matrices), None, None]
            x = torch.randn(num_rows, hidden, generator=g).to(dtype)
            args = (
                x, weight(num_experts, hidden), torch.randn(num_experts, generator=g) * 0.1,
                *experts, weight(2 * shared, hidden), weight(hidden, shared), top_k, *groups,
                2.5, True, _poison(x),
            )  # fmt: skip
            name = f"T {num_rows}, {num_experts} experts of [{hidden}, {inner}], {kind}"
            yield Call("moe_experts", name, args)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Of each op, its calls: ``full`` ones for a device, else small enough for emulation. Calls of two
# seeds differ in their values alone.
CALLS: dict[str, Callable[..., Iterator[Call]]] = {
    "tree_build": _tree_build,
    "draft_sample": _draft_sample,
    "tree_attention": lambda full, seed=0: _attention("gqa", full, seed),
    "tree_attention_mla": lambda full, seed=0: _attention("mla", full, seed),
    "merge_states": _merge_states,
    "tree_verify": _tree_verify,
    "tree_verify_compact": _tree_verify_compact,
    "tree_verify_choices": _tree_verify_choices,
    "tree_verify_coins": _tree_verify_coins,
    "compact": _compact,
    "hidden_capture": _hidden_capture,
    "moe_experts": _moe_experts,
    "rope_append": lambda full, seed=0: _rope_append(False, full, seed),
    "rope_append_mla": lambda full, seed=0: _rope_append(True, full, seed),
}
