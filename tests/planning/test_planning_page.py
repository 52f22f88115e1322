"""docs/planning.md: what it shows is what its commands print. And the main job, foretold."""

import json
import re
import shlex
from pathlib import Path

import pytest

from spec_kernels import cli
from spec_kernels.planning import inputs, viability

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs/planning.md"
LOG = ROOT / "spec_kernels/assets/drafter/train_log.jsonl"
in_tree = pytest.mark.skipif(not PAGE.exists(), reason="docs/planning.md: not in a source tree")
EXAMPLES = (
    re.findall(r"^```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE.read_text(), re.MULTILINE)
    if PAGE.exists()
    else []
)


@in_tree
@pytest.mark.parametrize("command, shown", EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
def test_the_page_shows_what_its_commands_print(command, shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *argv = shlex.split(command)
    assert program == "spec-kernels" and argv[0] == "viability"
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    if shown.endswith("\n...\n"):
        assert printed.startswith(shown.removesuffix("...\n"))
    else:
        assert printed == shown


@in_tree
def test_the_page_has_examples_of_every_kind():
    commands = " ".join(command for command, _ in EXAMPLES)
    assert len(EXAMPLES) >= 5
    for option in ("--log", "--decode-json", "--costs", "--target-tok-s", "--plain-tok-s"):
        assert option in commands


@in_tree
def test_numbers_in_the_pages_text_are_in_its_examples():
    """Every number with a decimal point of the reading of the example was printed above it."""
    text = PAGE.read_text()
    reading = text[text.index("Reading it:") : text.index("## The published case")]
    shown = "\n".join(out for _, out in EXAMPLES)
    record = next(
        r
        for r in map(json.loads, reversed(LOG.read_text().splitlines()))
        if "greedy_full_accuracy" in r
    )
    shown += " ".join(f"{x:.2f}" for x in record["greedy_full_accuracy"])
    sampled = inputs.read_decode_report(
        ROOT / "benchmarks/results/2026-11-29-decode.json", "temperature 0.8"
    )
    shown += f" {sampled.accept_length.value:.2f} temperature 0.8"
    numbers = set(re.findall(r"\d+\.\d+", reading))
    assert numbers and {n for n in numbers if n not in shown} == set()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The main job's, at one rank and few tokens."""
    path = tmp_path_factory.mktemp("decode") / "decode.json"
    options = ["--tp", "1", "--num-prompts", "4", "--max-new-tokens", "32", "--temperature", "0"]
    assert cli.main(["decode", *options, "--json", str(path)]) == 0
    return path


def test_the_main_jobs_accept_length_from_the_drafters_log(report):
    """The run's own number of cycles gives the interval; the log's rates are somewhat high."""
    run = inputs.read_decode_report(report)
    log = inputs.read_training_log(LOG, "greedy")
    full = log.full_accuracy[: run.num_drafts]
    foretold = viability.accept_length_estimate(full, run.num_cycles)
    assert run.num_cycles > 30
    assert foretold.low <= run.accept_length.value <= foretold.high
    assert foretold.high - foretold.low < 1.0


def test_the_main_jobs_accept_length_from_its_own_log(report):
    """From half of its texts to the other half: within the interval of as many cycles."""
    one = json.loads(report.read_text())["passes"][0]
    halves = [
        [accepted for prompt in one["prompts"][i::2] for accepted in prompt["accepted"]]
        for i in (0, 1)
    ]
    full, lengths = [], []
    for half in halves:
        full.append([sum(a > i for a in half) / len(half) for i in range(3)])
        lengths.append(1 + sum(half) / len(half))
    assert lengths == pytest.approx([viability.accept_length(f) for f in full])
    # Both halves were counted: their difference varies as a run of n1 n2 / (n1 + n2) cycles.
    num = round(1 / sum(1 / len(half) for half in halves))
    foretold = viability.accept_length_estimate(full[0], num)
    assert foretold.low <= lengths[1] <= foretold.high


def test_the_main_jobs_speed_from_its_own_log(report):
    """Accept length and whole cycle give the measured tok/s, but for tokens cut at texts' ends."""
    run = inputs.read_decode_report(report)
    one = json.loads(report.read_text())["passes"][0]
    foretold = run.accept_length.through(lambda x: viability.tok_s(x, run.cycle_ms))
    measured = one["speculative_tok_s"]
    emitted = sum(a + 1 for prompt in one["prompts"] for a in prompt["accepted"])
    cut = emitted - (one["num_tokens"] - len(one["prompts"]))
    assert 0 <= cut <= run.num_drafts * len(one["prompts"])
    assert foretold.value * (1 - cut / emitted) == pytest.approx(measured)
    assert foretold.low <= measured <= foretold.high
    # What its phases alone foretell is never slower: they are parts of the cycle.
    phases = viability.tok_s(run.accept_length.value, sum(one["phases_ms"].values()))
    assert phases >= measured
    assert run.plain_tok_s == pytest.approx(one["plain_tok_s"])
