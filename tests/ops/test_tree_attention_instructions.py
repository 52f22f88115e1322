"""Instructions of the CPU kernel against the recorded count: a regression shows without a clock."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from spec_kernels import _library

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted((ROOT / "benchmarks" / "results").glob("*-instructions.json"))[-1]
# The count of one source under one compiler is exact; this is how much a change may cost before it
# has to be recorded anew (benchmarks/count_instructions.py --json), and so looked at.
MARGIN = 0.02
# Of the recorded calls: the decode step of Kimi-K2.5 with 16 nodes in bf16.
CALL = ("mla", "bf16", "same", 1024, 16)


def why_not(recorded, counter):
    for tool in ("g++", "valgrind"):
        if shutil.which(tool) is None:
            return f"no {tool} on PATH"
    if counter.compiler() != recorded["compiler"]:
        return f"recorded with {recorded['compiler']}, here is {counter.compiler()}"
    if _library.cpu_isa() not in ("avx2", "avx512"):
        return f"{recorded['isa']} kernels were counted, this CPU has {_library.cpu_isa()}"
    return None


@pytest.fixture
def counter():
    spec = importlib.util.spec_from_file_location(
        "count_instructions", ROOT / "benchmarks" / "count_instructions.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row_of(recorded):
    names = ("form", "queries", "cache", "context", "num_nodes")
    return next(r for r in recorded["rows"] if tuple(r[n] for n in names) == CALL)


def assert_within_the_margin(instructions, recorded):
    assert instructions <= recorded * (1 + MARGIN), (
        f"{instructions:,} instructions, {recorded:,} recorded in {RECORDED.name}"
    )


def test_the_kernel_takes_no_more_instructions_than_recorded(counter, tmp_path):
    recorded = json.loads(RECORDED.read_text())
    if reason := why_not(recorded, counter):
        pytest.skip(reason)
    program = counter.build(tmp_path, recorded["isa"])
    found = counter.count(program, recorded["isa"], CALL)
    assert_within_the_margin(found, row_of(recorded)["instructions"])


def test_the_margin_sees_a_regression():
    recorded = row_of(json.loads(RECORDED.read_text()))["instructions"]
    assert_within_the_margin(recorded, recorded)
    with pytest.raises(AssertionError, match=r"recorded in .*-instructions\.json"):
        assert_within_the_margin(int(recorded * 1.03), recorded)


def test_another_compiler_is_no_regression(counter, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(counter, "compiler", lambda: "g++ 99")
    reason = why_not({"compiler": "g++ 12", "isa": "avx2"}, counter)
    assert reason == "recorded with g++ 12, here is g++ 99"
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "valgrind" else tool)
    assert why_not({"compiler": "g++ 99", "isa": "avx2"}, counter) == "no valgrind on PATH"
