"""The decode cycle as a graph: the same tokens as without, and what a cycle costs: for
``gpu_check.py``.

``check_cycles`` serves the bundled model through every kind of cycle while requests join and leave,
with graphs and without. ``time_cycles`` takes one rank's part of a large target, with random
weights, and times a cycle with and without a graph; what it decodes means nothing, what it reads
is what that rank reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files

import bundled
import torch

from spec_kernels.comm import Communicator
from spec_kernels.decode.batch import Batch
from spec_kernels.decode.captured import Kind
from spec_kernels.decode.cycle import PHASES, Cycle, PlainCycle
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.graph import Recorder, eagerly
from spec_kernels.decode.kv_cache import INERT
from spec_kernels.models.config import DrafterConfig, TargetConfig
from spec_kernels.models.drafter import Drafter
from spec_kernels.models.pair import load_pair
from spec_kernels.models.target import Target
from spec_kernels.testing import graph_safe
from spec_kernels.testing.random_weights import RandomWeights
from spec_kernels.testing.serving import Served, requests, serve

Row = dict[str, object]
Models = tuple[Target, Drafter]
# Kernels that one call ran: name, begin and end in microseconds.
Spans = list[tuple[str, float, float]]

BATCHES = (4, 1, 16)
NUM_PROMPTS = 12


# --------------------------------------------------------------------------------------- checks


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of cycle, by what brings it about: a plan, and requests as ``requests`` makes them."""

    plan: DraftPlan
    samples: bool = False
    plain_every: int = 0


# A request without drafts beside one with some has its nodes evicted.
CASES = {
    "plain": Case(DraftPlan(), plain_every=1),
    "chain": Case(DraftPlan("chain", 3)),
    "static": Case(DraftPlan("static", 3, 3, 10), samples=True),
    "dynamic": Case(DraftPlan("dynamic", 3, 4, 16), samples=True),
    "drawn": Case(DraftPlan("static", 3, 3, 10, sampled=True), samples=True),
    "evicting": Case(DraftPlan("chain", 3), plain_every=3),
}
# Logits that are no further apart may come in another order where they are summed in another.
NEAR_TIE = 1e-3


def bundled_models(device: str, dtype: torch.dtype) -> Models:
    """The trained models of the package."""
    return load_pair(dtype=dtype, device=device)


