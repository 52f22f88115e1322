"""The GPU report, as far as a machine without a GPU can tell.

Every check, capture and timing runs here on reduced shapes, through the backends that stand in for
a device; only device and clock are new there.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from cuda_on_host import emulated, fake_driver, host_build
from torch.nn.attention import flex_attention

from spec_kernels import _library
from spec_kernels.decode.batch import Batch
from spec_kernels.decode.captured import Kind
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.ops import common
from spec_kernels.testing import calls, collectives, graph_safe, on_device, serving
from spec_kernels.testing.tiny_models import PLANS, PROMPTS, Tiny

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
        module = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))
        for name in ("gpu_check", "gpu_attention", "gpu_cycle"):
            sys.modules.pop(name, None)
        for name in ("bench_merge_states", "bench_moe_experts", "bundled"):
            sys.modules.pop(name, None)


def written_for_a_gpu():
    """(op, what runs its kernel here), from the sources."""
    found = []
    for path in sorted((ROOT / "csrc").glob("*/*_cuda.cu")):
        ops = re.findall(r"m\.impl\(\"(\w+)\"", path.read_text())
        found += [(op, "cuda_on_host") for op in ops]
    for path in sorted((ROOT / "spec_kernels" / "ops").glob("*/triton.py")):
        ops = re.findall(r"^def (\w+)_triton\(", path.read_text(), re.MULTILINE)
        found += [(op, "triton") for op in ops]
    return found


KERNELS = written_for_a_gpu()
BACKENDS = ("cpu", *sorted({runs for _, runs in KERNELS}))


def test_every_kernel_has_a_check():
    assert {"hidden_capture", "compact", "tree_build"} <= {op for op, _ in KERNELS}
    assert {op for op, _ in KERNELS} - calls.CALLS.keys() - set(collectives.OPS) == set()
    assert {*calls.CALLS, *collectives.OPS} <= _library.SCHEMAS.keys()


def test_the_checks_pass_right_kernels(backend):
    """All those of ``backend`` that there are."""
    kind = backend.replace("_on_device", "_on_host").replace("triton_on_host", "triton")
    ops = calls.CALLS if backend == "cpu" else [op for op, runs in KERNELS if runs == kind]
    ops = [op for op in ops if op not in collectives.OPS]
    assert ops
    for op in ops:
        passed = list(calls.check(op, backend, full=False))
        assert len(passed) >= 2 and len(set(passed)) == len(passed), op


counter = itertools.count()


@pytest.mark.parametrize("op", calls.CALLS)
def test_the_check_fails_a_wrong_kernel(op):
    """One wrong element of any output."""
    written = [
        i
        for i, argument in enumerate(_library.arguments(op))
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for place in written:

        def kernel(op, place=place):
            def run(*args):
                _library.REFERENCES[op](*args)
                if args[place] is None:
                    return
                last = args[place][-1] if isinstance(args[place], list) else args[place]
                if last.numel():
                    cell = last.flatten()[-1:].clone()
                    cell.view(torch.uint8)[-1] ^= 0x40  # among its highest bits
                    last[tuple(size - 1 for size in last.shape)] = cell[0]

            return run

        name = f"broken_{next(counter)}"
        on_device.register(name, "cpu", kernel)
        with pytest.raises(AssertionError, match=f"{op}, .*: {_library.arguments(op)[place].name}"):
            list(calls.check(op, name, full=False))
        del common.EXTRA_BACKENDS[name], on_device._registered[name]


@pytest.mark.parametrize("op", calls.CALLS)
def test_replays_equal_eager_calls(gpu_check, op):
    assert gpu_check.capture(op, "cpu", lambda function: function) == {"detail": "4 replays"}


def _recorded(run):
    recording = graph_safe.record(run)
    return recording.replay, recording.outputs


def test_replays_of_buckets_equal_eager_calls(gpu_check):
    row = gpu_check.capture_buckets("cpu", (4, 8, 16), 64, _recorded)
    assert row == {"detail": "3 graphs, 33 replays"}


def test_replays_of_buckets_that_are_not_refreshed_are_seen(gpu_check):
    with pytest.raises(AssertionError):
        gpu_check.capture_buckets("cpu", (4, 8), 64, lambda run: (lambda: None, run()))


@pytest.mark.parametrize("op", ["compact", "tree_verify"])
def test_a_replay_that_does_nothing_is_seen(gpu_check, op):
    with pytest.raises(AssertionError, match=f"{op}, .* elements differ"):
        gpu_check.capture(op, "cpu", lambda function: lambda: None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def check_cycles(gpu_check, tiny):
    """The check on a tiny model, with what stands for graphs here."""

    def check(dtype="float32", record=_recorded, names=("chain",), **options):
        return list(
            gpu_check.gpu_cycle.check_cycles(
                dtype,
                "cpu",
                models=lambda device, dtype: tiny.models(dtype=dtype),
                prompts=PROMPTS,
                record=record,
                cases={name: gpu_check.gpu_cycle.CASES[name] for name in names},
                **{"batches": (1, 3), "num_new": 9} | options,
            )
        )

    return check


def test_replayed_cycles_of_every_kind_equal_eager_ones(gpu_check, check_cycles):
    rows = check_cycles(names=gpu_check.gpu_cycle.CASES)
    assert [row["result"] for row in rows] == ["ok"] * 2 * len(gpu_check.gpu_cycle.CASES)
    assert {row["caches"] for row in rows} == {"same bits"}
    assert max(row["tokens a cycle"] for row in rows) > 1.3
    assert "1 to 3" in {row["sizes"] for row in rows}
    assert all(re.fullmatch(r"(\d+) of \1 texts", row["CPU's tokens"]) for row in rows), rows


def test_cycles_of_bfloat16_have_no_oracle_but_their_own_eager_run(check_cycles):
    for row in check_cycles("bfloat16", batches=(2,)):
        assert row["result"] == "ok" and "CPU's tokens" not in row


def test_replays_that_decode_nothing_new_are_seen(check_cycles):
    """The first cycle for ever: its tokens are those of another place in the text."""

    def frozen(run):
        recording = graph_safe.record(run)
        replays = itertools.count()
        return lambda: next(replays) % 2 or recording.replay(), recording.outputs

    for row in check_cycles(record=frozen):
        assert "op by op" in row["result"] and "request 0" in row["result"]


def test_a_capture_that_fails_does_not_hide_the_next(check_cycles):
    captures = itertools.count()

    def record(run):
        if next(captures) == 0:
            raise IndexError("no such page")
        return _recorded(run)

    first, second = check_cycles(record=record)
    assert "IndexError: no such page" in first["result"] and second["result"] == "ok"


@pytest.mark.parametrize("gap, told", [(1.0, "token 2: "), (1e-5, "near tie")])
def test_other_tokens_than_the_cpus_are_wrong_unless_they_tie(gpu_check, tiny, gap, told):
    oracle = gpu_check.gpu_cycle._Oracle(tiny.models(), PROMPTS, 3, 6)
    texts = [list(text) for text in oracle.texts]
    assert oracle.compare(serving.Served(texts, [], []), [0, 1, 2]) == ("3 of 3 texts", [])
    wanted = texts[1][2]
    texts[1][2] = (wanted + 1) % 40
    logits = torch.zeros(40)
    logits[wanted] = gap
    oracle.batch.logits_after = lambda ids: logits
    texts_alike, wrong = oracle.compare(serving.Served(texts, [], []), [0, 1, 2])
    assert told in (wrong[0] if wrong else texts_alike) and bool(wrong) == (gap == 1.0)


def test_cycles_of_one_rank_are_timed(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check.gpu_cycle, "NUM_CYCLES", 4)
    kimi = gpu_check.gpu_cycle.kimi_rank()
    assert (kimi.target.num_attention_heads, kimi.target.moe_intermediate_size) == (8, 256)
    shared = dict(hidden_size=64, num_attention_heads=2, vocab_size=96, intermediate_size=32)
    target = dataclasses.replace(
        kimi.target, **shared, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=8, v_head_dim=8,
        qk_rope_head_dim=8, moe_intermediate_size=32, n_routed_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    drafter = dataclasses.replace(
        kimi.drafter, **shared, num_key_value_heads=2, head_dim=16, draft_vocab_size=96,
        target_hidden_size=64,
    )  # fmt: skip
    shape = gpu_check.gpu_cycle.RankShape(target, drafter, 32)

    def spans(function):
        function()
        return [("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 5.0, 6.0)]

    def time_cycles(**options):
        rest = dict(dtype=torch.float32, batches=(1, 2), context=20)
        return list(gpu_check.gpu_cycle.time_cycles("cpu", shape=shape, **rest | options))

    rows = time_cycles(spans_of=spans, record=_recorded)
    assert [row["result"] for row in rows] == ["ok"] * 2 * len(gpu_check.gpu_cycle.TIMED), rows
    # Two and more rows bring their values into order with a call of their own.
    assert {row["calls a layer"] for row in rows if row["cycle"] != "plain"} == {12}
    assert {(row["busy us"], row["gaps us"]) for row in rows} == {(4.0, 2.0)}
    assert all(row["graph us"] > 0 and row["host us, graph"] > 0 for row in rows)
    phases = {"draft", "build", "verify", "accept", "extend"}
    assert {k.split()[0] for k in rows[-1] if k.endswith("us, no graph")} == phases | {"host"}
    (without,) = time_cycles(spans_of=lambda f: [], batches=(1,), plans={"plain": None})
    assert "CUPTI" in without["kernels"] and without["result"] == "ok"
    broken = time_cycles(spans_of=lambda f: 1 / 0, batches=(1,))
    assert {row["result"].split(":")[0] for row in broken} == {"ZeroDivisionError"}


def test_rows_that_are_not_ok_fail_their_task(gpu_check, monkeypatch):
    rows = [{"cycles": "chain", "n": 1, "result": "ok"}, {"cycles": "tree", "result": "no"}]
    monkeypatch.setattr(gpu_check.gpu_cycle, "check_cycles", lambda dtype: iter(rows))
    said = []
    assert gpu_check.perform("cycle float32", said.append) == {"failed": "tree, no: no"}
    assert said == rows


def test_no_op_of_a_captured_cycle_runs_the_reference_on_a_gpu(tiny, monkeypatch):
    target, drafter = tiny.models()
    drawn = DraftPlan("static", 3, 3, 10, sampled=True)
    called = set()
    for plan in (*PLANS.values(), drawn):
        batch = Batch(target, drafter, plan, max_tokens=80, max_requests=2)
        for request in serving.requests(PROMPTS, 2, 30, samples=True):
            batch.join(request)
        kinds = [Kind(0), Kind(plan.num_nodes), Kind(plan.num_nodes, evicts=True)]
        kinds += [Kind(plan.num_nodes, draws=True)] if plan.sampled else []
        with torch.inference_mode():
            for kind in kinds:
                run = batch.cycles.cycle(kind, 2).run
                called |= graph_safe.check(run, batch.state.tensors(), num_runs=2).by_op().keys()
    ours = {name.partition("::")[2] for name in called if name.startswith("spec_kernels::")}
    assert {"draft_sample", "tree_build", "tree_verify", "tree_verify_compact"} < ours
    written = {op: {runs for other, runs in KERNELS if other == op} for op, _ in KERNELS}
    assert ours - written.keys() == set()

    # What a torch with CUDA would be told when the package is imported.
    registered = set()

    class Library:
        def impl(self, op, function, key):
            assert key == "CUDA"
            registered.add(op)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_library, "_lib", Library())
    monkeypatch.setattr(_library, "_given_to_triton", set())
    for op in ours:
        _library.register_triton(op)
    is_compiled = {op: _library.has_kernel(op, "cuda") for op in ours}
    assert registered == {op for op in ours if "triton" in written[op] and not is_compiled[op]}
    if _library.LIBRARIES["cuda"].loaded:
        # Each has one or the other; what is written in both has the compiled one.
        assert all(is_compiled[op] != (op in registered) for op in ours)
        assert all(is_compiled[op] == (written[op] != {"triton"}) for op in ours)


def test_a_capture_is_not_broken_by_looking_at_values(monkeypatch):
    is_capturing, cuda, cpu = [False], torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    monkeypatch.setenv("SPEC_KERNELS_CHECK", "0")
    assert not common.asked_to_check(cuda) and not common.asked_to_check(cpu)
    monkeypatch.setenv("SPEC_KERNELS_CHECK", "1")
    assert common.asked_to_check(cuda) and common.asked_to_check(cpu)
    is_capturing[0] = True
    assert common.asked_to_check(cpu) and not common.asked_to_check(cuda)


@pytest.mark.parametrize("op", sorted({op for op, runs in KERNELS if runs == "triton"}))
def test_launchers_of_triton_kernels_can_be_captured(op, monkeypatch):
    """All that they do but the kernels: no wait, nothing kept, one grid whatever the data."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.delenv("SPEC_KERNELS_CHECK", raising=False)
    kernel, runs, num_launches = _library.triton_kernel(op), [], 0

    def launch(function, *args, grid, **constants):
        numbers = [value for value in args if not isinstance(value, torch.Tensor)]
        runs[-1].append((function, grid, numbers, constants))

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    pairs = zip(calls.CALLS[op](False, 0), calls.CALLS[op](False, 1), strict=True)
    for values in itertools.islice(pairs, 4):
        static = values[0].map(torch.clone)

        def fill(number, static=static, values=values):
            runs.append([])
            sources = values[number % 2].tensors(written=False)
            for (_, t), (_, source) in zip(static.tensors(written=False), sources, strict=True):
                t.copy_(source)

        run = functools.partial(kernel, *static.args)
        graph_safe.check(run, static.args, fill=fill, num_runs=3)
        assert all(run == runs[0] for run in runs), static.name
        num_launches += len(runs[0])
        runs.clear()
    assert num_launches


