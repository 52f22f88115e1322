"""Plots and page: drawn, legible, true to the answer, and free of the network."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_kernels.planning import page, plots, published, published_case, report, viability
from spec_kernels.planning.answer import Cycle, make_answer
from spec_kernels.planning.inputs import by_hand
from spec_kernels.planning.parts import CycleCost, CyclePart

pytest.importorskip("matplotlib", reason="matplotlib (the extra plots) is missing")
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.image import imread  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.text import Text  # noqa: E402

DRAFTER = by_hand((0.742, 0.47, 0.29, 0.15, 0.097), num_cycles=300)


def cycles(*times):
    return [Cycle(ms, "given") for ms in times]


def answers():
    case = published_case.case()
    return {
        "published": case,
        "costs": dataclasses.replace(case, costs=published.predicted_cycle()),
        "many": make_answer(
            (95.0, 100.0, 300.0), cycles(30, 29, 20, 15, 12, 10, 9), 5, 1, 92.4, DRAFTER
        ),
        "one draft": make_answer((150.0, 200.0), cycles(30, 15), 1, 1, 82.0),
        "out of reach": make_answer((900.0,), cycles(30), 2, 1, 82.0),
        "far apart": make_answer((150.0,), cycles(400, 2), 3, 1, 82.0, DRAFTER),
        "batch": make_answer((1000.0, 2000.0), cycles(45), 3, 32, 958.0, DRAFTER),
        "no plain": make_answer((150.0,), cycles(15), 2),
        "measured": dataclasses.replace(
            case, costs=CycleCost((CyclePart("all of it", 15.0, 15.0, 15.0, "measured", "us"),))
        ),
        "long title": dataclasses.replace(
            case, costs=dataclasses.replace(published.predicted_cycle(), title="many words " * 25)
        ),
    }


@pytest.fixture(params=answers())
def answer(request):
    return answers()[request.param]


@pytest.mark.parametrize("suffix", plots.SUFFIXES)
def test_files_of_each_kind(suffix, tmp_path):
    path = tmp_path / f"plots{suffix}"
    plots.draw(answers()["costs"], path)
    assert path.read_bytes().startswith(
        {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    )
    if suffix == ".png":
        # README's width and more; neither blank nor filled.
        image = imread(path)
        assert image.shape[1] == 1500
        assert 0.3 < (image[..., :3].min(-1) > 0.95).mean() < 0.9


def test_the_same_answer_gives_the_same_file(tmp_path):
    for name in ("one.svg", "other.svg"):
        plots.draw(answers()["no plain"], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def drawn(answer, monkeypatch):
    """The figure that ``draw`` would write."""
    kept = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: kept.append(figure))
    plots.draw(answer, "x.png")
    (figure,) = kept
    return figure


def test_no_text_covers_another(answer, monkeypatch):
    figure = drawn(answer, monkeypatch)
    texts, draw = [], Text.draw

    def noted(text, *args, **options):
        texts.append(text)
        return draw(text, *args, **options)

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # Ticks beyond the axes have texts too, which are not drawn.
    monkeypatch.setattr(Text, "draw", noted)
    canvas.draw()
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in texts
        if text.get_visible() and text.get_text().strip()
    ]
    assert len(boxes) > 20
    outer = figure.bbox
    for text, box in boxes:
        assert outer.x0 <= box.x0 and box.x1 <= outer.x1, text
        assert outer.y0 <= box.y0 and box.y1 <= outer.y1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 1, (one, other)
    for line in figure.findobj(lambda x: isinstance(x, Line2D) and x.get_marker() in ("o", "D")):
        for x, y in line.get_transform().transform(line.get_xydata()):
            for text, box in boxes:
                assert not (box.x0 <= x <= box.x1 and box.y0 <= y <= box.y1), text


def test_lines_are_the_formulas(answer):
    axes = Figure().subplots()
    plots.draw_speeds(axes, answer)
    p = np.linspace(0, 1, 101)
    by_label = {line.get_label().split(":")[0]: line for line in axes.get_lines()}
    for cycle in answer.cycles:
        line = by_label[f"{cycle.ms:.3g} ms a cycle"]
        lengths = viability.chain_accept_length(p, answer.num_drafts)
        expected = viability.tok_s(lengths, cycle.ms, answer.batch)
        assert np.allclose(line.get_xdata(), p) and np.allclose(line.get_ydata(), expected)
    even = by_label.get("break-even")
    reached = [r for r in answer.break_even if r.reachable and r.accept_length > 1]
    assert (even is not None) == bool(reached)
    if even is not None:
        for x, y, r in zip(even.get_xdata(), even.get_ydata(), reached, strict=True):
            lengths = viability.chain_accept_length(x, answer.num_drafts)
            assert y == answer.plain_tok_s
            assert viability.tok_s(lengths, r.cycle_ms, answer.batch) == pytest.approx(y)


def test_the_legend_says_where_nothing_is_to_be_had():
    axes = Figure().subplots()
    plots.draw_speeds(axes, make_answer((150.0,), cycles(10, 30, 60), 2, 1, 82.0))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[:3] == [
        "10 ms a cycle: faster at any p",
        "30 ms a cycle: break-even at 0.81",
        "60 ms a cycle: slower at any p",
    ]


def test_map_lines_are_of_equal_speed(answer):
    axes = Figure().subplots()
    plots.draw_map(axes, answer)
    known = {*answer.targets, answer.plain_tok_s}
    for line in axes.get_lines():
        if line.get_color() != "white":
            continue
        lengths = viability.chain_accept_length(line.get_xdata(), answer.num_drafts)
        speeds = viability.tok_s(lengths, line.get_ydata(), answer.batch)
        assert np.ptp(speeds) < 1e-6 * speeds[0]
        assert any(speed and abs(speeds[0] - speed) < 1e-6 * speed for speed in known)


def test_the_waterfall_adds_up():
    costs = published.predicted_cycle()
    axes = Figure().subplots()
    plots.draw_waterfall(axes, costs)
    bars = axes.patches
    assert [bar.get_width() for bar in bars] == pytest.approx(
        [*(part.ms for part in costs.parts), costs.total]
    )
    for bar, following in itertools.pairwise(bars[:-1]):
        assert bar.get_x() + bar.get_width() == pytest.approx(following.get_x())
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == [*(part.name for part in costs.parts), "total"]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=6), st.floats(0.1, 50))
def test_labels_pushed_apart(values, least):
    moved = plots._apart(values, least)
    order = np.argsort(values, kind="stable")
    assert (np.diff(np.array(moved)[order]) >= least * (1 - 1e-6)).all()
    if len(values) > 1 and np.diff(np.sort(values)).min() >= least:
        assert moved == pytest.approx(values)


class Elements(HTMLParser):
    """Tags that are open, and all attributes that could lead somewhere."""

    VOID = {"meta"}

    def __init__(self):
        super().__init__()
        self.open, self.links, self.count = [], [], {}

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.links += [v for k, v in attributes if k in ("href", "xlink:href", "src", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name, num_plots", [("no plain", 2), ("costs", 3)])
def test_the_page_stands_alone(name, num_plots, tmp_path):
    answer = answers()[name]
    path = tmp_path / "page.html"
    page.write(answer, path)
    text = path.read_text()
    elements = Elements()
    elements.feed(text)
    assert elements.open == []
    assert elements.count["svg"] == num_plots
    assert all(link.startswith("#") for link in elements.links)
    # Names of SVG's own are no addresses that a browser would ask.
    addresses = set(re.findall(r"https?://[^\"<\s]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "url(#" in text and "@import" not in text and "<script" not in text
    ids = re.findall(r'<(?:clipPath|pattern) id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    for line in report.render(answer).splitlines():
        assert line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text


def test_what_is_named_in_an_answer_is_text():
    """A file's name must not become markup."""
    cost = CycleCost((CyclePart("<b>&", 1.0, 1.0, 1.0, "measured", "a <script> file"),))
    text = page.render(dataclasses.replace(answers()["no plain"], costs=cost))
    assert "<b>" not in text and "<script" not in text and "&lt;b&gt;&amp;" in text


def test_bad_paths(tmp_path):
    with pytest.raises(ValueError, match=r"plots: path: expected one of .png, .svg, .pdf, got x"):
        plots.draw(answers()["no plain"], tmp_path / "x.jpeg")
    with pytest.raises(OSError):
        plots.draw(answers()["no plain"], tmp_path / "none" / "x.png")
    with pytest.raises(OSError):
        page.write(answers()["no plain"], tmp_path / "none" / "x.html")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for write, name in ((plots.draw, "x.png"), (page.write, "x.html")):
        with pytest.raises(ValueError, match="plots: expected matplotlib, got none .pip install"):
            write(answers()["no plain"], tmp_path / name)
        assert not (tmp_path / name).exists()
