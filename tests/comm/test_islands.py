"""Islands, chip fabrics and rank orders: from measurements of the described boxes, and labels."""

import dataclasses
import json
import random
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels.comm.islands import (
    SEPARATION,
    IslandChoice,
    fabric_from,
    islands_from,
    rank_order,
    select,
)
from spec_kernels.comm.p2p import FlowMeasurement, GpuId, LinkMeasurements
from spec_kernels.comm.topology import Topology

BOXES = {
    box["name"]: box
    for box in json.loads(files("spec_kernels.comm").joinpath("boxes.json").read_text())["boxes"]
}
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def gpus(count=8):
    return [GpuId(f"GPU-{rank:08x}", f"0000:{rank + 1:02x}:00.0") for rank in range(count)]


def square(value, count=8):
    return [[None if i == j else value(i, j) for j in range(count)] for i in range(count)]


def same_half(i, j):
    return i // 4 == j // 4


def flows_of(box):
    return [
        FlowMeasurement(tuple(map(tuple, f["flows"])), f.get("write"), f.get("read"))
        for f in box["flows_gb_s"]
    ]


def measured(name):
    """What the box's own figures say of each pair: drawn from the range of the pair's kind."""
    box, rng = BOXES[name], random.Random(name)
    kinds = {
        # kind of figure: (range inside a half, range across)
        "asus-esc8000a-broadcom": ("read", (0.71, 0.74), (1.27, 1.36)),
        "wrx90-two-switches": ("read", (0.72, 0.72), (1.40, 1.45)),
        "wrx90-root-and-leaves": ("read", (0.71, 0.73), (1.14, 1.18)),
        "dual-turin-direct": ("flag", (0.36, 0.45), (0.44, 0.44)),
        "dual-genoa-direct": ("write", (54, 54), (39, 39)),
    }
    figure, near, far = kinds[name]
    table = square(lambda i, j: round(rng.uniform(*(near if same_half(i, j) else far)), 3))
    field = {"read": "read_128b_us", "flag": "flag_us", "write": "pair_write_gb_s"}[figure]
    more = {}
    if name == "dual-turin-direct":
        more = {"pair_write_gb_s": square(lambda i, j: 53 if same_half(i, j) else 51)}
    return LinkMeasurements(gpus(), flows=flows_of(box), **{field: table}, **more)


MEASURED_ISLANDS = {
    "asus-esc8000a-broadcom": HALVES,
    "wrx90-two-switches": HALVES,
    "wrx90-root-and-leaves": HALVES,
    # Across its sockets this box is as quick as inside them, which no label would tell.
    "dual-turin-direct": (),
    "dual-genoa-direct": HALVES,
}


@pytest.mark.parametrize("name", BOXES)
def test_islands_of_the_boxes_by_measurement(name):
    choice = islands_from(measured(name), Topology.from_box(BOXES[name]))
    assert choice.islands == MEASURED_ISLANDS[name]
    assert choice.source == "measured" and choice.reason


@pytest.mark.parametrize("name", BOXES)
def test_islands_of_the_boxes_by_labels(name):
    choice = islands_from(None, Topology.from_box(BOXES[name]))
    assert (choice.islands, choice.source) == (HALVES, "labels")


@pytest.mark.parametrize("name", BOXES)
def test_partly_measured_boxes_go_by_labels(name):
    """One pair without a figure: no scale, so the labels decide."""
    table = square(lambda i, j: 1.0)
    table[2][5] = None
    choice = islands_from(
        LinkMeasurements(gpus(), read_128b_us=table), Topology.from_box(BOXES[name])
    )
    assert (choice.islands, choice.source) == (HALVES, "labels")


def test_a_shared_uplink_shows_in_concurrent_copies_alone():
    """Single pairs run at 53 GB/s everywhere on this box; four at once share one uplink."""
    box = BOXES["wrx90-two-switches"]
    topology = Topology.from_box(box)
    choice = islands_from(LinkMeasurements(gpus(), flows=flows_of(box)), topology)
    assert choice.islands == HALVES and "copies at the same time" in choice.reason
    alike = LinkMeasurements(gpus(), pair_write_gb_s=square(lambda i, j: 53.6))
    assert islands_from(alike, topology) == IslandChoice(
        (), "measured", f"no equal islands are {SEPARATION:g} times better inside"
    )


def test_a_flow_that_uses_a_source_or_target_twice_judges_nothing():
    topology = Topology.from_box(BOXES["wrx90-two-switches"])
    inside = FlowMeasurement(((0, 1), (2, 3)), write=107.5)
    for across in (
        ((0, 4), (0, 5), (0, 6), (0, 7)),
        ((0, 4), (1, 4), (2, 4), (3, 4)),
        ((0, 4), (1, 5), (2, 6)),
    ):
        some = LinkMeasurements(gpus(), flows=[inside, FlowMeasurement(across, write=30.0)])
        assert islands_from(some, topology).source == "labels"