def measure(function):
    function(0)
    function(1)
    return 2.0


def test_attention_is_timed_against_sdpa(gpu_check):
    rows = list(gpu_check.time_attention("cpu", measure, contexts=(40,), flush=0))
    assert len(rows) == 4 * len(gpu_check.ATTENTION)
    assert [r["aim"] for r in rows[:3]] == ["", "", "1 node x 1.1: met"]
    assert {r["times faster"] for r in rows} == {1.0}


def test_aims_that_are_missed_are_told(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "AIM_CONTEXT", 40)
    times = iter(range(1, 1000))
    rows = list(
        gpu_check.time_attention(
            "cpu", lambda f: f(0) is None or next(times), contexts=(40,), flush=0
        )
    )
    assert "missed" in rows[2]["aim"] and rows[0]["aim"].startswith("share >= 0.85: ")


def test_flex_attention_computes_the_same(gpu_check, monkeypatch):
    # Compiling takes longer than all the rest; uncompiled it says the same.
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    rows = list(gpu_check.time_rival("flex_attention", "cpu", measure, context=40, flush=0))
    assert [r["ratio"] for r in rows] == [1.0] * len(gpu_check.ATTENTION), rows


def test_a_rival_that_is_absent_or_fails_is_a_row(gpu_check, monkeypatch):
    assert importlib.util.find_spec("flashinfer") is None
    (row,) = gpu_check.time_rival("flashinfer", "cpu", measure, context=40, flush=0)
    assert row["rival us"] == "not installed"

    def wrong(p):
        return lambda i: p.ours() + 1

    monkeypatch.setitem(gpu_check.RIVALS, "flex_attention", wrong)
    rows = list(gpu_check.time_rival("flex_attention", "cpu", measure, context=40, flush=0))
    assert all(r["rival us"].startswith("failed: AssertionError") for r in rows)


