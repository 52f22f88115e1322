"""The graph runner: buckets, padding, recording, replay, and refusing what no longer holds.

Recordings of ``graph_safe`` stand for CUDA graphs: what is frozen in one is frozen in the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
import torch

from spec_kernels.comm.launch import launch
from spec_kernels.decode.batch import Batch, Request
from spec_kernels.decode.cycle import causal_words
from spec_kernels.decode.graph import (
    CaptureError,
    GraphRunner,
    Plan,
    StaleGraph,
    request_buckets,
    shared_recorder,
)
from spec_kernels.decode.nests import named_tensors
from spec_kernels.models.layers import Step
from spec_kernels.testing import graph_safe
from spec_kernels.testing.compare import assert_same_bits
from spec_kernels.testing.tiny_models import PLANS, PROMPTS

NODES = 4
PAGE, PAGES_EACH, MOST = 4, 5, 6


def recorded(run):
    recording = graph_safe.record(run)
    return recording.replay, recording.outputs


@pytest.fixture(params=[None, recorded], ids=["eager", "recorded"])
def record(request):
    return request.param


class Verifier:
    """The target's verify forward of chains, as an engine would wrap it: rows in, argmax out."""

    def __init__(self, tiny, num_pages=1 + MOST * PAGES_EACH):
        self.target, _ = tiny.models()
        self.cache = self.target.new_cache(num_pages, PAGE)
        self.captured = {}
        self.num_made = 0

    def make(self, bucket):
        self.num_made += 1
        batch, long = bucket // NODES, torch.int64
        inputs = {
            "tokens": torch.zeros(batch, NODES, dtype=long),
            "positions": torch.zeros(batch, NODES, dtype=long),
            "ancestors": torch.zeros(batch, NODES, 1, dtype=torch.int32),
            "slots": torch.zeros(batch, NODES, dtype=long),
            "block_tables": torch.zeros(batch, PAGES_EACH, dtype=torch.int32),
            "context_lens": torch.zeros(batch, dtype=long),
        }
        padding = dict.fromkeys(inputs, 0) | {"slots": -1}
        capture = self.captured[bucket] = self.target.new_capture(bucket)
        best = torch.zeros(batch, NODES, dtype=long)

        def run():
            logits = self.target.forward(Step(**inputs), self.cache, capture)
            torch.argmax(logits, -1, out=best)
            return {"best": best, "capture": capture}

        return Plan(run, inputs, padding)

    def runner(self, buckets=(4, 8, 16, 24), **options):
        options = {"tokens_per_request": NODES, "watch": self.target} | options
        return GraphRunner(self.make, buckets, **options)


