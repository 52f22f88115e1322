"""What each source says is read as it stands, and what contradicts itself is refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest

from spec_kernels.planning import inputs, viability
from spec_kernels.planning.traces import Text, Trace

ASSETS = Path(inputs.__file__).parent.parent / "assets"
BUNDLED = ASSETS / "drafter/train_log.jsonl"


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "log"
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text("\n".join(texts) + "\n")
        return path

    return write


# Training logs.


def test_the_bundled_drafters_own_log():
    """Against the file, read here by hand: its last record of held-out accuracies."""
    records = [json.loads(line) for line in BUNDLED.read_text().splitlines()]
    line, record = next(
        (i, r) for i, r in reversed([*enumerate(records, 1)]) if "greedy_full_accuracy" in r
    )
    found = inputs.read_training_log(BUNDLED)
    assert list(found.full_accuracy) == record["greedy_full_accuracy"]
    assert found.accept_length.value == pytest.approx(record["greedy_accept_length"])
    assert found.num_drafts == 5 and found.num_cycles is None and found.accept_length.is_exact
    assert f"line {line}, greedy, full accuracy" in found.source
    assert any("also has the series training, temperature_0.8" in note for note in found.notes)

    sampled = inputs.read_training_log(BUNDLED, "temperature_0.8", num_positions=1180)
    assert list(sampled.full_accuracy) == record["temperature_0.8_full_accuracy"]
    assert sampled.num_cycles == round(1180 / record["temperature_0.8_accept_length"])
    assert not sampled.accept_length.is_exact

    batches = inputs.read_training_log(BUNDLED, "training")
    assert list(batches.full_accuracy) == records[-1]["full_accuracy"]
    assert any("not of held-out text" in note for note in batches.notes)


@pytest.mark.parametrize(
    "record, full, kind",
    [
        ({"full_accuracy": [0.5, 0.2]}, [0.5, 0.2], "training, full"),
        ({"conditional_accuracy": [0.5, 0.4]}, [0.5, 0.2], "training, conditional"),
        ({"train/acc_0": 0.5, "train/acc_1": 0.4}, [0.5, 0.2], "train, stepwise"),
        ({"acc_1": 0.5, "acc_2": 0.4}, [0.5, 0.2], "training, stepwise"),
        ({"acces": [0.5, 0.4], "loss": 1.0}, [0.5, 0.2], "training, stepwise"),
        (
            {"val/cond_acc_0_epoch": 0.5, "val/cond_acc_1_epoch": 0.4, "val/loss_0_epoch": 2},
            [0.5, 0.2],
            "val, conditional",
        ),
        (
            {"full_acc_0": 0.5, "full_acc_1": 0.2, "cond_acc_0": 0.5, "cond_acc_1": 0.4},
            [0.5, 0.2],
            "training, full",
        ),
        (
            {"train/acc_0": 0.9, "train/acc_1": 0.9, "eval/acc_0": 0.5, "eval/acc_1": 0.4},
            [0.5, 0.2],
            "eval, stepwise",
        ),
    ],
)
def test_field_names_of_training_logs(write, record, full, kind):
    found = inputs.read_training_log(write({"step": 1, "acc": 0.3, "accept_length": 9}, record))
    assert found.full_accuracy == pytest.approx(full)
    assert f"line 2, {kind} accuracy" in found.source
    said = any("taken as conditional" in note for note in found.notes)
    assert said is kind.endswith("stepwise")


def test_noise_between_json_lines_is_counted(write):
    path = write("Epoch 1:  10%|#", "[1, 2]", {"full_accuracy": [0.5]}, "", "{broken")
    found = inputs.read_training_log(path)
    assert found.full_accuracy == (0.5,)
    assert any("3 lines are no JSON objects" in note for note in found.notes)


@pytest.mark.parametrize(
    "lines, series, message",
    [
        (["plain text"], None, "accuracies: expected JSON lines with full_accuracy"),
        ([{"loss": 1.0, "acc": 0.5}], None, "got none"),
        ([{"acc_0": 0.5, "acc_3": 0.5}], None, "got none"),
        ([{"full_accuracy": [0.5]}], "greedy", "series: expected one of training, got greedy"),
        ([{"full_accuracy": [0.5, 0.6]}], None, "line 1, training, full accuracy: accept_length"),
        ([{"full_accuracy": [1.5]}], None, "expected finite numbers >= 0 and <= 1, got [1.5]"),
        ([{"full_accuracy": []}], None, "got none"),
        ([{"full_accuracy": [0.5, "x"]}], None, "line 1, training, full accuracy"),
        ([{"full_accuracy": [10**400]}], None, "line 1, training, full accuracy"),
        ([{"full_accuracy": [float("nan")]}], None, "line 1, training, full accuracy"),
        (["[" * 100_000], None, "got none"),
        ([{"full_accuracy": [None]}], None, "line 1, training, full accuracy"),
        ([{"cond_acc_0": -0.5}], None, "line 1, training, conditional accuracy"),
    ],
)
def test_bad_training_logs(write, lines, series, message):
    path = write(*lines)
    with pytest.raises(ValueError) as error:
        inputs.read_training_log(path, series)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"\xff\xfe\x00\x80")
    for read in (inputs.read_training_log, inputs.read_decode_report, inputs.read_engine_log):
        with pytest.raises(ValueError, match="encoding: expected UTF-8 text"):
            read(path)
        with pytest.raises(OSError):
            read(tmp_path / "absent")


# The main job's report.


def decode_report(**changes):
    """Two texts of 7 tokens each, of which prefill gave one: 12 tokens in 5 cycles and 0.1 s."""
    one = {
        "name": "greedy",
        "accept_histogram": {"1": 1, "2": 1, "3": 3},
        "num_tokens": 14,
        "num_cycles": 5,
        "speculative_tok_s": 120.0,
        "plain_step_ms": 12.5,
        "phases_ms": {"draft": 3.0, "verify": 16.0},
        "prompts": [{}, {}],
        **changes,
    }
    other = {**one, "name": "temperature 0.8", "accept_histogram": {"1": 4, "2": 1, "3": 0}}
    return {"draft": {"kind": "chain"}, "passes": [one, other]}


def test_decode_report(write):
    path = write(json.dumps(decode_report(), indent=1))
    found = inputs.read_decode_report(path)
    assert found.full_accuracy == (0.8, 0.6) and found.num_drafts == 2 and found.num_cycles == 5
    assert found.accept_length.value == pytest.approx(2.4)
    assert found.cycle_ms == pytest.approx(20.0) and found.plain_tok_s == pytest.approx(80.0)
    assert any("of the cycle's 20.0 ms, 19.0 are in its phases" in note for note in found.notes)
    sampled = inputs.read_decode_report(path, "temperature 0.8")
    assert sampled.full_accuracy == (0.2, 0.0)
    assert "temperature 0.8, 5 cycles" in sampled.source


def test_a_tree_is_told_from_a_chain(write):
    report = {**decode_report(), "draft": {"kind": "static"}}
    found = inputs.read_decode_report(write(report))
    assert any("depth of a static tree" in note for note in found.notes)


def test_a_batch_and_adapted_drafts(write):
    """9 cycles of requests in 5 of the loop, each 20 ms; a plain step of 25 ms gives 4 tokens."""
    histogram, by_nodes = {"1": 4, "2": 2, "3": 3}, {"1": 1, "3": 4}
    changes = {"accept_histogram": histogram, "cycles_by_nodes": by_nodes, "plain_step_ms": 25.0}
    found = inputs.read_decode_report(write({**decode_report(**changes), "batch": 4}))
    assert found.batch == 4 and found.cycle_ms == pytest.approx(20.0)
    assert found.plain_tok_s == pytest.approx(160.0) and found.num_cycles == 9
    assert "of a batch of 4, 1.8 requests were there in a cycle" in found.notes
    assert any("1 of 1 nodes, 4 of 3 nodes" in note for note in found.notes)
    with pytest.raises(ValueError, match="batch: expected an integer >= 1, got 0"):
        inputs.read_decode_report(write({**decode_report(), "batch": 0}))


@pytest.mark.parametrize(
    "report, message",
    [
        ("not json", "expected JSON, got: Expecting value"),
        ([], "passes: expected a report"),
        ({"passes": []}, "passes: expected a report"),
        ({"passes": [3]}, "passes: expected a report"),
        (decode_report(accept_histogram={}), "accept_histogram: expected cycles by accept length"),
        (decode_report(accept_histogram={"1": 3}), "expected at least one draft and one cycle"),
        (decode_report(accept_histogram={"1": 0, "2": 0}), "at least one draft and one cycle"),
        (decode_report(accept_histogram={"1": 1, "3": 2}), "accept_histogram[2]: expected a numb"),
        (decode_report(accept_histogram={"1": 1, "2": -2}), "accept_histogram[2]: expected a num"),
        ("[" * 100_000, "expected JSON, got: maximum recursion depth"),
        ('{"passes": 1' + "0" * 5000 + "}", "expected JSON, got: Exceeds the limit"),
        (decode_report(num_tokens=10**400), "num_tokens: expected a number, got 1000"),
        (decode_report(accept_histogram={"1": 1, "2": 10**400}), "accept_histogram[2]: expected"),
        (decode_report(speculative_tok_s=0.0), "speculative_tok_s: expected a number > 0: nothing"),
        (decode_report(plain_step_ms=None), "plain_step_ms: expected a finite number > 0"),
        (decode_report(num_tokens="many"), "num_tokens: expected a number, got 'many'"),
        (decode_report(prompts=None), "prompts: expected a list, got None"),
        (decode_report(num_tokens=2), "num_tokens: expected more than one a prompt, got 2"),
        (decode_report(phases_ms={"draft": None}), "draft: expected a finite number"),
    ],
)
def test_bad_decode_reports(write, report, message):
    path = write(report)
    with pytest.raises(ValueError) as error:
        inputs.read_decode_report(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


def test_unknown_pass(write):
    with pytest.raises(ValueError, match="series: expected one of greedy, temperature 0.8, got x"):
        inputs.read_decode_report(write(decode_report()), "x")


# Acceptance traces.


def trace_file(tmp_path):
    """Greedily: a chain of 2 accepts 2, 0, 1 drafts from places 0, 3 and 4; sampled: none."""
    ranks = np.array([[0, 0], [0, 0], [0, 0], [1, 0], [0, 1], [0, 0]], np.int8)
    confidence = np.full((6, 2), 0.5)
    texts = (
        Text("a", 0.0, ranks, confidence),
        Text("b", 0.8, np.full((2, 2), -1, np.int8), confidence[:2]),
    )
    path = tmp_path / "trace.jsonl"
    Trace(paths=((0,), (0, 0)), num_ranks=2, texts=texts, source={}).save(path)
    return path


def test_trace(tmp_path):
    path = trace_file(tmp_path)
    found = inputs.read_trace(path)
    assert found.full_accuracy == pytest.approx([2 / 3, 1 / 3])
    assert found.num_cycles == 3 and found.num_drafts == 2
    assert found.accept_length.value == pytest.approx(2)
    assert "temperature 0, 1 texts, 3 cycles" in found.source
    # Chains of 1: 1 at place 0, 1 at 2, 1 at 4.
    assert inputs.read_trace(path, num_drafts=1).full_accuracy == (1.0,)
    assert inputs.read_trace(path, "0.8").full_accuracy == (0.0, 0.0)


@pytest.mark.parametrize(
    "options, message",
    [
        (("0.5",), "series: expected a temperature of 0, 0.8, got 0.5"),
        ((None, 3), "draft steps: expected at most 2, as recorded, got 3"),
        ((None, 0), "num_drafts: expected an integer >= 1, got 0"),
    ],
)
def test_bad_traces(tmp_path, options, message):
    with pytest.raises(ValueError) as error:
        inputs.read_trace(trace_file(tmp_path), *options)
    assert message in str(error.value)
    with pytest.raises(ValueError):
        inputs.read_trace(BUNDLED)


# Engines' logs.

VLLM = (
    "(APIServer pid=1) INFO 05-01 10:00:{i:02} [metrics.py:101] SpecDecoding metrics: Mean "
    "acceptance length: {length:.2f}, Accepted throughput: 20.60 tokens/s, Drafted throughput: "
    "60.90 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position "
    "acceptance rate: {rates}, Avg Draft acceptance rate: 33.8%"
)
NOISE = [
    '(APIServer pid=1) INFO:     127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 200 OK',
    "(APIServer pid=1) INFO 05-01 10:00:52 [loggers.py:271] Engine 000: Avg prompt throughput: "
    "9.0 tokens/s, Avg generation throughput: 26.9 tokens/s, Running: 1 reqs, Waiting: 0 reqs",
    "",
]


def vllm(i, num, counts):
    """A line of ``num`` drafts of which ``counts`` were accepted by position."""
    return VLLM.format(
        i=i,
        length=1 + sum(counts) / num,
        accepted=sum(counts),
        drafted=num * len(counts),
        rates=", ".join(f"{c / num:.3f}" for c in counts),
    )


def test_vllm(write):
    """Two lines, weighted by their cycles; rates have three digits."""
    path = write(NOISE[0], vllm(1, 203, (122, 58, 26)), *NOISE, vllm(2, 50, (45, 40, 39)))
    found = inputs.read_engine_log(path)
    assert found.num_cycles == 253
    assert found.full_accuracy == pytest.approx([167 / 253, 98 / 253, 65 / 253], abs=6e-4)
    assert found.accept_length.value == pytest.approx(1 + 330 / 253, abs=1e-3)
    assert found.accept_length.low < found.accept_length.value < found.accept_length.high
    assert "vLLM, lines 2 to 6 (2 of them), 253 cycles" in found.source
    assert found.cycle_ms is None and found.num_drafts == 3


def test_vllm_without_accepted_drafts(write):
    found = inputs.read_engine_log(write(vllm(1, 20, (0, 0))))
    assert found.num_cycles == 20 and found.accept_length.value == 1
    assert "line 1, 20 cycles" in found.source


OLD_VLLM = (
    "INFO SpecDecoding metrics: Draft acceptance rate: 60.0%, Accepted: {} tokens, Drafted: {} "
    "tokens"
)


def test_vllm_without_rates_by_position(write):
    path = write(OLD_VLLM.format(60, 100), OLD_VLLM.format(0, 0))
    with pytest.raises(ValueError, match="rates by position, or --draft-steps, got neither"):
        inputs.read_engine_log(path)
    found = inputs.read_engine_log(path, num_drafts=4)
    assert found.full_accuracy == () and found.accept_length.value == pytest.approx(3.4)
    assert found.num_drafts == 4


def test_llama_cpp(write):
    line = (
        "0.06 I slot print_timing: id  1 | task 0 | draft acceptance = 0.64479 (  167 accepted / "
        "  259 generated), mean acceptance length =  2.92, acceptance rate per position = (0.805, "
        "0.632, 0.483)"
    )
    found = inputs.read_engine_log(write("0.01 I eval time = 3 ms", line))
    assert found.num_cycles == 87 and found.num_drafts == 3
    assert found.accept_length.value == pytest.approx(2.92)


def sglang(running, length, rate, speed):
    share = "" if rate is None else f"accept rate: {rate:.2f}, "
    return (
        f"[2026-04-08 14:05:21 TP0] Decode batch, #running-req: {running}, #token: 2080, token "
        f"usage: 0.29, accept len: {length:.2f}, {share}cuda graph: True, gen throughput "
        f"(token/s): {speed:.2f}, #queue-req: 0"
    )


def test_sglang(write):
    path = write(
        sglang(1, 0.0, 0.0, 0.0),
        sglang(1, 2.4, 0.47, 120.0),
        "[2026-04-08 14:05:22 TP0] Prefill batch, #new-seq: 1, accept len: none",
        sglang(1, 2.6, 0.53, 130.0),
        sglang(1, 2.5, 0.50, 100.0),
        sglang(8, 2.0, 0.33, 500.0),
    )
    found = inputs.read_engine_log(path)
    assert found.accept_length.value == pytest.approx(2.5) and found.full_accuracy == ()
    assert 2.2 < found.accept_length.low < 2.5 < found.accept_length.high < 2.8
    assert found.num_drafts == 3 and found.batch == 1
    assert found.cycle_ms == pytest.approx(20.0)
    assert "SGLang, lines 2 to 5 (3 of them)" in found.source
    assert any("1 lines of another batch size than 1" in note for note in found.notes)


def test_sglang_of_a_batch_and_without_rates(write):
    found = inputs.read_engine_log(write(sglang(8, 2.0, None, 800.0)), num_drafts=3)
    assert found.batch == 8 and found.cycle_ms == pytest.approx(20.0) and found.num_drafts == 3
    assert found.accept_length.is_exact
    older = sglang(1, 2.54, None, 39.33).replace("Decode batch,", "Decode batch.")
    unknown = inputs.read_engine_log(write(older))
    assert unknown.num_drafts is None and unknown.accept_length.value == 2.54


@pytest.mark.parametrize(
    "lines, drafts, message",
    [
        (NOISE, None, "lines: expected lines of one engine"),
        ([vllm(1, 9, (3, 2)), sglang(1, 2, 0.5, 9)], None, "got 1 of vLLM and 1 of SGLang"),
        ([vllm(1, 9, (3, 2)), vllm(2, 9, (3, 2, 1))], None, "one number of drafts throughout"),
        ([vllm(1, 9, (2, 3))], None, "line 1: rates by position: expected full accuracies"),
        ([vllm(1, 9, (12, 3))], None, "line 1: rates by position: expected finite numbers"),
        ([OLD_VLLM.format(0, 0)], 2, "expected vLLM lines with drafted tokens, got none drafted"),
        ([OLD_VLLM.format(9, 6)], 2, "Accepted: expected at most Drafted = 6 tokens"),
        ([sglang(1, 3.5, None, 9)], 2, "accept len: expected at most 3 with 2 drafts, got 3.5"),
        ([vllm(1, 9, (3, 2))], 0, "num_drafts: expected an integer >= 1, got 0"),
    ],
)
def test_bad_engine_logs(write, lines, drafts, message):
    with pytest.raises(ValueError) as error:
        inputs.read_engine_log(write(*lines), drafts)
    assert message in str(error.value)


def test_rates_by_hand():
    found = inputs.by_hand([0.742, 0.47], num_cycles=200)
    assert found.accept_length == viability.accept_length_estimate([0.742, 0.47], 200)
    assert inputs.by_hand([0.742, 0.47]).accept_length.is_exact
    with pytest.raises(ValueError, match="none above the one before"):
        inputs.by_hand([0.4, 0.5])
