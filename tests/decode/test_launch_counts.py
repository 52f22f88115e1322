"""The launch table of docs/decoding.md is counted, and a MoE layer keeps within its twelve."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from spec_kernels.comm import Communicator

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "decoding.md"
if not PAGE.is_file():
    pytest.skip(f"{PAGE}: not in a source tree", allow_module_level=True)

ROWS = {
    "plain": "plain",
    "chain of 3": "chain of 3, likeliest or drawn",
    "chain of 3, drawn": "chain of 3, likeliest or drawn",
    "static, 16 nodes": "static tree of 16 nodes",
    "dynamic, 16 nodes": "dynamic tree of 16 nodes",
}


@pytest.fixture(scope="module")
def launches():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import decode_launches

        yield decode_launches
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("kind", ROWS)
def test_the_pages_table_is_what_is_counted(launches, kind):
    found = launches.count(Communicator.single(), kind)
    (row,) = re.findall(rf"^\| {ROWS[kind]} \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    total, *parts = [int(x) for x in row.split("|")]
    order = ("draft", "build", "target forward", "extend", "advance")
    assert [found.total, *(found.parts[p] for p in order)] == [total, *parts[:-1]]
    assert total == sum(parts)
    assert (found.attention, found.norms, found.experts) == (9, 2, 1)
    assert found.layer <= 12
