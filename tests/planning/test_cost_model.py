"""The cost of a cycle: bytes by shape, what grows with what, curves and files."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels.decode.adaptive import CostTable
from spec_kernels.models.config import DrafterConfig, TargetConfig
from spec_kernels.models.pair import ASSETS
from spec_kernels.planning.cost_model import Run, chain_costs, cost_curve, cycle_cost, draft_step_ms
from spec_kernels.planning.measurements import RATES, defaults, load, on_box
from spec_kernels.planning.model_shapes import (
    DrafterShape,
    TargetShape,
    kimi_k25,
    kimi_k25_drafter,
)
from spec_kernels.planning.parts import Quantity

TARGET, DRAFTER = kimi_k25(), kimi_k25_drafter()
BOX = "wrx90-two-switches"


def exactly(value):
    return Quantity.exactly(value, "assumed", "a test")


def cost(run, costs=None):
    return cycle_cost(TARGET, costs or on_box(BOX), run, DRAFTER)


# Bytes.


@pytest.mark.parametrize(
    "num_tokens, experts, gigabytes",
    [
        (1, "8.0", "6.03"),
        (3, "23.5", "8.91"),
        (4, "31.0", "10.31"),
        (8, "59.5", "15.60"),
        (16, "109.8", "24.95"),
        (32, "188.2", "39.52"),
        (64, "284.2", "57.35"),
    ],
)
def test_bytes_of_a_step_at_eight_ranks(num_tokens, experts, gigabytes):
    assert f"{TARGET.distinct_experts(num_tokens):.1f}" == experts
    assert f"{TARGET.step_bytes(num_tokens) / 1e9:.2f}" == gigabytes


def test_published_sizes_of_the_model():
    assert f"{TARGET.held_bytes / 1e9:.1f}" == "76.2"
    assert TARGET.cache_bytes_a_token(2) == 70272
    assert f"{TARGET.cache_bytes_a_token(1) * 131072 / 1e9:.1f}" == "4.6"
    assert TARGET.num_allreduces == 122
    assert TARGET.message_bytes(1) == 14336


@given(st.integers(1, 400))
def test_distinct_experts_grow_and_flatten(num_tokens):
    a, b, c = (TARGET.distinct_experts(num_tokens + i) for i in range(3))
    assert a < b < c < 384 or math.isclose(c, 384)
    assert c - b <= b - a
    assert a <= 8 * num_tokens + 1e-9


def test_shapes_are_those_of_the_weights():
    """The bundled checkpoint's own tensors, summed: what one rank of one holds."""
    from safetensors import safe_open

    config = TargetConfig.from_json(ASSETS / "target")
    shape = TargetShape.from_config(config, 1)
    num_elements = 0
    for path in sorted((ASSETS / "target").glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            num_elements += sum(
                math.prod(f.get_slice(name).get_shape())
                for name in f.keys()  # noqa: SIM118  not a mapping
            )
    bias = config.n_routed_experts * shape.num_moe_layers  # float32, counted with 4 bytes
    assert shape.held_bytes == 2 * num_elements + 2 * bias

    drafter = DrafterConfig.from_json(ASSETS / "drafter")
    mine = DrafterShape.from_config(drafter, 1)
    num_elements = 0
    for path in sorted((ASSETS / "drafter").glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            num_elements += sum(
                math.prod(f.get_slice(name).get_shape())
                for name in f.keys()  # noqa: SIM118
                if name not in ("d2t", "t2d")
            )
    assert mine.step_bytes + mine.extend_bytes == 2 * num_elements


def test_what_ranks_cannot_split_is_refused():
    config = TargetConfig.from_json(ASSETS / "target")
    with pytest.raises(ValueError, match="num_attention_heads: expected a multiple of 3 ranks"):
        TargetShape.from_config(config, 3)
    with pytest.raises(ValueError, match="expert_bits: expected 4 or 16, got 8"):
        TargetShape.from_config(config, 1, expert_bits=8)
    # 64 / 8 = 8 columns of a down projection hold no group of 32.
    with pytest.raises(ValueError, match="intermediate: expected a multiple of groups of 32"):
        TargetShape.from_config(config, 8, expert_bits=4, expert_group=32)
    with pytest.raises(ValueError, match="num_ranks: expected an integer >= 1, got 0"):
        DrafterShape.from_config(DrafterConfig.from_json(ASSETS / "drafter"), 0)


# The cycle.


def test_the_floor_of_a_verify_of_four_and_of_a_plain_step():
    """Published: 10.31 GB / 1.79 TB/s = 5.8 ms and 122 x 16 us = 2 ms; plainly 3.4 + 1.4 ms."""
    rates = {
        "bandwidth_gb_s": exactly(1790),
        "routing": exactly(1),
        "kernel_us": exactly(1e-9),
        "host_ms": exactly(0),
    }
    for num, us, weights, sums in ((4, 16, "5.8", "2.0"), (1, 11.5, "3.4", "1.4")):
        costs = replace(defaults(), allreduce_us={1 << 20: exactly(us)}).with_rates(**rates)
        found = cost(Run(num_nodes=num), costs)
        assert f"{found.part('weights').ms:.1f}" == weights
        assert f"{found.part('allreduce').ms:.1f}" == sums
        assert found.total == pytest.approx(float(weights) + float(sums), abs=0.1)


@settings(max_examples=60, deadline=None)
@given(
    num_nodes=st.integers(1, 40),
    more=st.integers(0, 40),
    context=st.integers(0, 200_000),
    batch=st.integers(1, 8),
    steps=st.integers(0, 5),
    graph=st.booleans(),
    reads=st.sampled_from(["once", "each"]),
)
def test_more_work_never_takes_less_time(num_nodes, more, context, batch, steps, graph, reads):
    run = Run(num_nodes, steps, context, batch, graph, reads, cache_bytes=1)
    base = cost(run)
    assert base.total == pytest.approx(sum(part.ms for part in base.parts))
    low, high = base.interval()
    assert low <= base.total <= high
    bigger = [
        replace(run, num_nodes=num_nodes + more),
        replace(run, context=context + 1000 * more),
        replace(run, batch=batch + more),
        replace(run, draft_steps=steps + more),
        replace(run, graph=False),
        replace(run, reads="each"),
        replace(run, cache_bytes=2),
    ]
    for other in bigger:
        assert cost(other).total >= base.total - 1e-9


def test_without_a_graph_the_longer_of_host_and_device_counts():
    run = Run(3, 2, graph=False)
    device = cost(replace(run, graph=True))
    for us in (0.1, 50):
        costs = on_box(BOX).with_rates(eager_us=exactly(us))
        num, num_low = 61 * 15 + 20 + 2 * 16, 61 * 13 + 10 + 2 * 12
        host = num * us / 1e3
        rest = device.part("host").ms
        found = cost(run, costs)
        assert found.total == pytest.approx(max(device.total - rest, host) + rest)
        launches = found.part("launches, not hidden")
        assert (launches.ms > 0) == (us == 50)
        if us == 50:
            most = device.interval()[1] - device.part("host").high
            assert launches.low <= launches.ms <= launches.high
            assert launches.low >= num_low * us / 1e3 - most > 0


def test_a_kernel_that_reads_the_cache_for_every_node():
    """k + 1 readings of a latent cache; together they may reach more bandwidth than one."""
    costs = on_box(BOX).with_rates(attention_gb_s=exactly(1000), attention_one_gb_s=exactly(400))
    once = cost(Run(4, 3, 100_000, cache_bytes=1), costs).part("attention").ms
    each = cost(Run(4, 3, 100_000, cache_bytes=1, reads="each"), costs).part("attention").ms
    num_bytes = 100_000 * 576 * 61
    assert once == pytest.approx(num_bytes / 400e6)
    assert each == pytest.approx(4 * num_bytes / 1000e6)


def test_every_part_says_where_it_is_from():
    for part in cost(Run(3, 2, 4096, graph=False)).parts:
        assert part.source and part.label in ("modelled", "assumed")
    assert cost(Run(3, 2)).part("allreduce").source.startswith("122 of ")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_nodes": 0}, "num_nodes: expected an integer >= 1, got 0"),
        ({"context": -1}, "context"),
        ({"batch": 1.5}, "batch"),
        ({"draft_steps": True}, "draft_steps"),
        ({"reads": "twice"}, "reads: expected one of once, each, got 'twice'"),
        ({"cache_bytes": 4}, "cache_bytes"),
    ],
)
def test_runs_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        Run(**fields)