def test_acceptance_is_timed_against_the_same_walk_in_pytorch(gpu_check):
    rows = list(gpu_check.time_accept("cpu", measure, vocab=301, num_layers=3))
    assert [(r["nodes"], r["accepted"]) for r in rows[::3]] == [(4, 2), (16, 3), (64, 3)]
    assert {r["rule"] for r in rows} == set(gpu_check.RULES)
    assert {r["times faster"] for r in rows} == {1.0}  # one launch against one


def test_compaction_in_pytorch_moves_the_same_rows(gpu_check):
    g = torch.Generator().manual_seed(0)
    cache = torch.randn(80, gpu_check.PAGE, 3, generator=g)
    ours, theirs = cache.clone(), cache.clone()
    tables = torch.randperm(80, generator=g)[None]
    path, lens = torch.tensor([[0, 3, 5, -1]]), torch.tensor([1000])
    gpu_check.spec_kernels.compact(path, torch.tensor([2]), lens, tables, [ours])
    gpu_check._torch_compact(path, lens, tables, [theirs])
    assert ours.equal(theirs) and not ours.equal(cache)


def test_the_other_timings_run(gpu_check):
    rows = list(gpu_check.time_hidden_capture("cpu", measure, hidden=64))
    assert [r["rows"] for r in rows] == [1, 4, 16, 64, 1024]
    assert len(list(gpu_check.time_small("cpu", measure))) == 14
    rows = list(gpu_check.time_moe("cpu", measure, num_experts=12, hidden=64, inner=32))
    assert [(r["experts"], r["rows"]) for r in rows[::4]] == [("int4", 1), ("bf16", 1)]
    assert {r["times faster"] for r in rows} == {1.0, "-"}