def test_pairs_may_be_the_islands():
    near = LinkMeasurements(
        gpus(), read_128b_us=square(lambda i, j: 0.7 if i // 2 == j // 2 else 1.3)
    )
    topology = Topology.from_box(BOXES["dual-turin-direct"])
    assert islands_from(near, topology).islands == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_the_worse_direction_counts():
    one_way = square(lambda i, j: 1.3 if (i < 4) != (j < 4) and i < j else 0.7)
    choice = islands_from(
        LinkMeasurements(gpus(), flag_us=one_way), Topology.from_box(BOXES["dual-turin-direct"])
    )
    assert choice.islands == HALVES


def test_a_dead_link_gives_no_scale():
    table = square(lambda i, j: 50.0)
    table[0][7] = 0.0
    dead = LinkMeasurements(gpus(), pair_write_gb_s=table)
    assert islands_from(dead, Topology.from_box(BOXES["dual-turin-direct"])).source == "labels"


@pytest.mark.parametrize("change", ["fewer", "uuid", "pci"])
def test_measurements_of_other_gpus_are_refused(change):
    topology = Topology.from_box(BOXES["wrx90-two-switches"])
    named = dataclasses.replace(
        topology,
        gpus=tuple(
            dataclasses.replace(gpu, uuid=f"GPU-{k:08x}", pci=f"0000:{k + 1:02x}:00.0")
            for k, gpu in enumerate(topology.gpus)
        ),
    )
    ids = gpus()
    assert islands_from(LinkMeasurements(ids), named).source == "labels"
    if change == "fewer":
        ids.pop()
    else:
        ids[3] = dataclasses.replace(ids[3], **{change: "another"})
    for use in (islands_from, lambda m, t: fabric_from(m, t)):
        with pytest.raises(ValueError, match="islands: .*expected measurements of"):
            use(LinkMeasurements(ids), named)


def test_fabric_joins_virtual_switches_of_one_chip():
    box = BOXES["asus-esc8000a-broadcom"]
    described = Topology.from_box(box)
    bare = dataclasses.replace(
        described, links=tuple(k for k in described.links if k.kind != "chip_fabric")
    )
    found = fabric_from(measured(box["name"]), bare)
    assert {frozenset(k.ends) for k in found.links if k.kind == "chip_fabric"} == {
        frozenset(("vs0", "vs1")),
        frozenset(("vs2", "vs3")),
    }
    assert found.path(0, 2) == described.path(0, 2)
    assert fabric_from(measured(box["name"]), found) == found


@pytest.mark.parametrize("name", [n for n in BOXES if n != "asus-esc8000a-broadcom"])
def test_no_fabric_where_switches_are_apart(name):
    topology = Topology.from_box(BOXES[name])
    assert fabric_from(measured(name), topology) == topology


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("seed", range(3))
def test_rank_order_makes_islands_contiguous(name, seed):
    shuffled = list(range(8))
    random.Random(seed).shuffle(shuffled)
    topology = Topology.from_box(BOXES[name]).select(shuffled)
    figures = select(measured(name), shuffled)
    for some in (None, figures):
        order = rank_order(topology, some)
        moved = select(some, order) if some is not None else None
        choice = islands_from(moved, topology.select(order))
        if some is None or MEASURED_ISLANDS[name]:
            assert choice.islands == HALVES
            halves = {frozenset(shuffled[r] for r in order[k : k + 4]) for k in (0, 4)}
            assert halves == {frozenset(half) for half in HALVES}
        else:
            assert order == tuple(range(8)) and choice.islands == ()


def test_an_order_with_islands_stays():
    topology = Topology.from_box(BOXES["wrx90-two-switches"]).select([7, 5, 4, 6, 1, 3, 0, 2])
    assert rank_order(topology) == tuple(range(8))


def test_an_order_with_larger_islands_is_preferred():
    topology = Topology.from_box(BOXES["wrx90-root-and-leaves"]).select([0, 1, 4, 5, 2, 3, 6, 7])
    assert len(islands_from(None, topology).islands) == 4
    assert rank_order(topology) == (0, 1, 4, 5, 2, 3, 6, 7)


def test_select_takes_flows_along():
    box = BOXES["asus-esc8000a-broadcom"]
    half = select(measured(box["name"]), [4, 0])
    assert [f.flows for f in half.flows] == [((1, 0),)]
    assert half.read_128b_us[0][1] == measured(box["name"]).read_128b_us[4][0]


positive = st.floats(min_value=1e-3, max_value=1e6)
figures = st.one_of(st.none(), st.just(0.0), positive)


@st.composite
def machines(draw):
    count = draw(st.integers(1, 8))
    tables = {
        name: draw(
            st.one_of(
                st.just([]),
                st.lists(
                    st.lists(figures, min_size=count, max_size=count),
                    min_size=count,
                    max_size=count,
                ),
                st.permutations(range(count)).map(
                    lambda p: square(lambda i, j: 1.0 if p[i] // 2 == p[j] // 2 else 3.0, len(p))
                ),
            )
        )
        for name in ("pair_write_gb_s", "pair_read_gb_s", "flag_us", "read_128b_us")
    }
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    flows = []
    if pairs:
        several = st.lists(st.sampled_from(pairs), min_size=1, max_size=8).map(tuple)
        flows = draw(st.lists(st.builds(FlowMeasurement, several, figures, figures), max_size=6))
    name = draw(st.sampled_from(sorted(BOXES)))
    ranks = draw(st.permutations(range(8)))[:count]
    return LinkMeasurements(gpus(count), flows=flows, **tables), Topology.from_box(
        BOXES[name]
    ).select(ranks)


@settings(max_examples=60, deadline=None)
@given(machines())
def test_any_measurements_give_a_sound_choice(machine):
    measurements, topology = machine
    choice = islands_from(measurements, topology)
    ranks = [rank for island in choice.islands for rank in island]
    if choice.islands:
        assert ranks == list(range(topology.num_ranks)) and len(choice.islands) > 1
        assert len({len(island) for island in choice.islands}) == 1
        assert len(choice.islands[0]) in (2, 4)
    order = rank_order(topology, measurements)
    assert sorted(order) == list(range(topology.num_ranks))
    grown = fabric_from(measurements, topology)
    assert grown.links[: len(topology.links)] == topology.links