def test_drafts_need_a_drafter():
    with pytest.raises(ValueError, match="drafter: expected its shape"):
        cycle_cost(TARGET, defaults(), Run(3, 2))


def test_every_part_by_hand():
    def rate(value, low, high):
        return Quantity(value, low, high, "assumed", "a test")

    rates = {
        "bandwidth_gb_s": rate(1000, 500, 2000),
        "routing": rate(0.5, 0.25, 1),
        "attention_gb_s": rate(800, 400, 1600),
        "attention_one_gb_s": rate(300, 200, 400),
        "kernel_us": rate(2, 1, 3),
        "eager_us": rate(40, 5, 90),
        "layer_kernels": rate(10, 9, 11),
        "drafter_kernels": rate(5, 4, 6),
        "other_kernels": rate(40, 30, 50),
        "host_ms": rate(0.5, 0.25, 1),
        "nccl_us": rate(20, 10, 40),
        "nccl_bus_gb_s": rate(14.336 * 1.75, 14.336 * 1.75 / 2, 14.336 * 3.5),
    }
    costs = replace(defaults(), rates=rates)
    run = Run(3, 2, 10_000, batch=2, graph=False)
    found = cost(run, costs)
    first, rest = 6.0302e9, 185794560 * (384 * (1 - (47 / 48) ** 6) - 8)

    def ends(name):
        part = found.part(name)
        return pytest.approx((part.low, part.ms, part.high), rel=1e-4)

    def gb(num_bytes, *gb_s):
        return [n / r / 1e6 for n, r in zip(num_bytes, gb_s, strict=True)]

    weights = gb([first + x * rest for x in (0.25, 0.5, 1)], 2000, 1000, 500)
    assert weights == ends("weights")
    assert gb([2 * 10_000 * 70272] * 3, 800, 600, 400) == ends("attention")
    # Six rows of bf16: six microseconds for each one's 14336 bytes.
    sums = [122e-3 * us for us in (10 + 3, 20 + 6, 40 + 12)]
    assert sums == ends("allreduce")
    counts = [61 * k + o for k, o in ((9, 30), (10, 40), (11, 50))]
    kernels = [c * us / 1e3 for c, us in zip(counts, (1, 2, 3), strict=True)]
    assert kernels == ends("small kernels")
    read = 2 * 462479360 + 38535168
    cache = gb([2 * 10_000 * 4096] * 3, 800, 600, 400)
    drafter = [
        r + 2 * c + 2 * n * us / 1e3 + 4e-3 * s
        for r, c, n, us, s in zip(
            gb([read] * 3, 2000, 1000, 500), cache, (4, 5, 6), (1, 2, 3), (11, 22, 44), strict=True
        )
    ]
    assert drafter == ends("drafter")
    device = [
        sum(x)
        for x in zip(weights, ends_of(found, "attention"), sums, kernels, drafter, strict=True)
    ]
    host = [(c + 2 * n) * us / 1e3 for c, n, us in zip(counts, (4, 5, 6), (5, 40, 90), strict=True)]
    low, value, high = (h - d for h, d in zip(host, device, strict=True))
    assert low < 0 < value < high, "the case is meant to have a host that is not always slower"
    assert [0.0, value, high] == ends("launches, not hidden")
    assert [0.25, 0.5, 1] == ends("host")