def chains(num_requests, seed):
    """Inputs of requests with other lengths, ids and pages each time."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.arange(NODES).expand(num_requests, -1)
    lens = torch.randint(0, PAGE * PAGES_EACH - NODES, (num_requests,), generator=g)
    pages = 1 + torch.randperm(MOST * PAGES_EACH, generator=g)[: num_requests * PAGES_EACH]
    return {
        "tokens": torch.randint(0, 30, (num_requests, NODES), generator=g),
        "positions": lens[:, None] + rows,
        "ancestors": causal_words(NODES).expand(num_requests, -1, -1),
        "slots": rows,
        "block_tables": pages.view(num_requests, PAGES_EACH).to(torch.int32),
        "context_lens": lens,
    }


def eagerly(verifier, inputs):
    batch = inputs["tokens"].shape[0]
    capture = verifier.target.new_capture(batch * NODES)
    logits = verifier.target.forward(Step(**inputs), verifier.cache, capture)
    return {"best": logits.argmax(-1), "capture": capture}


def assert_rows(got, want):
    """``got`` of a bucket begins with ``want``."""
    for name, value in want.items():
        assert_same_bits(got[name][: value.shape[0]], value)


def test_case_27_interleaved_replays_equal_eager_calls(tiny, record):
    verifier, eager = Verifier(tiny), Verifier(tiny)
    runner = verifier.runner(record=record)
    runner.capture()
    buckets = set()
    for seed in range(12):
        num_requests = random.Random(seed).randint(1, MOST)
        inputs = chains(num_requests, seed)
        assert_rows(runner.run(num_requests, **inputs), eagerly(eager, inputs))
        assert_same_bits(verifier.cache, eager.cache)
        buckets.add(runner.bucket_for(num_requests))
    assert buckets == set(runner.buckets)


@pytest.mark.parametrize("kind", PLANS)
def test_case_27_interleaved_cycles_of_several_batches_equal_eager_cycles(tiny, kind):
    """Whole cycles, three batch sizes over one model, replayed in turns."""
    plan, models = PLANS[kind], tiny.models()

    def batches(models):
        return {n: Batch(*models, plan, max_tokens=80, max_requests=n) for n in (1, 2, 3)}

    replayed, eager = batches(models), batches(tiny.models())

    def make(bucket):
        size = bucket // plan.num_nodes
        return Plan(replayed[size].cycle(size).run)

    runner = GraphRunner(
        make,
        [n * plan.num_nodes for n in (1, 2, 3)],
        tokens_per_request=plan.num_nodes,
        watch=models,
        buffers=[batch.state.tensors() for batch in replayed.values()],
        record=recorded,
    )
    runner.capture()
    for of_size in (replayed, eager):
        for size, batch in of_size.items():
            for prompt in PROMPTS[:size]:
                batch.join(Request(prompt, 30))
    accepted = set()
    for size in random.Random(0).choices((1, 2, 3), k=12):
        got = runner.replay(runner.bucket_for(size))
        want = eager[size].cycle(size).run()
        for (_, a), (_, b) in zip(named_tensors(got), named_tensors(want), strict=True):
            assert_same_bits(a, b)
        accepted |= set(want.verified.num_accepted.tolist())
    assert len(accepted) > 1


def test_case_26_padded_rows_are_valid_and_write_nothing(tiny, record):
    """Rows of a larger batch before do not linger in the places that a smaller one leaves empty."""
    verifier, fresh = Verifier(tiny), Verifier(tiny)
    runner = verifier.runner([24], record=record)
    runner.capture()
    runner.run(6, **chains(6, 1))
    verifier.cache.fill_(torch.nan)
    only = fresh.runner([24])
    only.capture()
    fresh.cache.fill_(torch.nan)
    inputs = chains(2, 2)
    inputs["context_lens"] = torch.tensor([0, 0])
    inputs["positions"] = inputs["slots"].clone()
    got, want = runner.run(2, **inputs), only.run(2, **inputs)
    assert_same_bits(got["best"][:2], want["best"][:2])
    assert_same_bits(verifier.cache, fresh.cache)
    # One page a request holds all that was written: two times NODES rows in every layer.
    written = ~verifier.cache.isnan().all(-1)
    assert written.flatten(1).sum(1).tolist() == [2 * NODES] * len(verifier.cache)
    for name, buffer in runner.plan(24).inputs.items():
        padding = runner.plan(24).padding[name]
        assert bool((buffer[2:] == padding).all()), name


def test_case_06_capture_leaves_the_caches_alone(tiny, record):
    verifier = Verifier(tiny)
    verifier.cache.fill_(torch.nan)
    verifier.runner(record=record).capture()
    assert verifier.cache.isnan().all()


def test_case_22_a_replay_refreshes_the_captured_states(tiny, record):
    verifier, eager = Verifier(tiny), Verifier(tiny)
    runner = verifier.runner([8], record=record)
    runner.capture()
    for seed in range(3):
        verifier.captured[8].fill_(torch.nan)
        inputs = chains(2, seed)
        runner.run(2, **inputs)
        assert_same_bits(verifier.captured[8], eagerly(eager, inputs)["capture"])


def test_case_22_capture_switched_on_after_the_graph_was_made_is_refused(tiny):
    """Not obeyed silently: a graph goes on doing what it was recorded with."""
    verifier = Verifier(tiny)
    options = {"with_states": False}
    capture, out = torch.zeros(4, 8), torch.zeros(4, 8)

    def make(bucket):
        def run():
            out.add_(1)
            if options["with_states"]:
                capture.copy_(out)

        return Plan(run)

    runner = GraphRunner(make, [4], watch=options, record=recorded)
    runner.capture()
    runner.replay(4)
    options["with_states"] = True
    with pytest.raises(StaleGraph, match=r"watch\['with_states'\] was replaced since the capture"):
        runner.replay(4)
    runner.capture()
    runner.replay(4)
    assert_same_bits(capture, out)
    assert verifier.num_made == 0


@pytest.mark.parametrize(
    "num_requests, bucket", [(1, 4), (2, 8), (3, 16), (4, 16), (5, 24), (6, 24)]
)
def test_buckets_are_chosen_by_tokens(tiny, num_requests, bucket):
    assert Verifier(tiny).runner().bucket_for(num_requests) == bucket


@pytest.mark.parametrize("num_requests", [7, 0, -1])
def test_a_batch_beyond_the_largest_bucket_is_refused_before_anything_runs(tiny, num_requests):
    verifier = Verifier(tiny)
    runner = verifier.runner()
    runner.capture()
    before = verifier.cache.clone()
    with pytest.raises(ValueError) as caught:
        runner.run(num_requests, **chains(max(num_requests, 0), 0) if num_requests < 7 else {})
    assert str(caught.value) == (
        "graph runner: num_requests: expected 1 to 6, since the largest bucket holds 24 tokens, "
        f"got {num_requests} of 4 tokens each"
    )
    assert_same_bits(verifier.cache, before)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.pop("slots"), r"inputs: expected \[.*'slots'.*\], got"),
        (lambda x: x.update(more=x["tokens"]), r"inputs: expected \[.*\], got .*'more'"),
        (lambda x: x.update(tokens=x["tokens"][:1]), r"tokens: .* \(2, 4\) for 2 requests"),
        (lambda x: x.update(tokens=x["tokens"].int()), r"tokens: .*int64 .* got torch.int32"),
        (lambda x: x.update(ancestors=x["ancestors"][..., 0]), r"ancestors: .* \(2, 4, 1\)"),
        (lambda x: x.update(tokens=x["tokens"].tolist()), "tokens: expected a tensor, got list"),
    ],
    ids=["missing", "unknown", "rows", "dtype", "dimensions", "list"],
)  # fmt: skip
def test_bad_inputs_are_refused_before_anything_is_written(tiny, change, message):
    runner = Verifier(tiny).runner([8])
    runner.capture()
    runner.run(2, **chains(2, 1))
    before = {name: buffer.clone() for name, buffer in runner.plan(8).inputs.items()}
    inputs = chains(2, 2)
    change(inputs)
    with pytest.raises(ValueError, match=message):
        runner.run(2, **inputs)
    for name, buffer in runner.plan(8).inputs.items():
        assert_same_bits(buffer, before[name])


@pytest.mark.parametrize(
    "buckets, options",
    [
        ([], {}),
        ([8, 4], {}),
        ([4, 4], {}),
        ([0, 4], {}),
        ([4, 6], {"tokens_per_request": 4}),
        ([4], {"tokens_per_request": 0}),
        ([4], {"num_warmups": 0}),
    ],
)
def test_bad_settings(buckets, options):
    with pytest.raises(ValueError, match="graph runner: "):
        GraphRunner(lambda bucket: Plan(lambda: None), buckets, **options)


def test_request_buckets():
    assert request_buckets(1, 4) == [4]
    assert request_buckets(8, 4) == [4, 8, 16, 32]
    assert request_buckets(6) == [1, 2, 4, 6]
    with pytest.raises(ValueError, match="request_buckets"):
        request_buckets(0)


# ----------------------------------------------------------------------------- bad plans


def test_results_that_the_run_allocates_are_refused():
    x = torch.zeros(4)
    runner = GraphRunner(lambda bucket: Plan(lambda: {"y": [x * 2]}), [4])
    message = r"bucket of 4 tokens: ValueError: result\['y'\]\[0\]: expected a buffer that make\(\)"
    with pytest.raises(CaptureError, match=message):
        runner.capture()
    assert not runner.is_captured


def test_results_of_some_runs_only_are_refused():
    x, calls = torch.zeros(4), []
    plan = Plan(lambda: calls.append(1) or (x if len(calls) == 1 else None))
    with pytest.raises(CaptureError, match="same results from every run"):
        GraphRunner(lambda bucket: plan, [4]).capture()


@pytest.mark.parametrize(
    "plan, message",
    [
        (Plan(lambda: None, {"x": torch.zeros(4)}), "padding: expected a value for each of"),
        (Plan(lambda: None, {}, {"x": 0}), "padding: expected a value for each of"),
        (Plan(lambda: None, {"x": torch.zeros(3)}, {"x": 0}), "inputs: x: expected a whole"),
        (Plan(lambda: None, {"x": torch.zeros(())}, {"x": 0}), "inputs: x: expected a whole"),
        (Plan(lambda: None, {"x": [0, 0]}, {"x": 0}), "inputs: x: expected a tensor, got list"),
        (None, "make: expected a Plan, got NoneType"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_padded_are_refused(plan, message):
    with pytest.raises(CaptureError, match=message):
        GraphRunner(lambda bucket: plan, [2]).capture()


def test_a_failed_capture_leaves_no_graph_and_the_next_may_succeed():
    broken = [True]

    def make(bucket):
        def run():
            if broken[0] and bucket == 4:
                raise KeyError("weights")

        return Plan(run)

    runner = GraphRunner(make, [4, 8])
    with pytest.raises(CaptureError, match="bucket of 4 tokens: KeyError: 'weights'") as caught:
        runner.capture()
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RuntimeError, match=r"expected capture\(\) before"):
        runner.replay(8)
    broken[0] = False
    runner.capture()
    runner.replay(8)
    with pytest.raises(ValueError, match=r"bucket: expected one of \[4, 8\] tokens, got 6"):
        runner.replay(6)
    broken[0] = True
    with pytest.raises(CaptureError):
        runner.capture()
    assert not runner.is_captured


def test_prime_and_padding_come_before_every_run_and_after_the_last():
    x, log = torch.full((4,), 5.0), []

    def run():
        log.append(x.tolist())
        x.add_(1)

    runner = GraphRunner(
        lambda bucket: Plan(run, {"x": x}, {"x": 7}, lambda: log.append("prime")), [2]
    )
    runner.capture()
    assert log == ["prime", [7.0] * 4] * 3 + ["prime"]
    assert x.tolist() == [7.0] * 4
    runner.run(1, x=torch.tensor([1.0, 2.0]))
    assert log[-1] == [1.0, 2.0, 7.0, 7.0]


def test_the_largest_bucket_is_captured_first():
    made = []
    GraphRunner(lambda bucket: made.append(bucket) or Plan(lambda: None), [1, 2, 9]).capture()
    assert made == [9, 2, 1]


# ----------------------------------------------------------------------------- what has changed


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float


class Toy:
    """A model whose parts are of every kind."""

    def __init__(self):
        self.weight = torch.ones(4)
        self.layers = [{"norm": torch.ones(4)}, {"norm": torch.ones(4)}]
        self.head = torch.nn.Linear(4, 4)
        self.eps, self.name = 1e-6, "toy"
        self.slotted = Slotted(2.0)
        self.layers[0]["model"] = self
        self._buffers = {}


def replace_weight(toy):
    toy.weight = torch.ones(4)


def replace_in_list(toy):
    toy.layers[1] = dict(toy.layers[1])


def drop_layer(toy):
    toy.layers.pop()


def move_data(toy):
    toy.weight.set_(torch.ones(4))


@torch.no_grad()
def write_parameter(toy):
    toy.head.weight.add_(1)


def set_eps(toy):
    toy.eps = 1e-5


CHANGES = {
    "replaced": (replace_weight, r"watch\[0\].weight was replaced"),
    "written": (lambda toy: toy.weight.mul_(2), r"watch\[0\].weight was written"),
    "moved": (move_data, r"watch\[0\].weight was moved"),
    "in a list": (replace_in_list, r"watch\[0\].layers\[1\] was replaced"),
    "in a dict": (lambda toy: toy.layers[0].update(norm=torch.ones(4)), r"\['norm'\] was replaced"),
    "layer dropped": (drop_layer, r"layers\[1\] was removed"),
    "parameter": (write_parameter, r"head.weight was written"),
    "parameter replaced": (lambda toy: setattr(toy.head, "bias", None), r"head.bias was replaced"),
    "attribute dropped": (lambda toy: delattr(toy, "name"), r"name was removed"),
    "in slots": (lambda toy: setattr(toy.slotted, "scale", 3.0), r"slotted.scale was replaced"),
    "number": (set_eps, r"eps was replaced"),
    "mode": (lambda toy: toy.head.eval(), r"head.training was replaced"),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_invalidates(change, message):
    with torch.inference_mode(False):
        toy, ran = Toy(), []
        runner = GraphRunner(lambda bucket: Plan(lambda: ran.append(1)), [4], watch=[toy])
        runner.capture()
        runner.replay(4)
        before = len(ran)
        change(toy)
        for _ in range(2):
            with pytest.raises(StaleGraph, match=message):
                runner.replay(4)
        with pytest.raises(StaleGraph, match=message):
            runner.run(1)
        assert len(ran) == before
        runner.capture()
        runner.replay(4)


def test_what_does_not_matter_invalidates_nothing():
    with torch.inference_mode(False):
        toy = Toy()
        cache = {"k": torch.zeros(4)}
        runner = GraphRunner(lambda b: Plan(lambda: None), [4], watch=toy, buffers=cache)
        runner.capture()
        toy._buffers["x"] = torch.zeros(3)
        toy.eps = float("1e-6")
        cache["k"].add_(1)
        runner.replay(4)
        cache["k"] = torch.zeros(4)
        with pytest.raises(StaleGraph, match=r"buffers\['k'\] was replaced"):
            runner.replay(4)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.resize_(2, 3),
        lambda t: t.unsqueeze_(0),
        lambda t: t.t_(),
        lambda t: setattr(t, "data", t.data.view(torch.int32)),
    ],
    ids=["fewer rows", "another dimension", "other strides", "another dtype"],
)
def test_a_buffer_of_another_form_at_the_same_place_invalidates(change):
    with torch.inference_mode(False):
        cache = torch.zeros(3, 3)
        runner = GraphRunner(lambda b: Plan(lambda: None), [4], buffers={"k": cache})
        runner.capture()
        runner.replay(4)
        place = cache.data_ptr()
        change(cache)
        assert cache.data_ptr() == place
        with pytest.raises(StaleGraph, match=r"buffers\['k'\] was given another shape or dtype"):
            runner.replay(4)


def test_inputs_leave_no_history_in_their_buffer():
    with torch.inference_mode(False):
        x = torch.zeros(4, 3)
        runner = GraphRunner(lambda b: Plan(lambda: x, {"x": x}, {"x": 0.0}), [4])
        runner.capture()
        out = runner.run(2, x=torch.ones(2, 3, requires_grad=True))
        assert not out.requires_grad and out.sum() == 6


def test_another_drafter_or_a_weight_of_one_layer_invalidates(tiny):
    engine = tiny.engine()
    target, drafter = engine.batch.target, engine.batch.drafter
    models = {"target": target, "drafter": drafter}
    runner = GraphRunner(lambda bucket: Plan(lambda: None), [4], watch=models)
    runner.capture()
    # Decoding with a model is no change of it.
    engine.generate(PROMPTS[0], 8).result()
    runner.replay(4)
    layer = target.layers[2]
    layer.mlp_norm = layer.mlp_norm.clone()
    with pytest.raises(StaleGraph, match=r"\['target'\]\.layers\[2\]\.mlp_norm was replaced"):
        runner.replay(4)
    runner.capture()
    models["drafter"] = tiny.models()[1]
    with pytest.raises(StaleGraph, match=r"watch\['drafter'\] was replaced"):
        runner.replay(4)


def test_invalidate_drops_everything(tiny):
    runner = Verifier(tiny).runner([4])
    runner.capture()
    runner.invalidate()
    assert not runner.is_captured
    with pytest.raises(RuntimeError, match="expected capture"):
        runner.run(1, **chains(1, 0))


def test_replays_are_graph_safe(tiny):
    """Of the runner's own: recorded by an outer graph, they could be part of one."""
    verifier = Verifier(tiny)
    runner = verifier.runner([8])
    runner.capture()
    plan = runner.plan(8)

    def fill(run):
        for name, value in chains(2, run).items():
            plan.inputs[name].copy_(value)

    graph_safe.check(lambda: runner.replay(8), (plan.inputs, verifier.cache), fill=fill)
    # and so is what fills the inputs, for one number of requests
    inputs = chains(2, 5)
    graph_safe.check(lambda: runner.run(2, **inputs), (inputs, plan.inputs))


