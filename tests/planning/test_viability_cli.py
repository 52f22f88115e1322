"""``spec-kernels viability``: the answer first, the same numbers in all formats, clear refusals."""

import csv
import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from spec_kernels import cli
from spec_kernels.planning import inputs, published, published_case, viability
from spec_kernels.planning.answer import Cycle, make_answer, requirement, with_drafts
from spec_kernels.planning.traces import Text, Trace

BUNDLED = Path(inputs.__file__).parent.parent / "assets/drafter/train_log.jsonl"


@pytest.fixture
def run(capsys):
    def run(*options):
        code = cli.main(["viability", *map(str, options)])
        out = capsys.readouterr()
        assert code == 0, out.err
        return out.out

    return run


def values(estimates):
    return [one["value"] for one in estimates]


# The published case.


def test_published_case_in_text(run):
    out = run()
    first = out.splitlines()[0]
    assert first.startswith("100 tok/s with 2 drafts takes accept length 3.00 at 30 ms (cond")
    assert len(out.splitlines()) <= 85, "read in a minute or two"
    assert max(map(len, out.splitlines())) <= 120
    flat = " ".join(out.split())
    for line in (
        "warning: 120, 150, 200 tok/s at 30 ms: out of reach at any accuracy. 2 drafts give at "
        "most accept length 3, 100 tok/s; the unbounded formula 1/(1-p) would say p = 0.72, 0.78, "
        "0.83",
        "150 tok/s with 2 drafts takes accept length 4.50 at 30 ms (out of reach), 2.25 at 15 ms "
        "(conditional accuracy 0.72), 1.72 at a modelled 11.5 ms (conditional accuracy 0.48).",
        "150 30.00 4.50 out of reach 0.78",
        "150 15.00 2.25 0.72 0.56",
        "200 15.00 3.00 1.00 0.67",
        "82 30.00 2.46 0.81 0.59 break-even",
        "tok/s calibrated by the break-even point 110-120 112 2 drafts: 90",
        "warning: at 30 ms this drafter is slower than plain decoding: 0.90x",
    ):
        assert line in flat, line
    for figure in published_case.figures():
        assert figure.what in out
        line = out.split(figure.what)[1].split("\n")[0]
        assert ("DOES NOT FOLLOW" in line) is not figure.follows


def test_published_case_has_the_cost_models_account(run):
    """Both cycles of published.explanation, and the predicted one among the cycle times."""
    out = run()
    for line in published.explanation():
        if not line:
            break
        assert line in out
    predicted = published.predicted_cycle()
    found = json.loads(run("--json"))
    assert found["cycles"][2]["ms"] == predicted.total
    assert (found["cycles"][2]["low"], found["cycles"][2]["high"]) == predicted.interval()
    assert found["costs"] == published.modelled(published.point(published.CASE)).as_dict()


def test_published_case_in_json(run):
    found = json.loads(run("--json"))
    rows = {(r["target_tok_s"], r["cycle_ms"]): r for r in found["requirements"]}
    assert rows[150, 30]["bounded"] is None and rows[150, 30]["reachable"] is False
    assert rows[150, 15]["bounded"] == pytest.approx(0.7247, abs=1e-4)
    assert rows[150, 15]["unbounded"] == pytest.approx(1 - 1 / 2.25)
    assert [f["what"] for f in found["published"]] == [f.what for f in published_case.figures()]
    assert found["assumptions"] and found["warnings"]


# A question of one's own.