def check_cycles(
    dtype: str,
    device: str = "cuda",
    *,
    models: Callable[[str, torch.dtype], Models] = bundled_models,
    prompts: Sequence[Sequence[int]] | None = None,
    record: Recorder | None = None,
    batches: Sequence[int] = BATCHES,
    cases: Mapping[str, Case] = CASES,
    num_new: int = 24,
) -> Iterator[Row]:
    """Every kind of cycle, replayed and run op by op, token for token; in float32, greedy requests
    against the CPU's plain decoding too.

    Rows whose ``result`` is not ``ok`` say what differs. ``record`` is how the graphs are recorded
    where the device has none.
    """
    kind = getattr(torch, dtype)
    prompts = prompts or bundled.held_out(NUM_PROMPTS)
    oracle = None
    if kind == torch.float32:
        oracle = _Oracle(models("cpu", kind), prompts, _num_requests(max(batches)), num_new)
    target, drafter = models(device, kind)
    longest = max(map(len, prompts)) + num_new
    # All kinds at one size first, should the time run out.
    for size in batches:
        for name, case in cases.items():
            made = requests(
                prompts,
                _num_requests(size),
                num_new,
                samples=case.samples,
                plain_every=case.plain_every,
            )
            aborts = {1: num_new // 3}
            row: Row = {"cycles": name, "requests at a time": size, "requests": len(made)}
            try:
                ways = []
                for recorder in (record, eagerly):
                    options = dict(max_tokens=longest, max_requests=size, record=recorder)
                    batch = Batch(target, drafter, case.plan, **options)
                    ways.append((serve(batch, made, aborts), batch))
                found, wrong = _compare(*ways)
                row |= found
                greedy = [i for i, r in enumerate(made) if r.sampling.temperature == 0]
                if oracle is not None:
                    row["CPU's tokens"], others = oracle.compare(ways[0][0], greedy)
                    wrong += others
                row["result"] = "; ".join(wrong)[:600] or "ok"
            except Exception as error:  # noqa: BLE001 (whatever it is, the others go on)
                row["result"] = f"{type(error).__name__}: {error}"[:600]
            yield row


def _num_requests(size: int) -> int:
    """So many that some join when others have left."""
    return size + size // 2 + 2


def _compare(graphs: tuple[Served, Batch], eager: tuple[Served, Batch]) -> tuple[Row, list[str]]:
    """What was run, and what is wrong with it."""
    (got, batch), (want, other) = graphs, eager
    wrong = [
        f"request {i}: {a}, {x} against {b}, {y} op by op"
        for i, (a, b, x, y) in enumerate(
            zip(got.tokens, want.tokens, got.accepted, want.accepted, strict=True)
        )
        if (a, x) != (b, y)
    ]
    caches = [(batch.cache.target, other.cache.target), (batch.cache.draft, other.cache.draft)]
    same_bits = all(torch.equal(a, b) for a, b in caches)
    num_accepted = [n for text in got.accepted for n in text]
    row = {
        "cycles run": len(got.sizes),
        "sizes": f"{min(got.sizes)} to {max(got.sizes)}",
        "tokens a cycle": round(1 + sum(num_accepted) / max(1, len(num_accepted)), 2),
        "caches": "same bits" if same_bits else "other bits",
    }
    return row, wrong


class _Oracle:
    """Greedy texts of the CPU, decoded one token a cycle."""

    def __init__(self, models: Models, prompts, count: int, num_new: int):
        target, _ = models
        self.made = requests(prompts, count, num_new, plain_every=1)
        most = max(map(len, prompts)) + num_new
        self.batch = Batch(target, max_tokens=most, max_requests=min(count, 16))
        self.texts = serve(self.batch, self.made).tokens

    def compare(self, served: Served, greedy: Sequence[int]) -> tuple[str, list[str]]:
        """How many of the texts are the same, and what is wrong with the others."""
        wrong, num_ties = [], 0
        for i in greedy:
            got, want = served.tokens[i], self.texts[i]
            at = next((k for k, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
            if at is None:
                continue
            logits = self.batch.logits_after([*self.made[i].prompt, *want[:at]])
            gap = float(logits[want[at]] - logits[got[at]])
            num_ties += gap < NEAR_TIE
            if gap >= NEAR_TIE:
                wrong.append(f"request {i}, token {at}: {got[at]}, the CPU's {want[at]}")
        ties = f", {num_ties} after a near tie" if num_ties else ""
        return f"{len(greedy) - len(wrong)} of {len(greedy)} texts{ties}", wrong


# -------------------------------------------------------------------------------------- a rank


@dataclasses.dataclass(frozen=True)
class RankShape:
    """One rank's part of a target and its drafter, as models of their own."""

    target: TargetConfig
    drafter: DrafterConfig
    int4_group: int | None

    def models(self, device: str, dtype: torch.dtype) -> Models:
        """With random weights, made on the device."""
        layers = self.drafter.captured_layers(self.target.num_hidden_layers)
        comm = Communicator.single()
        weights = RandomWeights(device, 0, self.int4_group)
        target = Target(self.target, weights, comm, dtype, layers)
        num_layers = self.target.num_hidden_layers
        rest = (target.embedding, num_layers, comm, dtype)
        return target, Drafter(self.drafter, RandomWeights(device, 1), *rest)


def kimi_rank(num_ranks: int = 8, num_layers: int = 4) -> RankShape:
    """Kimi-K2.5 and its public drafter over ``num_ranks``, cut down to ``num_layers`` MoE layers.

    Heads, intermediates and vocabulary are a rank's; experts are packed INT4. No sum over ranks.
    """
    text = files("spec_kernels.planning").joinpath("data", "kimi-k2.5.json").read_text("utf-8")
    shapes = json.loads(text)
    split = (
        "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
        "vocab_size", "draft_vocab_size",
    )  # fmt: skip

    def part(values: Mapping[str, object]) -> dict[str, object]:
        return {k: v // num_ranks if k in split else v for k, v in values.items()}

    target = part(shapes["target"])
    target |= {"num_hidden_layers": num_layers, "first_k_dense_replace": 0}
    aux = {"eagle_aux_hidden_state_layer_ids": [1, num_layers // 2, num_layers - 1]}
    drafter = part(shapes["drafter"]) | {"eagle_config": aux | {"layer_ids_mean": "input"}}
    return RankShape(
        TargetConfig.from_dict(target), DrafterConfig.from_dict(drafter), shapes["expert_group"]
    )


# ------------------------------------------------------------------------------------- timings

TIMED = {
    "chain of 3": DraftPlan("chain", 3),
    "plain": None,
    "tree of 16": DraftPlan("dynamic", 4, 4, 16),
}
NUM_CYCLES = 10


def kernel_spans(function: Callable[[], object]) -> Spans:
    """What one call runs on the device, copies and fills included, from CUPTI; empty without it."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sorted(
        (
            (event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ),
        key=lambda span: span[1],
    )


def gaps(spans: Spans) -> tuple[float, float]:
    """Microseconds in which something ran, and in which nothing did, from first to last."""
    busy, end = 0.0, spans[0][1]
    for _, start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, end - spans[0][1] - busy


def _stamp(device: torch.device) -> float | torch.cuda.Event:
    """Now, in the order of what was launched."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _microseconds(begin, end) -> float:
    if isinstance(begin, float):
        return 1e6 * (end - begin)
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


class PhaseStamps:
    """Takes the place of a cycle's clock, and of a device's time."""

    def __init__(self, device: torch.device):
        self.device, self.phases = device, []

    def start(self) -> None:
        self.phases = [("", _stamp(self.device))]

    def mark(self, phase: str) -> None:
        self.phases.append((phase, _stamp(self.device)))

    def microseconds(self) -> dict[str, float]:
        pairs = zip(self.phases, self.phases[1:], strict=False)
        return {phase: _microseconds(a, b) for (_, a), (phase, b) in pairs}


class Rank:
    """A batch over one rank's models, whose requests stand at ``context`` tokens."""

    def __init__(self, models: Models, plan: DraftPlan | None, most: int, context: int, record):
        target, drafter = models
        self.device, self.context = target.device, context
        room = (NUM_CYCLES + 2) * ((plan.steps if plan else 0) + 1)
        self.batch = Batch(
            target,
            drafter if plan else None,
            plan,
            max_tokens=context + room,
            max_requests=most,
            record=record,
        )
        self.kind = Kind(plan.num_nodes if plan else 0)
        cache = self.batch.cache
        for row in range(most):
            cache.reserve(row, cache.capacity)

    def begin(self, num_requests: int) -> None:
        """Requests that differ, so that they come to different experts, and never end."""
        state, cache = self.batch.state, self.batch.cache
        random = torch.Generator(self.device).manual_seed(0)
        state.limits.fill_(torch.iinfo(torch.int64).max)
        cache.context_lens.fill_(INERT)[:num_requests].fill_(self.context)
        start = state.start
        start.root_tokens.random_(0, state.vocab_size, generator=random)
        for values in (start.features, start.logits):
            values.normal_(generator=random)

    def cycle(self, num_requests: int) -> Cycle | PlainCycle:
        return self.batch.cycles.cycle(self.kind, num_requests)

    def time(self, num_requests: int, run: Callable[[], object], rounds: int = 5) -> float:
        """Microseconds of a cycle on the device: the least of some rounds of several in a row."""
        times = []
        for _ in range(rounds):
            self.begin(num_requests)
            begin = _stamp(self.device)
            for _ in range(NUM_CYCLES):
                run()
            times.append(_microseconds(begin, _stamp(self.device)) / NUM_CYCLES)
        return min(times)

    def host_time(self, num_requests: int, run: Callable[[], object]) -> float:
        """Microseconds from the call to its return, with nothing under way: the median."""
        self.begin(num_requests)
        times = []
        for _ in range(NUM_CYCLES):
            self._wait()
            begin = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - begin))
        self._wait()
        return sorted(times)[NUM_CYCLES // 2]

    def phases(self, num_requests: int) -> dict[str, float]:
        """Microseconds of each phase, run op by op: the least of some cycles."""
        self.begin(num_requests)
        cycle, stamps = self.cycle(num_requests), PhaseStamps(self.device)
        clock, cycle.clock, found = cycle.clock, stamps, []
        try:
            for _ in range(NUM_CYCLES):
                cycle.run()
                found.append(stamps.microseconds())
        finally:
            cycle.clock = clock
        return {phase: min(f[phase] for f in found) for phase in found[0]}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _without_last_layer(target: Target) -> Iterator[None]:
    layers = target.layers
    target.layers = layers[:-1]
    try:
        yield
    finally:
        target.layers = layers


def time_cycles(
    device: str = "cuda",
    *,
    shape: RankShape | None = None,
    dtype: torch.dtype = torch.bfloat16,
    record: Recorder | None = None,
    spans_of: Callable[[Callable[[], object]], Spans] = kernel_spans,
    batches: Sequence[int] = (1, 4, 16),
    context: int = 1024,
    plans: Mapping[str, DraftPlan | None] = TIMED,
) -> Iterator[Row]:
    """A cycle of one rank's shape with a graph and without.

    A row that could not be measured says why in ``result``; there it is ``ok`` otherwise.
    """
    models = (shape or kimi_rank()).models(device, dtype)
    for name, plan in plans.items():
        for size in batches:
            row: Row = {"cycle": name, "requests": size, "context": context}
            try:
                with torch.inference_mode():
                    rank = Rank(models, plan, size, context, record)
                    row |= _time_cycle(rank, models[0], size, spans_of)
            except Exception as error:  # noqa: BLE001 (whatever it is, the others go on)
                row["result"] = f"{type(error).__name__}: {error}"[:600]
            yield row


def _time_cycle(rank: Rank, target: Target, size: int, spans_of) -> Row:
    cycles, kind = rank.batch.cycles, rank.kind

    def graph():
        cycles.replay(kind, size)

    graph()  # captures
    eager = rank.cycle(size).run
    with_graph, without = rank.time(size, graph), rank.time(size, eager)
    row: Row = {
        "graph us": round(with_graph, 1),
        "no graph us": round(without, 1),
        "times faster": round(without / with_graph, 2),
        "host us, graph": round(rank.host_time(size, graph), 1),
        "host us, no graph": round(rank.host_time(size, eager), 1),
    }
    rank.begin(size)
    calls = len(graph_safe.inspect(eager, num_runs=2).launches)
    with _without_last_layer(target):
        a_layer = calls - len(graph_safe.inspect(eager, num_runs=2).launches)
    row |= {"calls": calls, "calls a layer": a_layer}
    rank.begin(size)
    spans = spans_of(graph)
    if spans:
        busy, idle = gaps(spans)
        with _without_last_layer(target):
            fewer = len(spans_of(eager))
        row |= {
            "kernels": len(spans),
            "kernels a layer": len(spans_of(eager)) - fewer,
            "busy us": round(busy, 1),
            "gaps us": round(idle, 1),
            "gap us a kernel": round(idle / len(spans), 2),
        }
    else:
        row["kernels"] = "the profiler saw none (no CUPTI)"
    phases = rank.phases(size)
    row |= {f"{p} us, no graph": round(phases[p], 1) for p in PHASES if p in phases}
    return row | {"result": "ok"}
