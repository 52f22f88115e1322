"""The cost model against published cycle times, and what it predicts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from spec_kernels.comm.simulator import boxes
from spec_kernels.planning import published
from spec_kernels.planning.cost_model import Run, cost_curve, cycle_cost
from spec_kernels.planning.measurements import defaults
from spec_kernels.planning.model_shapes import kimi_k25, kimi_k25_drafter

PAGE = Path(__file__).resolve().parents[2] / "docs/planning.md"
BY_NAME = {row.point.name: row for row in published.comparisons()}
TESTS = [row for row in published.comparisons() if not row.point.sets]


@pytest.mark.parametrize(
    "name, ms",
    [
        ("vLLM plain, 0", "10.8"),
        ("vLLM plain, 16k", "12.3"),
        ("vLLM plain, 64k", "16.5"),
        ("vLLM plain, 128k", "21.7"),
        ("vLLM k=3, 0", "20.3"),
        ("vLLM k=3, 16k", "19.7"),
        ("vLLM k=3, 128k", "34.3"),
        ("other host k=3, 0", "15.6"),
        ("other host k=3, 64k", "28.5"),
        ("other host k=3, 128k", "35.0"),
        ("best plain (SGLang), 0", "9.9"),
        ("case: whole cycle, by speed", "33.3"),
        ("case, earlier tuning: plain", "11.1"),
        ("case, earlier: whole cycle", "25.5"),
    ],
)
def test_cycle_times_are_those_of_the_published_speeds(name, ms):
    assert f"{published.point(name).ms:.1f}" == ms


def test_two_points_set_a_rate_and_come_out_exactly():
    fitted = [row for row in published.comparisons() if row.point.sets]
    assert [row.point.sets for row in fitted] == ["kernel_us", "attention_one_gb_s"]
    assert len(TESTS) == 20
    for row in fitted:
        assert row.residual == pytest.approx(0, abs=0.01)
    assert {q.label for q in published.fits().values()} == {"fitted"}
    assert published.engine("vllm, plain").rates["kernel_us"] == published.fits()["kernel_us"]


def test_ours_allows_for_other_numbers_of_kernels_than_the_fit_supposed():
    fitted = published.fits()["kernel_us"]
    ours = published.predicted_costs().rates["kernel_us"]
    assert (ours.value, ours.low, ours.high) == pytest.approx(
        (fitted.value, fitted.low * 30 / 40, fitted.high * 30 / 20)
    )
    assert ours.label == "fitted"


def test_a_fit_follows_its_point():
    p = published.point("vLLM plain, 0")
    slower = published._fit_kernel(replace(p, ms=p.ms + 1.87))
    # A millisecond over 61 x 30 + 40 kernels.
    assert slower.value - published.fits()["kernel_us"].value == pytest.approx(1.0)
    far = published.point("vLLM plain, 128k")
    start = p.ms
    twice = published._fit_attention(replace(far, ms=start + 2 * (far.ms - start)))
    assert twice.value == pytest.approx(published.fits()["attention_one_gb_s"].value / 2)


@pytest.mark.parametrize("row", TESTS, ids=lambda row: row.point.name)
def test_every_point_lies_between_the_stated_ends(row):
    assert row.within(), row.cost.table()
    assert row.within(independent=True)


def test_how_far_the_model_is_off():
    """These are more than 15 % off, and are listed so in the documentation."""
    assert {row.point.name for row in TESTS if not row.near} == {
        "case: whole cycle, by speed",
        "vLLM k=3, 0",
        "plain, batch 32",
        "plain, batch 128",
        "k=3, batch 32",
    }


def test_context_is_predicted_from_one_long_point():
    for name in ("vLLM plain, 16k", "vLLM plain, 64k", "vLLM k=3, 128k", "other host k=3, 128k"):
        assert abs(BY_NAME[name].residual) < 0.07 * BY_NAME[name].point.ms


def test_a_wrong_model_is_noticed():
    """Experts read anew for every token, or the case in a graph, do not give what was published."""
    p = published.point("k=3, batch 128")
    shape, costs = kimi_k25(), published.engine(p.engine)
    anew = replace(shape, num_experts=10**9, experts_a_token=8)
    cost = cycle_cost(anew, costs, p.run, kimi_k25_drafter())
    assert cost.interval()[0] > p.ms
    p = published.point("case: verify, no graphs")
    cost = cycle_cost(
        shape, published.engine(p.engine), replace(p.run, graph=True), kimi_k25_drafter()
    )
    assert cost.spread()[1] < p.ms


def test_the_case_did_not_depend_on_its_attention():
    """Published: about 30 ms whatever the attention mode."""
    p = published.point(published.CASE)
    costs = published.engine(p.engine)
    modes = [
        cycle_cost(kimi_k25(), costs, replace(p.run, reads=reads), kimi_k25_drafter()).total
        for reads in ("once", "each")
    ]
    assert modes[1] - modes[0] < 0.2


def test_the_explanation_adds_up():
    then = published.modelled(published.point(published.CASE))
    now = published.predicted_cycle()
    text = "\n".join(published.explanation())
    for part in (*then.parts, *now.parts):
        assert part.name in text and part.source in text
    assert f"{then.total:.1f}" in text and f"{now.total:.1f}" in text
    assert sum(part.ms for part in then.parts) == pytest.approx(then.total)
    # Every part of ours is at most what it was; launches are gone.
    ours = {part.name: part.ms for part in now.parts}
    assert "launches, not hidden" not in ours
    for part in then.parts:
        assert ours.get(part.name, 0) <= part.ms + 1e-9
    low, high = now.spread()
    assert high < 30 and low < now.total < high


def test_the_implied_launch_would_explain_the_rest():
    lines = published.explanation()
    (line,) = [line for line in lines if line.startswith("A launch of")]
    us = float(line.split()[3])
    p = published.point(published.CASE)
    costs = published.engine(p.engine)
    eager = replace(costs.rates["eager_us"], value=us)
    cost = cycle_cost(kimi_k25(), costs.with_rates(eager_us=eager), p.run, kimi_k25_drafter())
    assert cost.total == pytest.approx(p.ms, abs=0.1)


@pytest.mark.parametrize("box", boxes())
def test_every_box_is_predicted(box):
    for steps in (2, 3):
        cost = published.predicted_cycle(box, steps)
        assert 5 < cost.total < 25
        assert box in cost.title


def test_reading_the_cache_once_at_long_context():
    """4.6 GB of fp8 latent at 1.79 TB/s are 2.6 ms; read for each of four nodes, 10."""
    run = Run(4, 3, 131072, cache_bytes=1)
    peak = replace(defaults().rates["attention_gb_s"], value=1790)
    costs = defaults().with_rates(attention_gb_s=peak, attention_one_gb_s=peak)
    once, each = (
        cycle_cost(kimi_k25(), costs, replace(run, reads=reads), kimi_k25_drafter())
        for reads in ("once", "each")
    )
    assert f"{once.part('attention').ms:.1f}" == "2.6"
    assert f"{each.part('attention').ms:.0f}" == "10"


def test_the_table_counts_tests_and_shows_residuals():
    lines = published.comparison_table()
    text = "\n".join(lines)
    assert "22 published points: 2 set a rate each, 20 are tests." in text
    for row in published.comparisons():
        (line,) = [line for line in lines if line.startswith(f"{row.point.name:27}")]
        assert f"{row.point.ms:.1f}" in line and f"{row.residual:+.1f}" in line
    assert "OUTSIDE" not in text


def test_unknown_points_are_refused():
    with pytest.raises(ValueError, match="name: expected one of case: plain.*got 'x'"):
        published.point("x")


def test_no_graph_is_in_the_thirty_milliseconds_for_certain():
    p = published.point(published.CASE)
    costs = published.engine(p.engine)
    captured = cycle_cost(kimi_k25(), costs, replace(p.run, graph=True), kimi_k25_drafter())
    assert captured.interval()[1] < p.ms


@pytest.mark.skipif(not PAGE.exists(), reason="docs/planning.md: not in a source tree")
def test_the_documentation_shows_what_the_model_says():
    text = PAGE.read_text()
    section = text[text.index("## Where a cycle's time goes") :]
    then = published.modelled(published.point(published.CASE))
    launches = re.search(
        r"take ([\d.]+) ms, .* works ([\d.]+) ms", then.part("launches, not hidden").source
    )
    for figure in launches.groups():
        assert f"{figure} ms" in section
    captured = cycle_cost(
        kimi_k25(),
        published.engine("case, verify"),
        replace(published.point(published.CASE).run, graph=True),
        kimi_k25_drafter(),
    )
    assert f"{captured.total:.1f} ms, and {captured.interval()[1]:.1f} with" in " ".join(
        section.split()
    )
    assert f"{published.fits()['attention_one_gb_s'].value:.0f} GB/s" in section
    assert "\n".join(published.comparison_table()) in section
    sizes = (1, 2, 3, 4, 8, 16, 32, 64)
    curve = cost_curve(kimi_k25(), published.predicted_costs(), sizes)
    assert "ms     " + "".join(f"{ms:6.1f}" for ms in curve.values()) in section
    (example,) = re.findall(r"```json\n(.*?)```", section, re.S)
    costs = defaults().updated(json.loads(example))
    assert costs.allreduce_us[57344].high == 17.0
