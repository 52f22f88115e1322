"""What only a GPU can tell: every kernel against its reference, then captured, counted and timed.

    python benchmarks/gpu_check.py [--out report] [--seconds 300] [--only WORD ...]

For one GPU. Every task runs in a worker process within its share of the time, so that one that
fails, hangs or breaks the device hides no other:

check OP KIND    calls at the shapes of decoding, against the reference, bytes around included
capture OP       a CUDA graph replayed on other values gives the bits of eager calls
capture buckets  the same of a GraphRunner's graphs, which share memory, replayed in turns
cycle DTYPE      the bundled model through every kind of captured cycle, requests coming and going,
                 against the same op by op, and against the CPU
check collectives N, capture collectives, missing rank
                 the same of N ranks that are streams of this device, and one that stays away
launches         kernels of a verify layer and of an accepted cycle, against what is promised
time WHAT        microseconds; bandwidth as a share of a copy measured in the same process; rivals
suites           ``pytest -m gpu``: the suites of ``tests/`` on the device, a process for each file

--only keeps the tasks that contain one of the words. --out writes report.json and report.md, again
after every task. Without a GPU nothing runs, and the report says so. Exit code 1 if a task failed,
or a kernel has no check here; not because an aim was missed or the time ran out, which the report
tells.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import bench_merge_states
import bench_moe_experts
import gpu_attention
import gpu_cycle
import torch
from gpu_attention import ATTENTION, PAGE, RIVALS

import spec_kernels
from spec_kernels import DraftTree, Verified, _library
from spec_kernels.decode.graph import GraphRunner, Plan, Recorder
from spec_kernels.testing import calls, collectives, on_device
from spec_kernels.testing.compare import assert_same_bits
from spec_kernels.testing.timing import machine

ROOT = Path(__file__).resolve().parent.parent
MARK = "gpu_check: "  # before the lines of a worker that are meant for its parent
START_SECONDS = 60  # for a worker to import and find the device
COPY_BYTES = 1 << 30
# Inputs that calls take turns at, larger than any L2 cache.
FLUSH_BYTES = 256 << 20
AIM_SHARE, AIM_CONTEXT = 0.85, 8192  # of a measured copy, from that context on
AIM_NODES = 1.1  # 16 nodes against one
LAYER_LAUNCHES = 3
MOE_LAUNCHES = 4
CYCLE_DTYPES = ("float32", "bfloat16")

Row = dict[str, object]
Measure = Callable[[Callable[[int], object]], float]


# ------------------------------------------------------------------------------- device and clock


def cuda_graph(function: Callable[[], object]) -> Callable[[], None]:
    """Records ``function``; what is returned replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # compiles, and allocates what is kept
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


