"""Schedules of the all-reduce algorithms, and the simulator that runs them on a box's links."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels.comm import validation
from spec_kernels.comm.p2p import FlowMeasurement, GpuId, LinkMeasurements
from spec_kernels.comm.schedules import (
    MAX_BLOCKS,
    PACKET_BYTES,
    SCHEDULED,
    TILE_BYTES,
    TILE_PACKETS,
    algorithms_for,
    build,
    has_islands,
    owned_packets,
)
from spec_kernels.comm.simulator import Box, Costs, boxes, predict_us, simulate
from spec_kernels.comm.topology import Gpu, Topology, Vertex

BOXES = boxes()
ASUS = BOXES["asus-esc8000a-broadcom"]
TOKEN = 2 * 7168
COSTS = Costs()


def star(num_gpus: int, **links) -> Box:
    """All GPUs below one switch."""
    vertices = [Vertex("socket0", "socket"), Vertex("port0", "root_port", "socket0")]
    vertices += [Vertex("switch0", "switch", "port0")]
    vertices += [Vertex(f"gpu{i}", "gpu", "switch0") for i in range(num_gpus)]
    topology = Topology(tuple(vertices), tuple(Gpu(f"gpu{i}", i) for i in range(num_gpus)))
    return Box("star", topology, links)


@st.composite
def calls(draw):
    """Any algorithm on any group that can run it."""
    num_ranks = draw(st.integers(1, 8))
    island_size = draw(
        st.sampled_from([s for s in (0, 2, 4) if not s or has_islands(num_ranks, s)])
    )
    algorithm = draw(st.sampled_from(algorithms_for(num_ranks, island_size, lossy=True)))
    itemsize = draw(st.sampled_from([2, 4]))
    num_bytes = itemsize * draw(st.integers(0, 1 << draw(st.integers(0, 19))))
    return dict(
        algorithm=algorithm,
        num_bytes=num_bytes,
        num_ranks=num_ranks,
        island_size=island_size,
        itemsize=itemsize,
        num_blocks=draw(st.integers(1, MAX_BLOCKS)),
        max_chunks=draw(st.integers(1, 4)),
    )


any_call = settings(max_examples=60, derandomize=True, deadline=None)


@any_call
@given(calls())
def test_schedules_are_sound(call):
    s = build(**call)
    for k, t in enumerate(s.transfers):
        assert t.source != t.destination and t.num_bytes > 0
        assert 0 <= t.source < s.num_ranks and 0 <= t.destination < s.num_ranks
        assert all(other < k for other in (*t.needs, *t.after))
        # A rank can wait only for what comes to it, and for what it sent itself.
        assert all(s.transfers[other].destination == t.issuer for other in t.needs)
        assert all(s.transfers[other].issuer == t.issuer for other in t.after)
    if s.num_ranks == 1 or s.num_bytes == 0:
        assert s.transfers == ()


@any_call
@given(calls())
def test_every_rank_hears_of_every_other(call):
    """In each chunk: what two slots' safety stands on, and that no part of the sum is left out."""
    s = build(**call)
    known = {}  # transfer -> the ranks whose data are in it
    heard = [{r} for r in range(s.num_ranks)]
    for k, t in enumerate(s.transfers):
        before = {t.source}.union(*(known[other] for other in t.needs))
        if t.kind == "read":  # what the flag announced
            before |= {t.source}
        known[k] = before
        heard[t.destination] |= before
    if s.num_bytes >= TILE_BYTES:
        assert heard == [set(range(s.num_ranks))] * s.num_ranks


@any_call
@given(calls())
def test_chunks_do_not_change_what_is_sent(call):
    whole = build(**(call | {"max_chunks": 1}))
    assert build(**call).bytes_between() == whole.bytes_between()


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("num_packets", [1, 2, 127, 128, 129, 896, 5000])
def test_bytes_of_each_algorithm(num_ranks, num_packets):
    """Closed forms, over all ranks: the message counts in whole packets."""
    size = num_packets * PACKET_BYTES

    def total(algorithm, num_bytes=size, **options):
        return sum(build(algorithm, num_bytes, num_ranks, **options).bytes_between().values())

    assert total("one_shot") == num_ranks * (num_ranks - 1) * size
    assert total("one_shot", size - 2) == total("one_shot")
    # Each packet goes to its owner from all others, and back.
    assert total("two_shot") == 2 * (num_ranks - 1) * size
    for island in (2, 4):
        if not has_islands(num_ranks, island):
            continue
        num_islands = num_ranks // island
        inside = num_islands * 2 * (island - 1) * size
        across = num_islands * (num_islands - 1) * size
        for algorithm in ("hierarchical", "hierarchical_pull"):
            assert total(algorithm, island_size=island) == inside + 2 * across
            # fp32 data are as long as their partial sums.
            assert total(algorithm, island_size=island, itemsize=4) == inside + across
        assert total("hierarchical_bf16", island_size=island) == inside + across