def test_launches_beyond_the_promise_fail(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "kinds", lambda op: ["cpu"])

    def count(num):
        def names(function):
            function()
            return [f"kernel {i}" for i in range(num)]

        return names

    few = gpu_check.launches("cpu", count(1))
    assert few["failed"] == "" and [r["promised"] for r in few["rows"]] == [3, 2, 4] + 7 * [1]
    many = gpu_check.launches("cpu", count(3))["failed"]
    assert "context 32: 3 kernels, 2 promised" in many and "8192" not in many
    assert "the profiler saw no kernel" in gpu_check.launches("cpu", count(0))["failed"]


WORKER = """
import json, os, sys, time
def say(what, value):
    print("gpu_check: " + json.dumps([what, value]), flush=True)
print("noise")
say("ready", {})
for name in sys.argv[1:]:
    if name == "rows":
        say("row", {"a": 1})
        say("done", {"detail": "1 call", "rows": [{"a": 2}]})
    if name == "bad":
        say("done", {"failed": "AssertionError: wrong"})
    if name == "crash":
        print("the reason", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hang":
        say("row", {"a": 3})
        time.sleep(600)
    if name == "lost":
        say("done", {"failed": "RuntimeError (device lost: x)"})
        sys.exit()
"""


def test_no_task_hides_another(gpu_check, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    names = ["rows", "bad", "crash", "lost", "hang", "rows"]
    tasks = [gpu_check.Task(name, 5.0 if name != "hang" else 1.0) for name in names]
    command = [sys.executable, str(script)]
    outcomes = list(gpu_check.run_tasks(tasks, command, time.monotonic() + 120))
    assert [name for name, _ in outcomes] == names
    rows, bad, crash, lost, hang, last = (outcome for _, outcome in outcomes)
    assert (rows["result"], rows["rows"]) == ("passed", [{"a": 1}, {"a": 2}])
    assert (bad["result"], bad["detail"]) == ("FAILED", "AssertionError: wrong")
    assert crash["result"] == "FAILED" and "ended with 3: the reason" in crash["detail"]
    assert lost["result"] == "FAILED"
    assert (hang["result"], hang["rows"]) == ("SKIPPED", [{"a": 3}])
    assert "out of time" in hang["detail"] and last["result"] == "passed"


def test_a_worker_says_what_its_parent_hears(gpu_check, monkeypatch, capsys):
    lost = iter([None, None, None, None, RuntimeError("illegal address")])

    def synchronize():
        error = next(lost)
        if error:
            raise error

    def perform(name, say):
        if name == "bad":
            raise ValueError("wrong")
        say({"a": 1})
        return {"detail": "fine"}

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(gpu_check, "perform", perform)
    gpu_check.worker(["good", "bad", "good", "never"])
    lines = capsys.readouterr().out.splitlines()
    said = [json.loads(line.removeprefix(gpu_check.MARK)) for line in lines]
    assert said[:4] == [
        ["ready", {}], ["row", {"a": 1}], ["done", {"detail": "fine"}],
        ["done", {"failed": "ValueError: wrong"}],
    ]  # fmt: skip
    assert "device lost: illegal address" in said[-1][1]["failed"] and len(said) == 6


def test_a_worker_that_cannot_start_fails_every_task(gpu_check):
    tasks = [gpu_check.Task(name, 5.0) for name in ("one", "two")]
    command = [sys.executable, "-c", "raise SystemExit('no device here')"]
    outcomes = dict(gpu_check.run_tasks(tasks, command, time.monotonic() + 60))
    assert [o["result"] for o in outcomes.values()] == ["FAILED"] * 2
    assert "no device here" in outcomes["two"]["detail"]


def test_tasks_without_time_are_listed(gpu_check):
    tasks = [gpu_check.Task("one", 5.0)]
    ((name, outcome),) = gpu_check.run_tasks(tasks, ["/nonexistent"], time.monotonic() - 1)
    assert (name, outcome["result"], outcome["detail"]) == ("one", "SKIPPED", "out of time")


SUITE = """
import pytest, time
gpu = pytest.mark.gpu
@gpu
def test_good(): pass
@gpu
def test_skipped(): pytest.skip("why")
def test_other(): assert False
@gpu
def test_wrong(): assert {wrong}
@gpu
def test_slow(): time.sleep({seconds})
"""


def test_suites_are_summarised(gpu_check, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    path = tmp_path / "test_it.py"
    path.write_text(SUITE.format(wrong=False, seconds=0))
    row = gpu_check.run_suite(path, 60)
    assert [row[k] for k in ("passed", "failed", "error", "skipped")] == [2, 1, 0, 1]
    assert row["note"] == "test_wrong"
    path.write_text(SUITE.format(wrong=True, seconds=100))
    row = gpu_check.run_suite(path, 10)
    assert (row["passed"], row["failed"], row["note"]) == (2, 0, "out of time")
    path.write_text("import nothing_of_this_name")
    row = gpu_check.run_suite(path, 60)
    assert row["error"] and "nothing_of_this_name" in row["note"]


def test_the_suites_of_gpu_kernels_are_found(gpu_check):
    names = {p.name for p in gpu_check.suite_files()}
    assert {"test_compact.py", "test_tree_build.py", "test_tree_verify.py"} <= names
    assert "test_cycle_cuda.py" in names
    assert not names & {"test_moe_experts.py", "test_gpu_check.py"}


def test_without_a_gpu_the_report_says_that_nothing_ran(gpu_check, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "report")])
    assert gpu_check.main() == 0
    assert "Nothing ran" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ran"] is False and report["tasks"] == {} and report["ops"] == {}
    assert "Nothing ran" in (tmp_path / "report.md").read_text()