def microseconds(function: Callable[[int], object], rounds: int = 7) -> float:
    """Device time of ``function(i)``: median over replays of a graph of many calls, which is free
    of launch costs. The graph holds a few milliseconds of them."""
    function(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    function(1)
    torch.cuda.synchronize()
    num_calls = max(4, min(200, int(5e-3 / (time.perf_counter() - start))))

    def all_calls():
        for i in range(num_calls):
            function(i)

    replay, samples = cuda_graph(all_calls), []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / num_calls)
    return sorted(samples[1:])[rounds // 2]


def copy_gbps(device: str, measure: Measure, num_bytes: int = COPY_BYTES) -> float:
    """Read plus written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / measure(lambda i: target.copy_(source)) / 1e3


def num_kernels(function: Callable[[], object]) -> list[str]:
    """Names of the kernels that one call launches."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    ]


# ----------------------------------------------------------------------------- checks and captures


def kinds(op: str) -> list[str]:
    """What of ``op`` is written for a GPU and can run here."""
    found = ["cuda"] if _library.has_kernel(op, "cuda") else []
    return found + (["triton"] if _library.why_no_triton(op) is None else [])


def check(op: str, kind: str) -> Row:
    on_device.load()
    passed = list(calls.check(op, on_device.backend_name(kind), full=True))
    return {"detail": f"{len(passed)} calls"}


def capture(op: str, device: str = "cuda", record=cuda_graph) -> Row:
    """The dispatcher's kernel, recorded once, on values that it was not recorded with."""
    num = 0
    pairs = zip(calls.CALLS[op](False, 0), calls.CALLS[op](False, 1), strict=True)
    for first, second in itertools.islice(pairs, 2):
        static = first.map(lambda t: t.to(device, copy=True))
        replay = record(lambda static=static: static.run(None))
        for call in (second, first):
            eager = call.map(lambda t: t.to(device, copy=True))
            for written in (False, True):
                pairs_of = zip(
                    static.tensors(written=written), eager.tensors(written=written), strict=True
                )
                for (_, target), (_, source) in pairs_of:
                    target.copy_(source)
            eager.run(None)
            replay()
            results = zip(static.tensors(written=True), eager.tensors(written=True), strict=True)
            for (name, got), (_, want) in results:
                try:
                    assert_same_bits(got, want)
                except AssertionError as error:
                    raise AssertionError(f"{op}, {first.name}: {name}: {error}") from None
            num += 1
    return {"detail": f"{num} replays"}


def capture_buckets(
    device: str = "cuda",
    buckets: Sequence[int] = (4, 16, 64),
    hidden: int = 1024,
    record: Recorder | None = None,
) -> Row:
    """Graphs of a ``GraphRunner``, replayed in turns over one pool, against eager calls."""
    weight, matrix = torch.ones(hidden, device=device), torch.eye(hidden, device=device).flip(0)

    def make(bucket: int) -> Plan:
        x, residual, out = (torch.zeros(bucket, hidden, device=device) for _ in range(3))
        captured = torch.full((bucket, 2, hidden), torch.nan, device=device)

        def run():
            normed = spec_kernels.hidden_capture(
                x, residual, weight, calls.EPS, capture=captured, slot=1
            )
            torch.mm(normed * 2, matrix, out=out)
            return out, captured[:, 1]

        return Plan(run, {"x": x, "residual": residual}, {"x": 0, "residual": 1})

    runner = GraphRunner(make, buckets, device=device, watch=(weight, matrix), record=record)
    runner.capture()
    eager = {bucket: make(bucket) for bucket in buckets}
    rows, order = torch.Generator().manual_seed(0), random.Random(0)
    for num_rows in order.choices(range(1, buckets[-1] + 1), k=30) + list(buckets):
        inputs = {
            name: torch.randn(num_rows, hidden, generator=rows).to(device)
            for name in ("x", "residual")
        }
        got = runner.run(num_rows, **inputs)
        plan = eager[runner.bucket_for(num_rows)]
        for name, buffer in plan.inputs.items():
            buffer.fill_(plan.padding[name])[:num_rows] = inputs[name]
        for a, b in zip(got, plan.run(), strict=True):
            assert_same_bits(a, b)
    return {"detail": f"{len(buckets)} graphs, {30 + len(buckets)} replays"}


# ------------------------------------------------------------------------------------- collectives

LOCAL_RANKS = (2, 4, 8)
MISSING_MS = 100
SIZES = (0, 1, 1000, 7168, 4 * 7168 + 3, 64 * 7168)
SHAPES = ((1, 7168), (4, 7168), (3, 1000))
MakeRanks = Callable[..., collectives.LocalRanks]


def check_collectives(
    num_ranks: int,
    make: MakeRanks = collectives.LocalRanks,
    sizes: Sequence[int] = SIZES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> Row:
    """Every algorithm, gather, broadcast and barrier, and the fused form against its two ops."""
    with make(num_ranks) as ranks:
        passed = list(collectives.check_sums(ranks, sizes))
        passed += [f"fused {name}" for name in collectives.check_fused(ranks, shapes)]
        passed += list(collectives.check_moves(ranks, (0, 3, 100_000)))
    return {"detail": ", ".join(passed)}


def capture_collectives(
    make: MakeRanks = collectives.LocalRanks,
    sizes: Sequence[int] = SIZES[2:5],
    num_replays: int = 20,
) -> Row:
    """Graphs of several sizes and algorithms, interleaved, on values that are new to them."""
    with make(4) as ranks:
        return {"detail": ", ".join(collectives.check_replays(ranks, sizes, num_replays))}


def missing_rank(make: MakeRanks = collectives.LocalRanks) -> Row:
    """With one of three ranks away, the others end within the time that they were given."""
    with make(3, timeout_ms=MISSING_MS) as ranks:
        return {"detail": collectives.check_missing_rank(ranks)}


# ---------------------------------------------------------------------------------------- launches


def _kimi_layer(device: str, context: int, num_nodes: int) -> Callable[[], object]:
    """Verify attention of one layer: the front, and attention over what it appended."""
    p = gpu_attention.make(
        "mla", 1, num_nodes, context, 8, 1, 576, 512, 16, torch.bfloat16, device=device
    )
    cache = p.caches[0][0].squeeze(2)
    latent, rope = p.q[..., :512], p.q[..., 512:].contiguous()
    angles = torch.arange(context + num_nodes, device=device)[:, None] * torch.logspace(
        0, -3, 32, device=device
    )
    table = torch.cat((angles.cos(), angles.sin()), 1)
    depths = torch.arange(num_nodes, device=device)[None]
    fresh = torch.zeros(1, num_nodes, 576, dtype=torch.bfloat16, device=device)

    def layer():
        turned = spec_kernels.rope_append_mla(
            rope, fresh[..., :512], fresh[..., 512:], cache, table, depths, p.lens, p.tables,
            interleaved=True, q_out=rope,
        )  # fmt: skip
        spec_kernels.tree_attention_mla(
            latent, turned, cache, p.tables, p.lens, p.ancestors, scale=p.scale, **p.outputs
        )

    return layer


def launches(device: str = "cuda", count=num_kernels) -> Row:
    """Against what is promised: three of a verify layer, four of experts, one of the rest."""
    functions = {}
    if kinds("tree_attention_mla") and kinds("rope_append_mla"):
        functions["verify layer, context 8192"] = (LAYER_LAUNCHES, _kimi_layer(device, 8192, 4))
        functions["verify layer, context 32"] = (LAYER_LAUNCHES - 1, _kimi_layer(device, 32, 4))
    if kinds("moe_experts"):
        call = next(calls.CALLS["moe_experts"](False)).map(lambda t: t.to(device))
        functions["moe_experts"] = (MOE_LAUNCHES, lambda call=call: call.run(None))
    for op in (
        "tree_build",
        "draft_sample",
        "tree_verify",
        "tree_verify_compact",
        "compact",
        "hidden_capture",
        "merge_states",
    ):
        if kinds(op):
            call = next(calls.CALLS[op](False)).map(lambda t: t.to(device))
            functions[op] = (1, lambda call=call: call.run(None))
    rows, failed = [], []
    for what, (promised, function) in functions.items():
        names = count(function)
        rows.append({"what": what, "kernels": len(names), "promised": promised, "names": names})
        if not names:
            failed.append(f"{what}: the profiler saw no kernel")
        if len(names) > promised:
            failed.append(f"{what}: {len(names)} kernels, {promised} promised")
    return {"rows": rows, "failed": "; ".join(failed)}


# ----------------------------------------------------------------------------------------- timings


def time_attention(
    device: str = "cuda",
    measure: Measure = microseconds,
    contexts: tuple[int, ...] = (AIM_CONTEXT, 1024, 65536),
    flush: int = FLUSH_BYTES,
) -> Iterator[Row]:
    copy = copy_gbps(device, measure, COPY_BYTES if flush else 1 << 16)
    for context in contexts:
        for shape in ATTENTION:
            one_node = None
            for num_nodes in (1, 4, 16, 64):
                p, traffic = gpu_attention.problem_of(shape, context, num_nodes, device, flush)
                torch.testing.assert_close(p.ours(), p.sdpa(), atol=2e-2, rtol=2e-2)
                us, rival = measure(p.ours), measure(p.sdpa)
                one_node = one_node or us
                share, times = traffic.cache / us / 1e3 / copy, us / one_node
                aims = {}
                if context >= AIM_CONTEXT:
                    aims[f"share >= {AIM_SHARE}"] = share >= AIM_SHARE
                if num_nodes == 16:
                    aims[f"1 node x {AIM_NODES}"] = times <= AIM_NODES
                yield {
                    "shape": shape,
                    "context": context,
                    "nodes": num_nodes,
                    "us": round(us, 2),
                    "sdpa us": round(rival, 2),
                    "times faster": round(rival / us, 2),
                    "cache GB/s": round(traffic.cache / us / 1e3, 1),
                    "share of copy": round(share, 3),
                    "of one node": round(times, 2),
                    "aim": ", ".join(f"{a}: {'met' if m else 'missed'}" for a, m in aims.items()),
                }


def time_rival(
    rival: str,
    device: str = "cuda",
    measure: Measure = microseconds,
    context: int = AIM_CONTEXT,
    flush: int = FLUSH_BYTES,
) -> Iterator[Row]:
    """A rival that takes long to build, or may be absent: whatever it raises is its own result."""
    if rival == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        yield {"rival": rival, "shape": "-", "us": "-", "rival us": "not installed", "ratio": "-"}
        return
    for shape in ATTENTION:
        p, _ = gpu_attention.problem_of(shape, context, 16, device, flush)
        us = measure(p.ours)
        try:
            function = RIVALS[rival](p)
            torch.testing.assert_close(p.ours(), function(0), atol=2e-2, rtol=2e-2)
            them = measure(function)
            result = (round(them, 2), round(them / us, 2))
        except Exception as error:  # noqa: BLE001 (not ours)
            reason = str(error).strip().split("\n")[0][:160]
            result = (f"failed: {type(error).__name__}: {reason}", "-")
        yield {
            "rival": rival,
            "shape": f"{shape}, context {context}, 16 nodes",
            "us": round(us, 2),
            "rival us": result[0],
            "ratio": result[1],
        }


def _torch_choices(logits, temperature=None, top_p=None):
    """The target's token at every node, as many a PyTorch sampler has it."""
    if temperature is None:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_p is None:
        return _drawn(logits.softmax(-1))[..., 0]
    ordered, ids = logits.sort(-1, descending=True)
    p = ordered.softmax(-1)
    return ids.gather(-1, _drawn(p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)))[..., 0]


def _drawn(p):
    """An exponential race: torch.multinomial may wait for the device, which a graph cannot."""
    return (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)


def _torch_accept(logits, tokens, parents, steps, rule):
    """The walk as gathers and comparisons that never wait for the device."""
    choices = _torch_choices(logits, **rule)
    node = torch.zeros_like(tokens[:, :1])
    alive, path = torch.ones_like(node, dtype=torch.bool), [node]
    for _ in range(steps):
        hit = (parents == node) & (tokens == choices.gather(1, node)) & alive
        alive = hit.any(1, keepdim=True)
        node = torch.where(alive, hit.int().argmax(1, keepdim=True), node)
        path.append(torch.where(alive, node, -1))
    path = torch.cat(path, 1)
    return path, choices.gather(1, path.clamp(min=0)), (path >= 0).sum(1) - 1


def _torch_compact(path, lens, tables, caches):
    front = lens[:, None] + torch.arange(path.shape[1], device=path.device)
    source = torch.where(path < 0, front, lens[:, None] + path)

    def slots(positions):
        return (tables.gather(1, positions // PAGE) * PAGE + positions % PAGE).flatten()

    source, target = slots(source), slots(front)
    for cache in caches:
        flat = cache.flatten(0, 1)
        flat.index_copy_(0, target, flat.index_select(0, source))


RULES = {"greedy": {}, "temperature": dict(temperature=1.0)}
RULES["top-p 0.9"] = dict(temperature=1.0, top_p=0.9)


def time_accept(
    device: str = "cuda",
    measure: Measure = microseconds,
    vocab: int = calls.VOCAB,
    num_layers: int = 61,
) -> Iterator[Row]:
    """The end of a cycle, logits in, caches in order: one launch, and two, against PyTorch's."""
    for num_nodes, width, num_agreed in ((4, 1, 2), (16, 2, 3), (64, 4, 3)):
        parents = [-1] + [(i - 1) // width for i in range(1, num_nodes)]
        yield from _time_accept(parents, num_agreed, device, measure, vocab, num_layers)


def _time_accept(parents, num_agreed, device, measure, vocab, num_layers) -> Iterator[Row]:
    logits, tree = calls.sampled_logits(vocab, parents, num_agreed, torch.bfloat16)
    # Every choice is certain, so that ours and theirs walk the same path.
    logits[0, logits[0].amax(-1) < 50, 0] = 70.0
    logits = logits.to(device)
    links = [t.to(device) for t in (tree.tokens, tree.first_child, tree.next_sibling)]
    parents = tree.parents.to(device)
    lens = torch.tensor([1000], device=device)
    tables = torch.randperm(80, generator=torch.Generator().manual_seed(0))[None].to(device)
    caches = [
        torch.randn(80, PAGE, 576, device=device).to(torch.bfloat16) for _ in range(num_layers)
    ]
    steps = int(tree.depths.max())
    out = Verified.allocate(1, steps, device)

    def accept(i, options):
        return spec_kernels.tree_verify(logits, *links, lens, out=out, **options)

    def move(i):
        spec_kernels.compact(out.accept_index, out.num_accepted, lens, tables, caches)

    def both(i, options):
        spec_kernels.tree_verify_compact(logits, *links, lens, tables, caches, out=out, **options)

    def theirs(i, rule):
        path, text, num = _torch_accept(logits, links[0], parents, steps, rule)
        _torch_compact(path, lens, tables, caches)
        return path, text, num

    for name, rule in RULES.items():
        options = {n: torch.tensor([v], device=device) for n, v in rule.items()}
        if rule:
            options["seeds"] = torch.tensor([5], device=device)
        got, (path, text, num) = accept(0, options), theirs(0, rule)
        emitted = int(num) + 1
        assert got.accept_index.tolist() == path.tolist(), (name, got.accept_index, path)
        assert got.tokens[0, :emitted].tolist() == text[0, :emitted].tolist(), name
        parts = measure(functools.partial(accept, options=options)), measure(move)
        at_once = measure(functools.partial(both, options=options))
        rival = measure(functools.partial(theirs, rule=rule))
        yield {
            "rule": name,
            "nodes": len(links[0][0]),
            "accepted": int(num),
            "accept us": round(parts[0], 2),
            f"compact {num_layers} caches us": round(parts[1], 2),
            "both in one launch us": round(at_once, 2),
            "torch us": round(rival, 2),
            "times faster": round(rival / min(at_once, sum(parts)), 2),
        }


def time_hidden_capture(
    device: str = "cuda", measure: Measure = microseconds, hidden: int = 7168
) -> Iterator[Row]:
    """Against three PyTorch ops, and as a share of the measured copy."""
    copy = copy_gbps(device, measure, COPY_BYTES if device == "cuda" else 1 << 16)
    for num_rows in (1, 4, 16, 64, 1024):
        row_bytes = num_rows * hidden * 2
        num_copies = max(2, min(512, FLUSH_BYTES // (5 * row_bytes))) if device == "cuda" else 2
        pool = torch.randn(num_copies, 2, num_rows, hidden, device=device).to(torch.bfloat16)
        weight = torch.rand(hidden, device=device).to(torch.bfloat16)
        capture = torch.empty(num_rows, 3, hidden, dtype=torch.bfloat16, device=device)
        out = torch.empty(num_rows, hidden, dtype=torch.bfloat16, device=device)

        def ours(i, pool=pool, weight=weight, capture=capture, out=out):
            x, residual = pool[i % len(pool)]
            spec_kernels.hidden_capture(
                x, residual, weight, calls.EPS, capture=capture, slot=1, out=out
            )

        def three_ops(i, pool=pool, weight=weight, capture=capture):
            x, residual = pool[i % len(pool)]
            residual.add_(x)
            capture[:, 1].copy_(residual)
            torch.nn.functional.rms_norm(residual, residual.shape[-1:], weight, calls.EPS)

        us, rival = measure(ours), measure(three_ops)
        # x and residual are read; residual, capture and out written; the weight is read once.
        gbps = (5 * row_bytes + 2 * hidden) / us / 1e3
        yield {
            "rows": num_rows,
            "us": round(us, 2),
            "three ops us": round(rival, 2),
            "times faster": round(rival / us, 2),
            "GB/s": round(gbps, 1),
            "share of copy": round(gbps / copy, 3),
        }


def time_moe(
    device: str = "cuda",
    measure: Measure = microseconds,
    num_experts: int = 384,
    hidden: int = 7168,
    inner: int = 256,
) -> Iterator[Row]:
    """One rank's experts of Kimi-K2.5 at TP 8, INT4 and bf16, against gathering those that were
    chosen, dequantised, for one batched product."""
    copy = copy_gbps(device, measure, COPY_BYTES if device == "cuda" else 1 << 16)
    top_k, num_inputs = 8, 16 if device == "cuda" else 2
    for kind in ("int4", "bf16"):
        weights = bench_moe_experts.make(
            hidden, inner, inner, num_experts, kind, torch.Generator(device).manual_seed(0)
        )
        for num_rows in (1, 4, 16, 64):
            # Every call chooses other experts, so that they come from memory.
            inputs = torch.randn(num_inputs, num_rows, hidden, device=device).bfloat16()
            out = torch.empty_like(inputs[0])

            def ours(i, inputs=inputs, weights=weights, out=out):
                x = inputs[i % num_inputs]
                return spec_kernels.moe_experts(x, **weights, top_k=top_k, out=out)

            def theirs(i, inputs=inputs, weights=weights):
                return bench_moe_experts.gathered(inputs[i % num_inputs], weights, top_k)

            traffic = [bench_moe_experts.traffic(x, weights, top_k) for x in inputs]
            num_bytes = sum(t.bytes for t in traffic) / num_inputs
            us, rival = measure(ours), "-"
            if num_rows <= 16:  # beyond, what is gathered is larger than a device
                torch.testing.assert_close(ours(0), theirs(0), atol=5e-2, rtol=5e-2)
                rival = measure(theirs)
            yield {
                "experts": kind,
                "rows": num_rows,
                "distinct experts": round(sum(t.num_experts for t in traffic) / num_inputs, 1),
                "us": round(us, 2),
                "gathered us": rival if rival == "-" else round(rival, 2),
                "times faster": rival if rival == "-" else round(rival / us, 2),
                "weights GB/s": round(num_bytes / us / 1e3, 1),
                "share of copy": round(num_bytes / us / 1e3 / copy, 3),
            }


def time_small(device: str = "cuda", measure: Measure = microseconds) -> Iterator[Row]:
    """The ops whose cost is mostly that of a launch; rivals where one expression says the same."""
    for batch, k, num_levels, num_nodes in ((1, 1, 3, 4), (1, 8, 5, 64), (8, 8, 5, 64)):
        pool = [t.to(device) for t in calls.draft_pool(batch, k, num_levels)]
        tree = DraftTree.allocate(batch, num_nodes, device)
        us = measure(lambda i, pool=pool, tree=tree: spec_kernels.tree_build(*pool, out=tree))
        rival = measure(lambda i, s=pool[0], n=num_nodes: s.topk(n - 1, dim=1).indices.sort(dim=1))
        what = f"tree_build, {batch} x {pool[0].shape[1]} to {num_nodes} nodes"
        yield {"what": what, "us": round(us, 2), "rival us": f"{rival:.2f}: topk and sort alone"}
    for num_rows, width, vocab in ((1, 1, 32000), (4, 4, 32000), (1, 1, 163840)):
        logits = torch.randn(1, num_rows, vocab, device=device).to(torch.bfloat16)
        lens = torch.tensor([100], device=device)
        tokens = torch.zeros(1, num_rows, width, dtype=torch.int64, device=device)
        draws = {
            "temperature": torch.tensor([0.8], device=device),
            "seeds": torch.tensor([5], device=device),
            "probs": torch.zeros(1, num_rows, vocab, device=device),
        }
        out = {"tokens": tokens, "confidence": tokens.float()}
        for rule, options in (("likeliest", {}), ("drawn", draws)):
            us = measure(
                lambda i, a=(logits, None, lens, 1), o=out | options: spec_kernels.draft_sample(
                    *a, **o
                )
            )
            rival = "-"
            if not options:
                rival = measure(lambda i, x=logits, k=width: x.topk(k, -1))
                rival = f"{rival:.2f}: topk alone"
            what = f"draft_sample, {num_rows} rows of {vocab}, {width} {rule} each"
            yield {"what": what, "us": round(us, 2), "rival us": rival}
    for parts, num_nodes, heads, dim in ((8, 1, 8, 512), (8, 16, 8, 512), (8, 64, 64, 512)):
        outs = torch.randn(parts, 1, num_nodes, heads, dim, device=device).to(torch.bfloat16)
        lses = torch.randn(parts, 1, num_nodes, heads, device=device)
        out = (torch.empty_like(outs[0]), torch.empty_like(lses[0]))
        us = measure(
            lambda i, a=(outs, lses), b=out: spec_kernels.merge_states(*a, out=b[0], lse=b[1])
        )
        rival = measure(lambda i, a=(outs, lses): bench_merge_states.plain(*a))
        what = f"merge_states, {parts} parts of {num_nodes} nodes, {heads} heads"
        yield {"what": what, "us": round(us, 2), "rival us": f"{rival:.2f}: four PyTorch ops"}
    for op in ("rope_append", "rope_append_mla"):
        call = next(calls.CALLS[op](device == "cuda")).map(lambda t: t.to(device))
        us = measure(lambda i, call=call: call.run(None))
        what = f"{op}, 2 x 16 nodes, {call.name}"
        yield {"what": what, "us": round(us, 2), "rival us": "-"}


def local_microseconds(replay_of: Callable[[int], collectives.Replay], times: int = 500) -> float:
    """Of a call: median over replays of a graph of ``times`` of them on each rank."""
    replay, samples = replay_of(times), []
    for _ in range(6):
        start = time.perf_counter()
        replay()
        samples.append((time.perf_counter() - start) * 1e6 / times)
    return sorted(samples[1:])[2]


def time_allreduce(
    make: MakeRanks = collectives.LocalRanks,
    measure: Callable[[Callable[[int], collectives.Replay]], float] = local_microseconds,
    rows: Sequence[int] = (1, 4, 16, 64),
    hidden: int = 7168,
    num_ranks: int = 8,
) -> Iterator[Row]:
    """What the protocol costs among ranks that share a device: no link takes part in it.

    Fused: one launch a rank against ``all_reduce`` and ``hidden_capture``. Host: how long a caller
    is held up by an eager call, on two ranks in turns.
    """
    with make(num_ranks, num_blocks=8) as ranks:
        for num in rows:
            f = collectives.Fused(ranks, num, hidden, torch.bfloat16)
            for algorithm in ranks.algorithms():
                one = functools.partial(
                    ranks.record, "all_reduce", f.x, f.sums, algorithm=algorithm
                )
                fused = functools.partial(
                    ranks.record, "all_reduce_norm", *f.fused, **f.options, algorithm=algorithm
                )

                def two_ops(rank, f=f, algorithm=algorithm):
                    ranks.groups[rank].all_reduce(f.x[rank], f.sums[rank], algorithm)
                    f.normalise(rank)

                us = measure(lambda times, record=one: record(times=times))
                at_once = measure(lambda times, record=fused: record(times=times))
                apart = measure(lambda times, function=two_ops: ranks.record_each(function, times))
                yield {
                    "what": f"{num_ranks} ranks on one device, {algorithm}",
                    "bytes": num * hidden * 2,
                    "us": round(us, 2),
                    "with norm and capture us": round(at_once, 2),
                    "as two ops us": round(apart, 2),
                    "times faster": round(apart / at_once, 2),
                }
    with make(2) as ranks:
        f = collectives.Fused(ranks, 1, hidden, torch.bfloat16)
        num_calls = 100
        ranks.call("all_reduce", f.x, f.sums)
        start = time.perf_counter()
        for _ in range(num_calls):
            for rank, group in enumerate(ranks.groups):
                with ranks.streams.on(rank):
                    group.all_reduce(f.x[rank], f.sums[rank])
        us = (time.perf_counter() - start) * 1e6 / (2 * num_calls)
        ranks.streams.synchronize()
        yield {"what": "host, an eager call", "bytes": hidden * 2, "us": round(us, 2)}


TIMINGS: dict[str, Callable[[], Iterator[Row]]] = {
    "cycle": gpu_cycle.time_cycles,
    "attention": time_attention,
    "accept and compact": time_accept,
    "hidden_capture": time_hidden_capture,
    "moe_experts": time_moe,
    "small ops": time_small,
    "allreduce": time_allreduce,
    "flex_attention": lambda: time_rival("flex_attention"),
    "flashinfer": lambda: time_rival("flashinfer"),
}


# ---------------------------------------------------------------------------------------- suites


def run_suite(path: Path, seconds: float) -> Row:
    """``pytest -m gpu`` on one file; what had passed when time ran out counts."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rf", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, "--color=no", str(path)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text, timed_out = process.communicate(timeout=seconds)[0], False
    except subprocess.TimeoutExpired:
        process.kill()
        text, timed_out = process.communicate()[0], True
    results = re.findall(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE)
    row: Row = {
        "file": path.relative_to(ROOT).as_posix(),
        **{word.lower(): results.count(word) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")},
        "note": "out of time" if timed_out else "",
    }
    # 5: no test there is for a GPU.
    if not timed_out and process.returncode not in (0, 1, 5):
        row["error"] = max(1, row["error"])
        row["note"] = f"pytest ended with {process.returncode}: {text.strip()[-300:]}"
    elif row["failed"] or row["error"]:
        row["note"] += " ".join(re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", text, re.M))[:600]
    return row


def suite_files() -> list[Path]:
    on_gpu = re.compile(
        r"^BACKENDS = .*(cuda_on_host|triton)|^(@|pytestmark = )pytest\.mark\.gpu", re.MULTILINE
    )
    return [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if on_gpu.search(p.read_text())]


def run_suites(seconds: float) -> Row:
    """Several files at a time: most of the time goes into compiling Triton's kernels."""
    end = time.monotonic() + seconds
    workers = max(1, min(6, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(workers) as pool:
        rows = list(
            pool.map(lambda p: run_suite(p, max(1.0, end - time.monotonic())), suite_files())
        )
    wrong = [f"{r['file']}: {r['note']}" for r in rows if r["failed"] or r["error"]]
    return {
        "rows": rows,
        "detail": f"{sum(r['passed'] for r in rows)} passed",
        "failed": "; ".join(wrong),
    }


# ---------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Task:
    name: str
    seconds: float


def all_tasks() -> list[Task]:
    """In the order of their weight; the suites take what is left."""
    tasks = []
    for op in _library.SCHEMAS:
        if op in calls.CALLS:
            tasks += [Task(f"check {op} {kind}", 45) for kind in kinds(op)]
    tasks += [Task(f"capture {op}", 25) for op in calls.CALLS if kinds(op)]
    tasks.append(Task("capture buckets", 25))
    # Most of it goes into compiling Triton's kernels for the shapes that occur.
    tasks += [Task(f"cycle {dtype}", 70) for dtype in CYCLE_DTYPES]
    if kinds("pcie_allreduce"):
        tasks += [Task(f"check collectives {num}", 30) for num in LOCAL_RANKS]
        tasks += [Task("capture collectives", 25), Task("missing rank", 25)]
    tasks.append(Task("launches", 25))
    long = ("attention", "cycle")
    tasks += [Task(f"time {name}", 60 if name in long else 40) for name in TIMINGS]
    return [*tasks, Task("suites", float("inf"))]


def perform(name: str, say: Callable[[Row], None]) -> Row:
    """Does one task; ``say`` takes rows as they come."""
    kind, _, rest = name.partition(" ")
    if name.startswith("check collectives "):
        return check_collectives(int(name.split()[-1]))
    if name == "capture buckets":
        return capture_buckets()
    if name == "capture collectives":
        return capture_collectives()
    if name == "missing rank":
        return missing_rank()
    if kind == "check":
        return check(*rest.split())
    if kind == "capture":
        return capture(rest)
    if kind == "launches":
        return launches()
    rows = gpu_cycle.check_cycles(rest) if kind == "cycle" else TIMINGS[rest]()
    wrong = []
    for row in rows:
        say(row)
        if row.get("result", "ok") != "ok":
            wrong.append(f"{', '.join(map(str, list(row.values())[:2]))}: {row['result']}")
    return {"failed": "; ".join(wrong)}


def worker(names: list[str]) -> None:
    """Does tasks one by one and prints what came of them, for ``run_tasks``."""

    def say(what: str, value: Row) -> None:
        print(MARK + json.dumps([what, value]), flush=True)

    torch.zeros(1, device="cuda")
    say("ready", {})
    for name in names:
        try:
            result = perform(name, lambda row: say("row", row))
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 (whatever it is, the others go on)
            result = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            say("done", {"failed": f"{result.get('failed', '')} (device lost: {error})"})
            return
        say("done", result)


def run_tasks(tasks: list[Task], command: list[str], end: float) -> Iterator[tuple[str, Row]]:
    """Yields each task and what came of it: ``result``, ``detail``, ``rows``, ``seconds``.

    Args:
        command: starts a worker, given the names of its tasks.
        end: on the monotonic clock.
    """
    waiting = list(tasks)
    while waiting:
        if time.monotonic() >= end:
            for task in waiting:
                yield task.name, _outcome("SKIPPED", "out of time", [], 0.0)
            return
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*command, *(task.name for task in waiting)],
                stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            )  # fmt: skip
            lines: queue.Queue[str | None] = queue.Queue()
            reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
            reader.start()
            try:
                start_end = min(time.monotonic() + START_SECONDS, end)
                if _next(lines, start_end) is not None:
                    while waiting:
                        name, outcome, alive = _one(waiting[0], lines, end, process, errors)
                        waiting.pop(0)
                        yield name, outcome
                        if not alive:
                            break
                    continue
                process.kill()
                process.wait()
                errors.seek(0)
                why = errors.read().strip()[-600:] or "no sign of life"
                for task in waiting:
                    yield task.name, _outcome("FAILED", f"no worker: {why}", [], 0.0)
                return
            finally:
                process.kill()
                process.wait()
                reader.join()


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        if line.startswith(MARK):
            lines.put(line[len(MARK) :])
    lines.put(None)


def _next(lines: queue.Queue, end: float) -> list | None:
    """What the worker said; None if it is gone or silent until ``end``."""
    try:
        line = lines.get(timeout=max(0.0, end - time.monotonic()))
    except queue.Empty:
        return None
    return None if line is None else json.loads(line)


def _one(task, lines, end, process, errors) -> tuple[str, Row, bool]:
    """The outcome of the task that the worker is at, and whether the worker can go on."""
    begin, rows = time.monotonic(), []
    limit = min(begin + task.seconds, end)
    while True:
        said = _next(lines, limit)
        took = time.monotonic() - begin
        if said is None and process.poll() is None and time.monotonic() >= limit:
            # Rows that came in time are results all the same.
            return (
                task.name,
                _outcome("SKIPPED", f"out of time after {took:.0f} s", rows, took),
                False,
            )
        if said is None:
            process.wait()
            errors.seek(0)
            why = f"worker ended with {process.returncode}: {errors.read().strip()[-600:]}"
            return task.name, _outcome("FAILED", why, rows, took), False
        what, value = said
        if what == "row":
            rows.append(value)
            continue
        failed = value.get("failed")
        detail = failed or str(value.get("detail", ""))
        outcome = _outcome(
            "FAILED" if failed else "passed", detail, rows + value.get("rows", []), took
        )
        return task.name, outcome, "device lost" not in detail


def _outcome(result: str, detail: str, rows: list[Row], seconds: float) -> Row:
    return {"result": result, "detail": detail, "rows": rows, "seconds": round(seconds, 1)}


def run(seconds: float, only: list[str], save: Callable[[dict], None]) -> dict:
    """The whole report as plain data; ``save`` gets it after every task."""
    begin = time.monotonic()
    report: dict = {
        "command": "python benchmarks/gpu_check.py",
        "machine": machine(),
        "ran": on_device.missing() is None,
        "gpu": None,
        "libraries": {state.name: state.reason for state in _library.LIBRARIES.values()},
        "ops": {},
        "tasks": {},
    }
    if not report["ran"]:
        report["why_not"] = on_device.missing()
        return report
    p = torch.cuda.get_device_properties(0)
    report["gpu"] = {"name": p.name, "sm": f"{p.major}{p.minor}", "cuda": torch.version.cuda}
    for op in _library.SCHEMAS:
        if not kinds(op):
            report["ops"][op] = {"result": "no kernel", "detail": "CUDA tensors run the reference"}
        elif op not in (*calls.CALLS, *collectives.OPS):
            report["ops"][op] = {"result": "UNCHECKED", "detail": "a kernel without a check here"}
        else:
            report["ops"][op] = {"result": "has a kernel", "detail": ", ".join(kinds(op))}
    tasks = [t for t in all_tasks() if not only or any(word in t.name for word in only)]
    end = begin + seconds
    in_worker = [task for task in tasks if task.name != "suites"]
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    for name, outcome in run_tasks(in_worker, command, end):
        report["tasks"][name] = outcome
        save(report)
    if len(in_worker) < len(tasks):
        start = time.monotonic()
        if end - start > 10:
            value = run_suites(end - start)
            result, detail = "FAILED" if value["failed"] else "passed", value["detail"]
            detail = "; ".join(filter(None, (detail, value["failed"])))
            outcome = _outcome(result, detail, value["rows"], time.monotonic() - start)
        else:
            outcome = _outcome("SKIPPED", "out of time", [], 0.0)
        report["tasks"]["suites"] = outcome
        save(report)
    report["seconds"] = round(time.monotonic() - begin, 1)
    return report


def table(rows: list[Row]) -> list[str]:
    """Markdown; every key of any row is a column."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["", f"| {' | '.join(keys)} |", "|" + " --- |" * len(keys)]

    def cell(value: object) -> str:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    return lines + [f"| {' | '.join(cell(row.get(k, '')) for k in keys)} |" for row in rows]


def render(report: dict) -> str:
    """The report as Markdown."""
    m = report["machine"]
    lines = [
        "# GPU check",
        "",
        f"{m['date']}, commit {m['commit']}, torch {m['torch']}, {m['cpu']}",
        "",
    ]
    if not report["ran"]:
        return "\n".join([*lines, f"Nothing ran: {report['why_not']}. No figure here is measured."])
    gpu = report["gpu"]
    lines += [f"{gpu['name']}, sm_{gpu['sm']}, CUDA {gpu['cuda']}", ""]
    lines += [", ".join(f"{name}: {state}" for name, state in report["libraries"].items())]
    tasks = report["tasks"]
    counts = {
        word: sum(t["result"] == word for t in tasks.values())
        for word in ("passed", "FAILED", "SKIPPED")
    }
    took = f" in {report['seconds']} s" if "seconds" in report else " so far"
    lines += ["", ", ".join(f"{num} {word}" for word, num in counts.items()) + took]
    lines += ["", "## Ops"]
    lines += table([{"op": op, **row} for op, row in report["ops"].items()])
    lines += ["", "## Tasks"]
    lines += table(
        [
            {"task": name, "result": t["result"], "s": t["seconds"], "detail": t["detail"]}
            for name, t in tasks.items()
        ]
    )
    for name, t in tasks.items():
        if t["rows"]:
            lines += ["", f"## {name[0].upper()}{name[1:]}", *table(t["rows"])]
    aims = (
        f"Aims of attention: {AIM_SHARE:.0%} of the copy from context {AIM_CONTEXT} on, and 16 "
        f"nodes at most {AIM_NODES} x one."
    )
    return "\n".join([*lines, "", aims])


def failed(report: dict) -> bool:
    results = [row["result"] for part in ("ops", "tasks") for row in report[part].values()]
    return any(result in ("FAILED", "UNCHECKED") for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks and times every kernel for a GPU.")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for everything")
    parser.add_argument("--only", nargs="+", default=[], help="tasks that contain one of the words")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return 0
    if args.out and not args.out.resolve().parent.is_dir():
        parser.error(f"--out: no directory {args.out.resolve().parent}")

    def save(report: dict) -> None:
        if args.out:
            args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(render(report) + "\n")

    report = run(args.seconds, args.only, save)
    save(report)
    print(render(report))
    return int(failed(report))


if __name__ == "__main__":
    sys.exit(main())