@pytest.mark.parametrize("num_owners", range(1, 9))
def test_owners_share_a_tile(num_owners):
    for packets in (1, 5, TILE_PACKETS - 1, TILE_PACKETS):
        shares = [owned_packets(packets, o, num_owners) for o in range(num_owners)]
        assert sum(shares) == packets and max(shares) - min(shares) <= 1


def test_only_the_pull_form_reads():
    for algorithm in algorithms_for(8, 4, lossy=True):
        phases = {
            t.phase for t in build(algorithm, TOKEN, 8, island_size=4).transfers if t.kind == "read"
        }
        assert phases == ({"across"} if algorithm == "hierarchical_pull" else set())


@pytest.mark.parametrize(
    "options, name",
    [
        (dict(algorithm="ring"), "algorithm"),
        (dict(algorithm="auto"), "algorithm"),
        (dict(num_bytes=3), "num_bytes"),
        (dict(num_bytes=-2), "num_bytes"),
        (dict(num_ranks=9), "num_ranks"),
        (dict(num_ranks=0), "num_ranks"),
        (dict(itemsize=1), "itemsize"),
        (dict(num_blocks=0), "num_blocks"),
        (dict(num_blocks=65), "num_blocks"),
        (dict(max_chunks=0), "max_chunks"),
        (dict(algorithm="hierarchical"), "island_size"),
        (dict(algorithm="hierarchical", island_size=8), "island_size"),
        (dict(algorithm="hierarchical", island_size=4, num_ranks=6), "island_size"),
    ],
)
def test_bad_arguments(options, name):
    with pytest.raises(ValueError, match=f"schedule: {name}: expected .* got"):
        build(**(dict(algorithm="one_shot", num_bytes=64, num_ranks=8) | options))


# The links.