def test_all_formats_say_the_same(run):
    question = ["--target-tok-s", 150, 200, "--cycle-ms", 30, 15, "--draft-steps", 3,
                "--full-acc", 0.742, 0.47, 0.29, "--counts", 500, "--plain-tok-s", 82]  # fmt: skip
    found = json.loads(run(*question, "--json"))
    rows = list(csv.DictReader(io.StringIO(run(*question, "--csv"))))
    assert [r["row"] for r in rows] == ["target"] * 4 + ["break-even"] * 2 + ["drafter"] * 2
    for row, r in zip(rows, found["requirements"] + found["break_even"], strict=False):
        assert float(row["accept_length"]) == r["accept_length"]
        assert row["accuracy_bounded"] == ("" if r["bounded"] is None else str(r["bounded"]))
        assert row["reachable"] == str(r["reachable"])
    text = " ".join(run(*question).split())
    for row, p in zip(rows[-2:], found["predictions"], strict=True):
        for column, value in (("tok_s", p["tok_s"]), ("accept_length", p["accept_length"])):
            assert float(row[column]) == value["value"]
            assert float(row[column + "_low"]) == value["low"] < value["value"]
            assert float(row[column + "_high"]) == value["high"] > value["value"]
        t = p["tok_s"]
        assert f"{t['value']:.1f} ({t['low']:.1f}-{t['high']:.1f})" in text
    expected = viability.accept_length_estimate([0.742, 0.47, 0.29], 500)
    assert found["predictions"][0]["accept_length"] == dataclasses.asdict(expected)
    assert found["predictions"][0]["speedup"]["value"] == pytest.approx(expected.value / 0.030 / 82)


def test_the_answer_comes_first(run):
    lines = run("--target-tok-s", 150, "--cycle-ms", 15, "--draft-steps", 2).splitlines()
    assert lines[0] == (
        "150 tok/s with 2 drafts takes accept length 2.25 at 15 ms (conditional accuracy 0.72)."
    )
    lines = run("--target-tok-s", 60, "--cycle-ms", 15, "--draft-steps", 1).splitlines()
    assert lines[0].endswith("accept length 0.90 at 15 ms (no draft need be right).")


@pytest.mark.parametrize(
    "options, cycle",
    [
        (["--calibrate", 2.2, 90], 24.444),
        (["--draft-overhead", 0.15, "--plain-tok-s", 90], 12.778),
        (["--cycle-ms", 17], 17.0),
        (["--calibrate", 4.4, 90, "--batch", 2], 97.778),
    ],
)
def test_where_a_cycle_time_comes_from(run, options, cycle):
    found = json.loads(run("--full-acc", 0.742, 0.47, 0.29, 0.15, 0.097, *options, "--json"))
    assert [c["ms"] for c in found["cycles"]] == [pytest.approx(cycle, abs=1e-3)]
    assert options[0] in found["cycles"][0]["source"] or "naive" in found["cycles"][0]["source"]
    assert found["num_drafts"] == 5


def test_published_calibration_and_naive_model(run):
    """112 tok/s (published: 110-120) and 215, by the options that a user has."""
    rates = ["--full-acc", 0.742, 0.47, 0.29, 0.15, 0.097, "--plain-tok-s", 90]
    found = json.loads(run(*rates, "--calibrate", 2.2, 90, "--draft-overhead", 0.15, "--json"))
    calibrated, naive = (p["tok_s"]["value"] for p in found["predictions"])
    assert 110 <= calibrated <= 120 and f"{naive:.0f}" == "215"
    assert f"{found['predictions'][1]['speedup']['value']:.2f}" == "2.39"


def test_conditional_rates_and_a_tail(run):
    found = json.loads(run("--cond-acc", 0.8, 0.5, "--draft-steps", 4, "--tail", 0.25, "--json"))
    assert values(found["full_accuracy"]) == pytest.approx([0.8, 0.4, 0.1, 0.025])
    assert any("beyond draft 2" in line for line in found["assumptions"])
    cut = json.loads(run("--cond-acc", 0.8, 0.5, "--draft-steps", 1, "--json"))
    assert values(cut["full_accuracy"]) == [0.8]
    own = json.loads(run("--cond-acc", 0.8, 0.5, "--draft-steps", 3, "--json"))
    assert values(own["full_accuracy"]) == pytest.approx([0.8, 0.4, 0.2])


def test_batch(run):
    found = json.loads(run("--cycle-ms", 40, "--batch", 8, "--target-tok-s", 493, "--json"))
    assert found["requirements"][0]["accept_length"] == pytest.approx(493 * 0.040 / 8)


