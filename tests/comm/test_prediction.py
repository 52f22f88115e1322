"""What is predicted for the described boxes, as printed and as docs/allreduce.md has it."""

import json
import re
from pathlib import Path

import pytest

from spec_kernels.comm.prediction import predict, render
from spec_kernels.comm.schedules import algorithms_for
from spec_kernels.comm.selection import box_for, one_switch
from spec_kernels.comm.simulator import boxes
from spec_kernels.comm.tuning import TOKENS
from spec_kernels.comm.validation import compare

DOCS = Path(__file__).resolve().parents[2] / "docs" / "allreduce.md"
BOXES = boxes()
EXACT = algorithms_for(8, 4)
NAMES = algorithms_for(8, 4, lossy=True)


def markdown_of_a_box(name):
    """The table that docs/allreduce.md has of a box."""
    p = predict(BOXES[name], 8)
    lines = [
        f"| tokens | bytes | {' | '.join(NAMES)} | 122 a step, ms |",
        f"| {' | '.join(['---'] * (len(NAMES) + 3))} |",
    ]
    for tokens in TOKENS:
        us = {r.algorithm: r.us[1] for r in p.rows if r.num_bytes == 14336 * tokens}
        best = min(EXACT, key=us.get)
        cells = [f"**{us[n]:.1f}**" if n == best else f"{us[n]:.1f}" for n in NAMES]
        step = 122 * us[best] / 1e3
        lines.append(f"| {tokens} | {14336 * tokens} | {' | '.join(cells)} | {step:.2f} |")
    return lines


def markdown_of_the_misfits():
    lines = []
    for r in compare():
        if r.misfit:
            measured = f"{r.low:g}" if r.low == r.high else f"{r.low:g}-{r.high:g}"
            lines.append(
                f"| {r.box} | {r.what} | {measured} {r.unit} | {r.predicted:.4g} | {r.error:+.0%} |"
            )
    return lines


@pytest.mark.parametrize("name", BOXES)
def test_the_documented_tables_are_what_is_predicted(name):
    text = DOCS.read_text()
    assert f"**{name}**" in text
    assert "\n".join(markdown_of_a_box(name)) in text


def test_the_documented_misfits_are_all():
    text = DOCS.read_text()
    rows = markdown_of_the_misfits()
    assert [row for row in rows if row not in text] == []
    # Nor any that is none.
    documented = re.findall(r"^\| .* \| [+-]\d+% \|$", text, re.MULTILINE)
    assert len(documented) == len(rows)
    free = [r for r in compare() if r.origin == "prediction"]
    assert f"{sum(not r.misfit for r in free)} of {len(free)}" in text


@pytest.mark.parametrize("name", BOXES)
def test_the_text(name):
    p = predict(BOXES[name], 8)
    lines = render(p)
    text = "\n".join(lines)
    assert lines[1].startswith("PREDICTED by the simulator")
    assert text.count("*") == len(TOKENS) + 1  # one winner a size, and the legend
    assert all(len(line) <= 140 for line in lines[1:])
    for e in p.selection.entries:
        assert f"{e.max_bytes} bytes  {e.algorithm}" in text
    assert p.selection.origin == "predicted"
    assert ("set no parameter within 15%" in text) == bool(p.comparisons)
    again = json.loads(json.dumps(p.as_dict()))
    assert again["origin"] == "predicted" and len(again["rows"]) == len(p.rows)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6, 7])
def test_any_group(num_ranks):
    """A machine of which nothing is known, and ranks that make no islands."""
    p = predict(box_for(num_ranks, one_switch(8)), num_ranks, tokens=(1, 4), hidden=64)
    assert p.island_size == 0 and p.comparisons == ()
    text = "\n".join(render(p))
    assert "no islands" in text and "hier" not in text


def test_answers():
    """What the simulator is for: which algorithm on which box at which size."""
    best = {}
    for name, box in BOXES.items():
        rows = predict(box, 8).rows
        for tokens in TOKENS:
            us = {r.algorithm: r.us[1] for r in rows if r.num_bytes == 14336 * tokens}
            best[name, tokens] = min(EXACT, key=us.get)
    # Where posted writes collapse, only the form that keeps each switch to one root port is left.
    assert {best["asus-esc8000a-broadcom", t] for t in TOKENS} == {"hierarchical"}
    # Elsewhere one token goes in one shot and a batch in two.
    for name in set(BOXES) - {"asus-esc8000a-broadcom"}:
        assert best[name, 1] == "one_shot"
        assert {best[name, t] for t in (3, 4, 8, 16, 64)} == {"two_shot"}