class Properties:
    name, major, minor = "a GPU", 9, 0


@pytest.mark.parametrize("wrong", [None, "task", "suite", "unchecked"])
def test_the_report_and_the_exit_code(gpu_check, monkeypatch, tmp_path, capsys, wrong):
    """A whole run, with the workers' answers made up."""

    def answers(tasks, command, end):
        for task in tasks:
            bad = wrong == "task" and task.name == "launches"
            rows = [{"x": 1}, {"y": "a|b"}] if task.name == "launches" else []
            yield task.name, gpu_check._outcome("FAILED" if bad else "passed", "said", rows, 1.0)

    def suites(seconds):
        return {"rows": [{"file": "f"}], "detail": "5 passed", "failed": wrong == "suite" and "f"}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    monkeypatch.setattr(gpu_check, "run_tasks", answers)
    monkeypatch.setattr(gpu_check, "run_suites", suites)
    monkeypatch.delitem(calls.CALLS, "moe_experts")
    monkeypatch.setattr(
        gpu_check, "kinds", lambda op: ["cuda"] if op in calls.CALLS or wrong == "unchecked" else []
    )
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "r")])
    assert gpu_check.main() == (wrong is not None)
    text = capsys.readouterr().out
    assert "a GPU, sm_90" in text and "| suites |" in text and "5 passed" in text
    assert "| 1 |  |" in text and "a\\|b" in text
    assert text.strip() == (tmp_path / "r.md").read_text().strip()
    report = json.loads((tmp_path / "r.json").read_text())
    names = list(report["tasks"])
    assert names[0].startswith("check ") and names[-1] == "suites" and "launches" in names
    assert {f"time {name}" for name in gpu_check.TIMINGS} <= set(names)
    assert report["ops"]["moe_experts"]["result"] == (
        "UNCHECKED" if wrong == "unchecked" else "no kernel"
    )