def test_flows_share_a_link():
    box = star(4, gpu_port=50.0)
    assert box.rates([(0, 1, "write")]) == (50.0,)
    assert box.rates([(0, 1, "write"), (2, 1, "write")]) == (25.0, 25.0)
    # Two destinations: the GPU's own limit, not the port's.
    assert box.rates([(0, 1, "write"), (0, 2, "write")]) == (16.0, 16.0)
    assert box.rates([(0, 1, "read"), (2, 1, "read")]) == (10.3, 10.3)
    # Rank 2 has two destinations and so brings less to gpu1 than the others, who take the rest.
    rates = box.rates([(0, 1, "write"), (2, 1, "write"), (3, 1, "write"), (2, 3, "write")])
    assert rates == pytest.approx((17.0, 16.0, 17.0, 16.0))
    # Both directions of a link are apart.
    assert box.rates([(0, 1, "write"), (1, 0, "write")]) == (50.0, 50.0)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.sampled_from(sorted(BOXES)),
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from(["write", "read"])).filter(
            lambda f: f[0] != f[1]
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_rates_are_max_min_fair(name, flows):
    """Nothing is overloaded, and each flow has a full link on which none is faster than it."""
    box = BOXES[name]
    rates = box.rates(flows)
    gb_s, uses = box.constraints(flows)
    load = dict.fromkeys(gb_s, 0.0)
    fastest = dict.fromkeys(gb_s, 0.0)
    for rate, used in zip(rates, uses, strict=True):
        for resource in used:
            load[resource] += rate
            fastest[resource] = max(fastest[resource], rate)
    assert all(load[r] <= gb_s[r] * (1 + 1e-9) for r in gb_s)
    for rate, used in zip(rates, uses, strict=True):
        full = [r for r in used if load[r] >= gb_s[r] * (1 - 1e-9)]
        assert any(rate >= fastest[r] * (1 - 1e-9) for r in full)


@pytest.mark.parametrize(
    "flows, collapses",
    [
        ([(0, 4), (1, 6)], True),
        ([(0, 4), (0, 6), (1, 4)], True),
        ([(0, 4), (1, 5)], False),  # one root port
        ([(0, 4), (0, 6)], False),  # one source
        ([(0, 4), (2, 6)], False),  # two uplinks
        ([(0, 2), (1, 3)], False),  # the chip's fabric
        ([(4, 0), (6, 1)], False),  # the reverse direction
    ],
)
def test_collapse_of_posted_writes(flows, collapses):
    def total(box, kind):
        return sum(box.rates([(*f, kind) for f in flows]))

    assert (total(ASUS, "write") <= 2.7) is collapses
    assert total(ASUS, "read") > 2.7
    assert total(replace(ASUS, collapse_gb_s=None), "write") > 2.7


# Time.


def test_one_transfer():
    box = star(2, gpu_port=50.0)
    run = simulate(box, build("one_shot", 1 << 20, 2))
    assert run.us == pytest.approx(
        COSTS.launch_us + (1 << 20) / 50e3 + COSTS.flag_us + COSTS.phase_us
    )
    assert run.rank_us == (run.us, run.us)


@pytest.mark.parametrize("num_ranks", range(3, 9))
def test_one_switch_in_closed_form(num_ranks):
    box, size = star(num_ranks), 1 << 18
    fan_out = COSTS.fan_out_gb_s * 1e3
    phase = COSTS.flag_us + COSTS.phase_us
    expected = COSTS.launch_us + phase + (num_ranks - 1) * size / fan_out
    assert predict_us(box, "one_shot", size, num_ranks) == pytest.approx(expected)
    # With one chunk nothing overlaps; owners' shares differ by a packet a tile.
    expected = COSTS.launch_us + 2 * phase + 2 * (num_ranks - 1) / num_ranks * size / fan_out
    us = predict_us(box, "two_shot", size, num_ranks, max_chunks=1)
    assert us == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", BOXES)
def test_what_costs_nothing(name):
    for algorithm in algorithms_for(8, 4, lossy=True):
        assert predict_us(BOXES[name], algorithm, 0, 8, island_size=4) == COSTS.launch_us
    assert predict_us(BOXES[name], "one_shot", 1 << 20, 1) == COSTS.launch_us


@pytest.mark.parametrize("name", BOXES)
def test_more_takes_longer(name):
    for algorithm in algorithms_for(8, 4, lossy=True):
        options = dict(island_size=4, max_chunks=1)
        times = [predict_us(BOXES[name], algorithm, 2**k, 8, **options) for k in range(8, 21, 2)]
        assert times == sorted(times) and times[-1] > times[0]


@any_call
@given(st.sampled_from(sorted(BOXES)), calls())
def test_no_link_carries_more_than_it_can(name, call):
    """A call takes at least what its busiest link takes, one flight, and every phase's own time."""
    box, schedule = BOXES[name], build(**call)
    run = simulate(box, schedule)
    if not schedule.transfers:
        assert run.us == box.costs.launch_us
        return
    load = {}
    for t in schedule.transfers:
        for edge in box.topology.path(t.source, t.destination):
            load[edge] = load.get(edge, 0) + t.num_bytes
    busiest = max(num / (box.capacity(edge) * 1e3) for edge, num in load.items())
    assert run.us >= box.costs.launch_us + box.costs.phase_us + busiest
    # What a transfer needs had arrived before it was sent off.
    for k, t in enumerate(schedule.transfers):
        for other in (*t.needs, *t.after):
            assert run.sent_us[other] < run.sent_us[k]
    assert simulate(box, schedule) == run


def test_a_late_rank_holds_up_all():
    schedule = build("two_shot", TOKEN, 8)
    punctual = simulate(ASUS, schedule)
    late = simulate(ASUS, schedule, [0.0] * 7 + [500.0])
    assert min(late.rank_us) > 500 > max(punctual.rank_us)
    with pytest.raises(ValueError, match="start_us: expected 8 times, got 2"):
        simulate(ASUS, schedule, [0.0, 0.0])


def test_ranks_of_the_box_may_be_chosen():
    across = ASUS.select([0, 4])
    assert across.rates([(0, 1, "write")]) == ASUS.rates([(0, 4, "write")])
    assert predict_us(across, "one_shot", TOKEN, 2) > predict_us(ASUS, "one_shot", TOKEN, 2)
    with pytest.raises(ValueError, match="has 2 ranks, expected 3"):
        predict_us(across, "one_shot", TOKEN, 3)


def test_what_is_sent_counts_on_the_narrowest_link():
    """At sizes where latency is nothing, time follows the busiest link of the 4 + 4 box."""
    box = BOXES["wrx90-two-switches"]
    size = 64 << 20
    uplink = box.links_gb_s["uplink"] * 1e3
    for algorithm, on_uplink in (("one_shot", 16), ("two_shot", 4)):
        assert predict_us(box, algorithm, size, 8) == pytest.approx(
            on_uplink * size / uplink, rel=0.02
        )
    # Within, across, within: what a GPU fans out, then the uplink, with fp32 or bf16 partial sums.
    inside = 1.5 * size / (COSTS.fan_out_gb_s * 1e3)
    for algorithm, on_uplink in (("hierarchical", 2), ("hierarchical_bf16", 1)):
        us = predict_us(box, algorithm, size, 8, island_size=4)
        assert us == pytest.approx(inside + on_uplink * size / uplink, rel=0.02)


# Against measurements.


def test_against_every_measurement():
    """Within the stated error, or a misfit that is known and explained; none is explained away."""
    rows = validation.compare()
    unexplained = [r for r in rows if r.misfit and not r.reason]
    assert unexplained == []
    for box, start in validation.KNOWN_MISFITS:
        assert any(r.misfit and r.box == box and r.what.startswith(start) for r in rows), (
            box,
            start,
        )
    predictions = [r for r in rows if r.origin == "prediction"]
    # The numbers of docs/allreduce.md.
    assert (sum(not r.misfit for r in predictions), len(predictions)) == (34, 53)
    flows = [r for r in predictions if r.unit == "GB/s"]
    assert (sum(not r.misfit for r in flows), len(flows)) == (22, 26)


def test_each_measurement_is_compared():
    rows = validation.compare()
    for name in BOXES:
        entry = validation.entries()[name]
        mine = [r.what for r in rows if r.box == name]
        flows = sum(len({"read", "write"} & f.keys()) for f in entry["flows_gb_s"])
        assert sum(">" in what for what in mine) >= flows
        custom = sum(len(t) for group, t in entry["allreduce_us"].items() if "custom" in group)
        assert sum(what.startswith("one-shot") for what in mine) == custom


@pytest.mark.parametrize(
    "change",
    [
        dict(fan_out_gb_s=24.0),
        dict(launch_us=0.0),
        dict(phase_us=6.0),
        dict(read_us=1.0),
        dict(read_root_us=0.0),
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_comparison_can_fail(change, monkeypatch):
    """A wrong parameter makes misfits that nobody knows."""
    costs = replace(COSTS, **change)
    changed = {name: replace(box, costs=costs) for name, box in BOXES.items()}
    monkeypatch.setattr(validation, "boxes", lambda: changed)
    assert any(r.misfit and not r.reason for r in validation.compare())


def test_the_table_shows_every_row():
    rows = [r for r in validation.compare() if r.box == ASUS.name]
    text = "\n".join(validation.table(rows))
    assert all(r.what in text for r in rows)
    assert text.count("MISFIT") == sum(r.misfit for r in rows) > 0
    assert all(text.count(r.reason) == 1 for r in rows if r.misfit)


def measured(box: Box) -> LinkMeasurements:
    """What measuring ``box`` would give, if it behaved as the simulator says."""
    ranks = range(box.num_ranks)

    def matrix(value):
        return [[None if i == j else value(i, j) for j in ranks] for i in ranks]

    sets = [((0, 4), (1, 6)), ((0, 4), (1, 5)), ((0, 1), (0, 2), (0, 3)), ((1, 0), (2, 0), (3, 0))]
    flows = [
        FlowMeasurement(f, *(sum(box.rates([(*p, kind) for p in f])) for kind in ("write", "read")))
        for f in sets
    ]
    return LinkMeasurements(
        [GpuId(f"GPU-{i}", f"0000:{i:02x}:00.0") for i in ranks],
        matrix(lambda i, j: box.rates([(i, j, "write")])[0]),
        matrix(lambda i, j: box.rates([(j, i, "read")])[0]),
        matrix(lambda i, j: box.latency_us(i, j, "write")),
        matrix(lambda i, j: 2 * box.latency_us(j, i, "read")),
        flows,
    )


@pytest.mark.parametrize("name", BOXES)
def test_a_measured_box_predicts_as_the_box_itself(name):
    box = BOXES[name]
    again = Box.from_measurements(box.topology, measured(box))
    assert again.collapse_gb_s == box.collapse_gb_s
    for algorithm in SCHEDULED:
        for tokens in (1, 16):
            options = dict(island_size=4)
            theirs = predict_us(box, algorithm, tokens * TOKEN, 8, **options)
            ours = predict_us(again, algorithm, tokens * TOKEN, 8, **options)
            assert ours == pytest.approx(theirs, rel=0.02), algorithm


def test_measurements_of_other_gpus_are_refused():
    two = LinkMeasurements([GpuId("GPU-0", "0000:00:00.0"), GpuId("GPU-1", "0000:01:00.0")])
    with pytest.raises(ValueError, match="expected 8 GPUs as in the topology, got 2"):
        Box.from_measurements(ASUS.topology, two)


@pytest.mark.parametrize("name", ["pair_write_gb_s", "pair_read_gb_s", "flag_us", "read_128b_us"])
def test_a_pair_that_moves_nothing_is_refused(name):
    links = measured(ASUS)
    getattr(links, name)[2][5] = 0.0
    with pytest.raises(ValueError, match="expected all above 0, got 0 for GPU 2 and GPU 5"):
        Box.from_measurements(ASUS.topology, links)


def test_flows_that_move_nothing_are_refused():
    links = measured(ASUS)
    links.flows.append(FlowMeasurement(((0, 1), (0, 2)), write=0.0))
    with pytest.raises(ValueError, match="flows above 0"):
        Box.from_measurements(ASUS.topology, links)
