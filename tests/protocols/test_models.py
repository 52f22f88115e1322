"""Spin searches all states of the protocols (allreduce.pml), and finds what breaks a broken one."""

import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("allreduce.pml")
DOCS = MODEL.parents[2] / "docs" / "allreduce.md"
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = pytest.mark.skipif(
    not (shutil.which("spin") and COMPILER),
    reason="spin (Debian: apt-get install spin) or a C compiler is not installed",
)

# Name: definitions, number of states of a whole search.
MODELS = {
    "one-shot, 3 ranks": ("ONE_SHOT RANKS=3", 31021),
    "one-shot, 2 blocks, any grid": ("ONE_SHOT BLOCKS=2", 232197),
    "one-shot, packets of 2 words, 2 tiles": ("ONE_SHOT WORDS=2 TILES=2", 16933),
    "one-shot and two-shot, 3 ranks": ("ONE_SHOT TWO_SHOT RANKS=3", 1011097),
    "hierarchical, 2 islands of 2": ("HIERARCHICAL RANKS=4", 1534913),
    "hierarchical pull, 2 islands of 2": ("HIERARCHICAL_PULL RANKS=4", 690927),
    "one-shot, broadcast and barrier, 3 ranks": ("ONE_SHOT BROADCAST BARRIER RANKS=3", 565893),
    "all but islands, mixed": (
        "ONE_SHOT TWO_SHOT PULL ALL_GATHER BROADCAST BARRIER WORDS=2",
        734389,
    ),
    "death or delay, one-shot, two-shot and broadcast": (
        "BOUNDED ONE_SHOT TWO_SHOT BROADCAST",
        359137,
    ),
    "death or delay, one-shot, two-shot and pull": ("BOUNDED ONE_SHOT TWO_SHOT PULL", 462218),
    "death, one-shot, 3 ranks": ("BOUNDED DEATHS_ONLY ONE_SHOT RANKS=3", 1310924),
    "death, one-shot, 2 blocks": ("BOUNDED DEATHS_ONLY ONE_SHOT BLOCKS=2 FULL_GRID", 555317),
}

WRONG = "assertion violated (memory[c]==n)"  # a word of another call is taken
HANG = "invalid end state"
BROKEN = {
    "one slot": ("ONE_SHOT BREAK_ONE_SLOT", WRONG),
    "one slot in two-shot": ("TWO_SHOT BREAK_ONE_SLOT", WRONG),
    "early launch": ("ONE_SHOT BREAK_EARLY_LAUNCH", WRONG),
    "early launch in two-shot": ("TWO_SHOT BREAK_EARLY_LAUNCH", WRONG),
    "no clear": ("ONE_SHOT BREAK_NO_CLEAR", WRONG),
    "the other slot cleared": ("ONE_SHOT BREAK_WRONG_CLEAR", WRONG),
    "epoch advanced by the first block": ("ONE_SHOT BLOCKS=2 BREAK_EPOCH_BY_FIRST", HANG),
    "an epoch for each block": ("ONE_SHOT BLOCKS=2 BREAK_EPOCH_PER_BLOCK", WRONG),
    "an epoch of the host, replayed": ("ONE_SHOT BREAK_EPOCH_OF_HOST", WRONG),
    "readiness by the first word": ("ONE_SHOT WORDS=2 BREAK_FIRST_WORD_ONLY", WRONG),
    "no fence before a flag": ("ALL_GATHER BREAK_NO_FENCE", WRONG),
    "no fence before a flag, pull": ("PULL BREAK_NO_FENCE", WRONG),
    "a flag that must not be ahead": ("BARRIER BREAK_FLAG_NOT_AHEAD", HANG),
    "a broadcast that nobody confirms": ("BROADCAST BREAK_NO_ACKNOWLEDGEMENT", WRONG),
    "the same before a one-shot": (
        "ONE_SHOT BROADCAST RANKS=3 BREAK_NO_ACKNOWLEDGEMENT",
        WRONG,
    ),
    "no deadline": ("BOUNDED ONE_SHOT BREAK_NO_BOUND", HANG),
    "no poison": ("BOUNDED ONE_SHOT BREAK_NO_POISON", "assertion violated ((out["),
}


def search(definitions, optimise):
    """What Spin's verifier prints of the model with these definitions."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"-D{d}" for d in definitions.split()]
        # Without partial-order reduction: nearly all steps touch what others see.
        commands = (
            ["spin", "-a", *flags, str(MODEL)],
            [COMPILER, "-w", optimise, "-DSAFETY", "-DNOREDUCE", "-o", "pan", "pan.c"],
            ["./pan", "-m400000", "-w22", "-n"],
        )
        for command in commands:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)
            assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def outcomes():
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(search, flags, "-O1") for name, (flags, _) in MODELS.items()}
        for name, (flags, _) in BROKEN.items():
            runs[name] = pool.submit(search, f"{flags} LENIENT=true", "-O0")
        return {name: run.result() for name, run in runs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_no_state_is_wrong_and_none_is_stuck(outcomes, name):
    output = outcomes[name]
    assert "errors: 0" in output and "Warning" not in output, output
    assert "max search depth too small" not in output
    states = int(re.search(r"(\d+) states, stored", output)[1])
    print(f"{name}: {states} states")
    assert states == MODELS[name][1]
    assert f" | {states} |\n" in DOCS.read_text()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_fails(outcomes, name):
    output = outcomes[name]
    assert "errors: 1" in output and BROKEN[name][1] in output, output