# ----------------------------------------------------------------------------- CUDA, feigned


class FakeCuda:
    """What ``torch.cuda`` is asked for; a broken capture raises once more when it is ended."""

    def __init__(self, monkeypatch):
        self.log, self.current = [], "the caller's stream"
        fake = self

        class Graph:
            def replay(self):
                fake.log.append("replay")

        class Stream:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                self.before, fake.current = fake.current, self.stream

            def __exit__(self, *error):
                fake.current = self.before

        class Capture:
            def __init__(self, graph, **options):
                fake.log.append(options)

            def __enter__(self):
                fake.current = "the capture's stream"

            def __exit__(self, kind, *error):
                if kind is not None:
                    raise RuntimeError("operation failed due to a previous error during capture")
                fake.current = "the caller's stream"

        for name, value in {
            "CUDAGraph": Graph,
            "graph": Capture,
            "graph_pool_handle": lambda: "pool",
            "Stream": lambda: "the capture's stream",
            "current_stream": lambda device: fake.current,
            "stream": Stream,
            "device": lambda device: contextlib.nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_on_cuda_all_buckets_share_one_pool_and_one_stream(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    out, ran = torch.zeros(4), []

    def run():
        ran.append(cuda.current)
        return out

    runner = GraphRunner(lambda bucket: Plan(run), [4, 8], device="cuda", num_warmups=1)
    runner.capture()
    assert ran == ["the caller's stream", "the capture's stream"] * 2
    options = {
        "pool": "pool",
        "stream": "the capture's stream",
        "capture_error_mode": "thread_local",
    }
    assert cuda.log == [options, options]
    assert runner.replay(8) is out and runner.run(1) is out
    assert cuda.log[2:] == ["replay", "replay"] and len(ran) == 4


def test_on_cuda_a_pool_whose_graphs_are_gone_is_left(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    pools = iter("ab")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    record = shared_recorder("cuda")
    runners = [GraphRunner(lambda _: Plan(lambda: None), [4], record=record) for _ in range(2)]
    for runner in runners:
        runner.capture()
    runners[0].capture()  # the other's graph has kept the pool
    for runner in runners:
        runner.invalidate()
    runners[0].capture()
    assert [options["pool"] for options in cuda.log] == ["a", "a", "a", "b"]


def test_on_cuda_a_pool_of_a_broken_capture_is_left(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    pools, record = iter("ab"), shared_recorder("cuda")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    kept = record(lambda: None)
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0)
    record(lambda: None)
    assert kept and [options["pool"] for options in cuda.log] == ["a", "a", "b"]


def test_everything_of_a_batch_runs_on_the_stream_it_was_made_on(tiny, monkeypatch):
    """Whichever thread calls: streams are the thread's own."""
    target, drafter = tiny.models()
    batch = Batch(target, drafter, max_tokens=40)
    entered = []

    @contextlib.contextmanager
    def on_stream(stream):
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    batch._stream = "the batch's"
    batch.warm_up()
    batch.leave(batch.join(Request([1, 2], 4)))
    batch.logits_after([1, 2])
    batch.step()
    assert entered == ["the batch's"] * 5


def test_on_cuda_what_broke_the_capture_is_raised_and_the_stream_put_back(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def run():
        if cuda.current == "the capture's stream":
            raise IndexError("no such page")

    runner = GraphRunner(lambda bucket: Plan(run), [4], device="cuda")
    with pytest.raises(CaptureError, match="IndexError: no such page"):
        runner.capture()
    assert cuda.current == "the caller's stream"


# ----------------------------------------------------------------------------- several ranks


def failing(comm, where, with_sums):
    """What each rank gets when rank 1 fails at ``where``; then what the next call says."""
    x = torch.ones(64)

    def make(bucket):
        if where == "make" and comm.rank == 1 and bucket == 4:
            raise MemoryError("no pages")

        def run():
            if where == "run" and comm.rank == 1 and bucket == 4:
                raise MemoryError("no pages")
            if with_sums:
                comm.all_reduce(x, out=x)

        return Plan(run)

    runner = GraphRunner(make, [4, 8], comm=comm)
    texts = []
    for call in (runner.capture, runner.capture, comm.barrier):
        try:
            call()
            texts.append("nothing")
        except RuntimeError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts, runner.is_captured


@pytest.mark.parametrize("with_sums", [True, False], ids=["meeting", "apart"])
@pytest.mark.parametrize("where", ["make", "run"])
def test_an_error_on_one_rank_raises_on_all(where, with_sums):
    for texts, is_captured in launch(failing, 3, where, with_sums, timeout=60):
        assert texts[0].startswith("CaptureError: graph runner: bucket of ")
        assert all("bucket of 4 tokens: MemoryError: no pages" in text for text in texts), texts
        assert not is_captured


def disagreeing(comm):
    runner = GraphRunner(lambda bucket: Plan(lambda: None), [4, 8 + 8 * comm.rank], comm=comm)
    with pytest.raises(ValueError, match="expected the same on all ranks") as caught:
        runner.capture()
    return str(caught.value)


def test_ranks_with_other_buckets_are_refused():
    texts = launch(disagreeing, 2, timeout=60)
    assert "got [[4, 8], 1, 2] on rank 0, [[4, 16], 1, 2] on rank 1" in texts[0]


def decoding(comm, tiny, record):
    """A target over ranks, verifying chains through the runner."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        verifier = Verifier(tiny)
        if comm is not None:
            verifier.target, _ = tiny.models(comm)
        runner = verifier.runner([4, 8], comm=comm, record=record and recorded)
        runner.capture()
        return [runner.run(n, **chains(n, n))["best"][:n].tolist() for n in (1, 2, 1)]


@pytest.mark.parametrize("is_recorded", [False, True], ids=["eager", "recorded"])
def test_ranks_replay_together(tiny, is_recorded):
    alone = decoding(None, tiny, is_recorded)
    assert launch(decoding, 2, tiny, is_recorded, timeout=60) == [alone, alone]