def test_training_log(run):
    options = ["--log", BUNDLED, "--cycle-ms", 15, "--draft-steps", 3]
    found = json.loads(run(*options, "--json"))
    assert values(found["full_accuracy"]) == list(
        inputs.read_training_log(BUNDLED).full_accuracy[:3]
    )
    assert any("hard places end it" in line for line in found["assumptions"])
    sampled = json.loads(run(*options, "--series", "temperature_0.8", "--counts", 1180, "--json"))
    length = sampled["predictions"][0]["accept_length"]
    assert 1.6 < length["low"] < length["value"] < length["high"] < 1.8
    assert any("taken as 659 cycles" in line for line in sampled["assumptions"])
    for rate in sampled["full_accuracy"]:
        expected = viability.wilson(round(659 * rate["value"]), 659)
        assert (rate["low"], rate["high"]) == (expected.low, expected.high)


def test_engine_log_that_knows_the_accept_length_alone(run, tmp_path):
    path = tmp_path / "engine.log"
    path.write_text(
        "[t] Decode batch, #running-req: 1, #token: 9, accept len: 2.05, accept rate: 0.53, "
        "cuda graph: True, gen throughput (token/s): 60.00, #queue-req: 0\n"
    )
    found = json.loads(run("--engine-log", path, "--json"))
    assert found["num_drafts"] == 2
    assert found["predictions"][0]["tok_s"]["value"] == pytest.approx(60.0)
    assert values(found["full_accuracy"]) == pytest.approx([0.6402, 0.6402**2], abs=1e-4)
    deeper = json.loads(run("--engine-log", path, "--draft-steps", 2, "--json"))
    assert deeper["predictions"] == found["predictions"]


# Costs.


def test_a_described_box_gives_cycle_and_best_chain(run):
    """Chains of the table against the functions that they are made of."""
    rates = [0.742, 0.47, 0.29, 0.15, 0.097]
    question = ["--full-acc", *rates, "--box", "dual-turin-direct", "--draft-steps", 3]
    found = json.loads(run(*question, "--context", 16000, "--json"))
    cost = found["costs"]
    assert (
        cost["total_ms"]
        == found["cycles"][0]["ms"]
        == pytest.approx(sum(part["ms"] for part in cost["parts"]))
    )
    chains = found["chains"]
    assert [c["num_drafts"] for c in chains] == list(range(9))
    assert [c["accept_length"] for c in chains[:6]] == pytest.approx(
        [1, *(viability.accept_length(rates[:k]) for k in range(1, 6))]
    )
    assert all(
        c["tok_s"] == pytest.approx(1e3 * c["accept_length"] / c["cycle_ms"]) for c in chains
    )
    best = max(chains, key=lambda c: c["tok_s"])
    assert [c for c in chains if c["best"]] == [best]
    assert chains[0]["cycle_ms"] < chains[1]["cycle_ms"] < chains[8]["cycle_ms"]
    text = run(*question, "--context", 16000)
    assert f"a chain of {best['num_drafts']} drafts is fastest" in text and "weights" in text
    batch = json.loads(run(*question, "--batch", 32, "--json"))
    assert batch["cycles"][0]["ms"] > found["cycles"][0]["ms"]
    assert batch["chains"][2]["tok_s"] == pytest.approx(
        32e3 * batch["chains"][2]["accept_length"] / batch["chains"][2]["cycle_ms"]
    )


def test_a_measured_curve_gives_cycle_and_best_chain(run, tmp_path):
    """Plain 10 ms, 4 nodes 16 ms, a draft 1 ms: by hand, 10 + 2 + 1 for one draft, and so on."""
    path = tmp_path / "costs.json"
    figures = {"format": "spec-kernels costs", "about": "a box", "draft_step_ms": 1.0,
               "cost_curve_ms": {"1": 10.0, "4": 16.0}}  # fmt: skip
    path.write_text(json.dumps(figures))
    found = json.loads(run("--cond-acc", 0.6, 0.6, "--costs", path, "--json"))
    assert [c["cycle_ms"] for c in found["chains"]] == pytest.approx([10, 13, 16, 19])
    assert [c["tok_s"] for c in found["chains"]] == pytest.approx(
        [100, 1600 / 13, 1960 / 16, 2176 / 19]
    )
    assert [c["num_drafts"] for c in found["chains"] if c["best"]] == [1]
    assert found["cycles"] == [{"ms": 16.0, "source": "2 drafts, batch 1, a box", "low": 16.0,
                                "high": 16.0}]  # fmt: skip
    assert [part["name"] for part in found["costs"]["parts"]] == ["target's pass", "drafter"]