def test_only_some_tasks(gpu_check, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    monkeypatch.setattr(gpu_check, "kinds", lambda op: ["cuda"])
    monkeypatch.setattr(gpu_check, "run_tasks", lambda tasks, *_: asked.extend(tasks) or [])
    gpu_check.run(60, ["launches", "capture compact"], lambda report: None)
    assert [task.name for task in asked] == ["capture compact", "launches"]


@pytest.fixture
def local_ranks(tmp_path):
    """``collectives.LocalRanks`` on the emulated machine, small."""
    if host_build.missing():
        pytest.skip(f"CUDA sources on the host: {host_build.missing()}")
    machine, fake = host_build.load(), fake_driver.load(tmp_path)
    machine.configure(2, emulated.RESIDENT)
    machine.set_clock(1000)
    platform = emulated.platform(fake, machine, host_clock=False)

    def make(num_ranks, **options):
        sizes = dict(one_shot_bytes=4096, two_shot_bytes=4096)
        streams = emulated.Streams(machine, num_ranks)
        return collectives.LocalRanks(num_ranks, 0, streams, platform=platform, **sizes, **options)

    yield make
    machine.set_clock(1)
    machine.configure(host_build.schedule())


def test_collectives_are_captured(gpu_check, local_ranks):
    row = gpu_check.capture_collectives(local_ranks, (5, 700), 2)
    assert row == {"detail": "replay 0, replay 1"}


def test_a_missing_rank_is_told(gpu_check, local_ranks, monkeypatch):
    monkeypatch.setattr(gpu_check, "MISSING_MS", 20)
    assert "rank 2 did not arrive" in gpu_check.missing_rank(local_ranks)["detail"]


def test_collectives_are_checked(gpu_check, local_ranks):
    row = gpu_check.check_collectives(4, local_ranks, (5, 700), ((2, 40),))
    said = row["detail"].split(", ")
    exact = ["one_shot", "two_shot", "hierarchical", "hierarchical_pull"]
    assert said[:4] == exact and [f"fused {name}" for name in exact] == said[7:11]
    assert said[4:7] == ["hierarchical_bf16", "two_shot_fp8", "two_shot_int8"]
    assert said[11:] == ["0 bytes", "3 bytes", "100000 bytes"]


def test_collectives_are_timed(gpu_check, local_ranks):
    def measure(replay_of):
        replay_of(2)()
        return 2.0

    rows = list(gpu_check.time_allreduce(local_ranks, measure, (1, 3), 40, 4))
    assert [r["bytes"] for r in rows] == [80] * 4 + [240] * 4 + [80]
    assert {r["times faster"] for r in rows[:-1]} == {1.0}
    assert rows[0]["what"] == "4 ranks on one device, one_shot" and rows[-1]["us"] > 0