def ends_of(found, name):
    part = found.part(name)
    return part.low, part.ms, part.high


# Curves.


def test_the_curve_is_the_pass_without_the_drafter():
    sizes = [1, 2, 4, 8, 16, 32, 64]
    curve = cost_curve(TARGET, BOX, sizes)
    assert list(curve) == sizes and list(curve.values()) == sorted(curve.values())
    assert curve[4] == cost(Run(4)).total
    step = draft_step_ms(TARGET, DRAFTER, BOX)
    assert 0 < step < curve[1]
    # Three forwards, of which one is over committed rows, are what the cycle adds.
    assert cost(Run(4, 3)).total == pytest.approx(curve[4] + 3 * step, rel=0.02)


def test_a_measured_curve_stands_for_the_model(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(
        json.dumps({"format": "spec-kernels costs", "cost_curve_ms": {"1": 9, "5": 13}})
    )
    costs = load(path)
    assert cost_curve(TARGET, costs, [1, 2, 5]) == {1: 9, 2: 10, 5: 13}
    with pytest.raises(ValueError, match="num_tokens: expected 1 to 5 as measured, got 6"):
        cost_curve(TARGET, costs, [6])


def test_a_curve_for_a_box_that_nobody_described():
    with pytest.raises(ValueError, match="name: expected one of asus.*got 'mine'"):
        cost_curve(TARGET, "mine", [1])
    with pytest.raises(ValueError, match="num_tokens: expected an integer >= 1, got 0"):
        cost_curve(TARGET, BOX, [0])


# Files.


def write(tmp_path, data):
    path = tmp_path / "file.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_costs_file_reads_back(tmp_path):
    costs = on_box(BOX)
    again = load(write(tmp_path, costs.as_dict()))
    assert again == costs
    assert set(again.rates) == set(RATES)


def test_a_users_figures_replace_the_assumed_ones(tmp_path):
    data = {
        "format": "spec-kernels costs",
        "version": 1,
        "about": "my box, 12 March",
        "rates": {"bandwidth_gb_s": 1500, "kernel_us": {"value": 2, "low": 1.5, "high": 3}},
        "allreduce_us": {"14336": 10, "57344": 16},
        "draft_step_ms": 0.75,
    }
    costs = load(write(tmp_path, data))
    assert costs.rates["bandwidth_gb_s"] == Quantity(
        1500, 1500, 1500, "measured", "my box, 12 March"
    )
    assert costs.rates["kernel_us"].high == 3
    assert costs.rates["host_ms"] == defaults().rates["host_ms"]
    found = cost(Run(2, 2), costs)
    assert found.part("allreduce").ms == pytest.approx(122 * 12e-3)  # a third of the way
    assert found.part("allreduce").label == "measured"
    assert found.part("drafter").ms == pytest.approx(1.5)
    # Longer messages than the file lists are NCCL's.
    assert cost(Run(8), costs).part("allreduce").ms > 122 * 21e-3


@pytest.mark.parametrize(
    "data, message",
    [
        ("{", "expected JSON"),
        ("3", "file: expected an object, got 3"),
        ({}, "format: expected 'spec-kernels costs'"),
        ({"format": "other"}, "format: expected 'spec-kernels costs', got 'other'"),
        ({"format": "spec-kernels costs", "version": 2}, "version: expected 1, got 2"),
        ({"format": "spec-kernels costs", "speed": 1}, "speed: expected no such field, got 1"),
        ({"format": "spec-kernels costs", "rates": []}, "rates: expected an object"),
        ({"format": "spec-kernels costs", "rates": {"x": 1}}, "rates: x: expected one of bandw"),
        ({"format": "spec-kernels costs", "rates": {"kernel_us": 0}}, "kernel_us: .*> 0"),
        ({"format": "spec-kernels costs", "rates": {"kernel_us": "2"}}, "kernel_us: .*'2'"),
        (
            {"format": "spec-kernels costs", "rates": {"kernel_us": {"value": 2, "low": 3}}},
            "kernel_us: .*ascending",
        ),
        ({"format": "spec-kernels costs", "rates": {"kernel_us": {"low": 3}}}, "a value"),
        ({"format": "spec-kernels costs", "rates": {"kernel_us": {"us": 3}}}, "kernel_us: .*us"),
        ({"format": "spec-kernels costs", "allreduce_us": {"x": 1}}, "whole numbers >= 1, got 'x'"),
        (
            {"format": "spec-kernels costs", "cost_curve_ms": {"0": 1}},
            "whole numbers >= 1, got '0'",
        ),
        ({"format": "spec-kernels costs", "about": ""}, "about: expected where"),
        ({"entries": [], "origin": "measured"}, "entries: expected times.*bench allreduce"),
        ([], "the rows of one machine"),
        ([{"rows": []}], "rows: expected a list of all-reduces"),
        ([{"rows": [{"bytes": 0}]}], "rows: 0: bytes: expected an integer >= 1, got 0"),
        ([{"rows": [{"bytes": 8, "us_p50": "x"}]}], "rows: 0: us_p50: expected a number"),
        ({"phases_ms": {}}, "draft: expected an object"),
        ({"phases_ms": {}, "draft": {"steps": 0}}, "draft: steps: expected an integer >= 1"),
        (
            {"phases_ms": {"draft": 1}, "draft": {"steps": 3, "num_nodes": 4}},
            "phases_ms: expected the phases accept, build, extend, verify too",
        ),
    ],
)
def test_a_bad_file_is_named_with_the_field(tmp_path, data, message):
    path = write(tmp_path, data)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(error.value).startswith(str(path))


def test_rows_of_the_all_reduce_bench(tmp_path, capsys):
    from spec_kernels import cli

    assert cli.main(["bench", "allreduce", "--box", BOX, "--json"]) == 0
    costs = load(write(tmp_path, capsys.readouterr().out))
    simulated = on_box(BOX)
    for size in (14336, 57344):
        assert "simulated" in costs.allreduce_us[size].source
        assert costs.allreduce_us[size] == replace(
            simulated.allreduce_us[size], source=costs.allreduce_us[size].source
        )
    row = {"bytes": 14336, "us_p10": 9, "us_p50": 10, "us_p90": 14, "check": "bit-exact"}
    rows = [
        row | {"algorithm": "two_shot_int8", "us_p50": 9.5},  # lossy: never chosen
        row | {"algorithm": "one_shot"},
        row | {"algorithm": "NCCL", "us_p50": 13},
    ]
    costs = load(write(tmp_path, [{"title": "eight", "rows": rows}]))
    q = costs.allreduce_us[14336]
    assert (q.value, q.low, q.high, q.label) == (10, 9, 14, "measured")
    assert "one_shot" in q.source


def test_phases_of_the_main_job(tmp_path):
    phases = {"draft": 2.0, "build": 0.25, "verify": 6.0, "accept": 0.5, "extend": 1.0}
    one = {
        "name": "greedy",
        "phases_ms": phases,
        "plain_step_ms": 5.0,
        "num_cycles": 40,
        "num_tokens": 101,
        "speculative_tok_s": 250.0,  # 100 decoded tokens in 0.4 s: 10 ms a cycle
        "prompts": [{}],
    }
    report = one | {"draft": {"steps": 3, "num_nodes": 4}, "passes": [one]}
    costs = load(write(tmp_path, report))
    (cycle,) = costs.cycles
    assert cycle.total == pytest.approx(10.0)
    assert [part.name for part in cycle.parts] == [*phases, "between phases"]
    assert {part.label for part in cycle.parts} == {"measured"}
    assert costs.draft_step_ms.value == 1.0
    assert cost_curve(TARGET, costs, [1, 4]) == {1: 5.0, 4: 6.75}
    one["num_cycles"] = 0
    with pytest.raises(ValueError, match="num_cycles: expected a number > 0: nothing was decoded"):
        load(write(tmp_path, report))


def test_the_report_of_a_real_run(tmp_path):
    from spec_kernels import cli

    path = tmp_path / "decode.json"
    options = "--tp 1 --num-prompts 1 --max-new-tokens 12 --temperature 0 --draft-steps 2"
    assert cli.main(["decode", *options.split(), "--json", str(path)]) == 0
    costs = load(path)
    (cycle,) = costs.cycles
    report = json.loads(path.read_text())
    assert cycle.total >= sum(report["phases_ms"].values()) * (1 - 1e-12)
    assert cycle.part("verify").ms == report["phases_ms"]["verify"]
    assert list(costs.cost_curve_ms) == [1, 3]


def test_costs_of_chains_are_whole_cycles():
    grid = chain_costs(TARGET, DRAFTER, BOX, [1, 2, 4], [1, 4])
    assert set(grid) == {(b, n) for b in (1, 4) for n in (1, 2, 4)}
    table = CostTable(grid)
    assert (table.buckets, table.nodes) == ([1, 4], [1, 2, 4])
    # The forwards of a cycle read fc once, those of the grid each: a few hundredths of a ms.
    assert grid[1, 4] == pytest.approx(cost(Run(4, 3)).total, rel=0.01)
    assert grid[4, 2] == pytest.approx(cost(Run(2, 1, batch=4)).total)
    assert grid[1, 1] == pytest.approx(cost(Run(1)).total + draft_step_ms(TARGET, DRAFTER, BOX))