def test_a_trace_gives_trees_as_well(run, tmp_path):
    """Right is the likeliest draft at place 0, the second at 2, none at 1 and 3, and so on.

    Both side by side: cycles of 11.1 ms from every second place, 2 tokens each. The likeliest
    alone: 4 tokens in 3 cycles.
    """
    ranks = np.array([[0, -1], [-1, -1], [1, -1], [-1, -1]] * 10, np.int8)
    text = Text("a", 0.0, ranks, np.full((40, 3), 0.5))
    path, costs = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    Trace(paths=((0,), (1,), (1, 0)), num_ranks=2, texts=(text,), source={}).save(path)
    curve = {"1": 10.0, "2": 10.5, "3": 11.0}
    figures = {"format": "spec-kernels costs", "draft_step_ms": 0.1, "cost_curve_ms": curve}
    costs.write_text(json.dumps(figures))
    question = ["--trace", path, "--costs", costs, "--draft-steps", 1]
    found = json.loads(run(*question, "--json"))
    assert [c["shape"] for c in found["chains"]] == ["no drafts", "chain of 1", "chain of 2"]
    best = next(c for c in found["trees"] if c["best"])
    assert best["paths"] == [[0], [1]] and best["accept_length"] == 2
    assert best["tok_s"] == pytest.approx(2000 / 11.1)
    assert values(found["full_accuracy"]) == pytest.approx([1 / 3])
    assert "A tree of 3 (2) gives 180 tok/s." in run(*question)


def test_drafts_that_do_not_pay(run, tmp_path):
    path = tmp_path / "costs.json"
    figures = {"format": "spec-kernels costs", "draft_step_ms": 9.0,
               "cost_curve_ms": {"1": 10.0, "2": 20.0}}  # fmt: skip
    path.write_text(json.dumps(figures))
    out = run("--cond-acc", 0.5, "--costs", path)
    assert "At these costs no drafts are fastest: plain decoding, 100 tok/s." in out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--box", "nowhere"], "on_box: name: expected one of"),
        (["--context", "5"], "--context: expected --costs or --box with it"),
        (["--box", "dual-turin-direct", "--context", "-5"], "context: expected an integer >= 0"),
        (["--costs", "/no/such/file"], "/no/such/file"),
        (["--costs", str(BUNDLED)], "expected JSON"),
        (["--cycle-ms", "0"], "cycle_ms: expected a finite number > 0, got 0.0"),
        (["--cycle-ms", "nan"], "cycle_ms: expected a finite number > 0, got nan"),
        (["--target-tok-s", "-5"], "targets: expected a finite number > 0, got -5.0"),
        (["--draft-steps", "0"], "num_drafts: expected an integer >= 1, got 0"),
        (["--batch", "0"], "batch: expected an integer >= 1, got 0"),
        (["--plain-tok-s", "0"], "expected a finite number > 0, got 0.0"),
        (["--full-acc", "0.4", "0.5"], "full accuracies, none above the one before"),
        (["--full-acc", "1.4"], "expected finite numbers >= 0 and <= 1"),
        (["--cond-acc", "-0.4"], "full_from_conditional: conditional: expected finite numbers"),
        (["--full-acc", "0.4", "--counts", "0"], "num_cycles: expected an integer >= 1, got 0"),
        (["--full-acc", "0.4", "--tail", "1.2"], "tail: expected a finite number >= 0 and <= 1"),
        (["--calibrate", "0.5", "80"], "accept_length: expected a finite number >= 1, got 0.5"),
        (["--draft-overhead", "0.15"], "--draft-overhead: expected --plain-tok-s"),
        (["--draft-overhead", "-1", "--plain-tok-s", "80"], "overhead: expected a finite number"),
        (["--tail", "0.5"], "--tail: expected rates that it continues"),
        (["--trace", "no.jsonl", "--tail", "0.5"], "--tail: expected no --trace"),
        (["--counts", "5"], "--counts: expected one of --log, --full-acc, --cond-acc with it"),
        (["--series", "greedy"], "--series: expected one of --log, --decode-json, --trace with it"),
        (["--log", "/no/such/file"], "/no/such/file"),
        (["--engine-log", str(BUNDLED)], "expected lines of one engine"),
        (["--decode-json", str(BUNDLED)], "expected JSON, got: Extra data"),
        (["--cycle-ms", "1e-320"], "> 0, of 1e-100 to 1e+100, got 1e-320"),
        (["--cycle-ms", "1e308"], "> 0, of 1e-100 to 1e+100, got 1e+308"),
        (["--batch", str(2**60)], "batch: expected an integer <= 9007199254740992"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(capsys, options, message):
    assert cli.main(["viability", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("spec-kernels viability: error: ") and err.count("\n") == 1
    assert message in err


def test_one_source_at_a_time(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["viability", "--full-acc", "0.5", "--cond-acc", "0.5"])
    assert end.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


# The answer as such.


def test_requirement_edges():
    easy = requirement(50, 10, 2)
    assert easy.accept_length == 0.5 and easy.bounded == easy.unbounded == 0 and easy.reachable
    exact = requirement(100, 30, 2)
    assert exact.accept_length == 3 and exact.bounded == 1 and exact.reachable
    assert not requirement(100.1, 30, 2).reachable


def test_times_and_speeds_belong_to_their_batch():
    """Rates carry over to another batch; the measured cycle and plain speed do not."""
    one = inputs.by_hand([0.7, 0.5])
    source = dataclasses.replace(one, cycle_ms=20.0, plain_tok_s=80.0)
    same = make_answer([100], acceptance=source)
    assert [c.ms for c in same.cycles] == [20.0] and same.plain_tok_s == 80.0
    other = make_answer([100], [Cycle(40.0, "given")], batch=4, acceptance=source)
    assert [c.ms for c in other.cycles] == [40.0] and other.plain_tok_s is None
    assert other.predictions[0].tok_s.value == pytest.approx(4 * 2.2 / 0.040)


def test_a_cycles_interval_widens_the_speeds():
    answer = make_answer(
        [100], [Cycle(20.0, "modelled", 15.0, 25.0)], acceptance=inputs.by_hand([0.5])
    )
    speed = answer.predictions[0].tok_s
    assert (speed.low, speed.value, speed.high) == pytest.approx((60.0, 75.0, 100.0))


def test_accept_length_alone_is_spread_over_the_steps():
    length = viability.Estimate(2.05, 1.9, 2.2)
    source = inputs.Acceptance("x", (), length, 2)
    full, same, notes = with_drafts(source, 2)
    assert same == length and 1 + full.sum() == pytest.approx(2.05) and len(notes) == 1
    deeper, longer, _ = with_drafts(source, 4)
    assert 1 + deeper.sum() == pytest.approx(longer.value)
    assert longer.low < longer.value < longer.high
    with pytest.raises(ValueError, match="a source that knows how many drafts it ran, got 'x'"):
        with_drafts(dataclasses.replace(source, num_drafts=None), 2)


def test_warnings():
    cycles = [Cycle(30.0, "given")]
    slow = make_answer([10], cycles, 2, 1, 80.0, inputs.by_hand([0.6, 0.3], "", 50))
    sure = "at 30 ms this drafter is slower than plain decoding"
    assert slow.warnings == (f"{sure}: 0.79x",)
    near = make_answer([10], cycles, 2, 1, 65.0, inputs.by_hand([0.6, 0.3], "", 50))
    assert near.warnings == (f"{sure}, by the interval perhaps: 0.97x",)
    hopeless = make_answer([10], cycles, 1, 1, 80.0)
    assert hopeless.warnings == (
        "at 30 ms, plain decoding (80 tok/s) beats 1 draft at any accuracy",
    )
    assert make_answer([10], cycles, 2, 1, 50.0).warnings == ()


def test_json_has_no_nan(run):
    out = run("--full-acc", "0", "--cycle-ms", 20, "--json")
    found = json.loads(out, parse_constant=lambda x: pytest.fail(x))
    assert values(found["full_accuracy"]) == [0.0]
    assert not math.isnan(json.loads(out)["predictions"][0]["tok_s_per_point"])
