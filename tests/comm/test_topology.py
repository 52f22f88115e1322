"""The tree of one machine as data: labels, paths and islands of the described boxes."""

import dataclasses
import json
from importlib.resources import files

import pytest

from spec_kernels.comm.topology import Gpu, Link, Topology, Vertex, equal_islands

BOXES = {
    box["name"]: box
    for box in json.loads(files("spec_kernels.comm").joinpath("boxes.json").read_text())["boxes"]
}
BOX_NAMES = sorted(BOXES)


@pytest.fixture(params=BOX_NAMES)
def box(request):
    return BOXES[request.param]


def test_derived_labels_are_those_that_nvml_gives(box):
    assert [list(row) for row in Topology.from_box(box).labels()] == box["nvml_labels"]


def test_labels_but_for_host_bridges_come_from_the_tree(box):
    """Without any labels to read bridges from, only PHB turns into NODE."""
    bare = Topology.from_box({"tree": box["tree"], "numa": box["numa"]})
    wanted = [[x.replace("PHB", "NODE") for x in row] for row in box["nvml_labels"]]
    assert [list(row) for row in bare.labels()] == wanted


def test_json_there_and_back(box):
    topology = Topology.from_box(box)
    assert Topology.from_json(topology.to_json()) == topology


def test_paths_of_the_boxes():
    asus = Topology.from_box(BOXES["asus-esc8000a-broadcom"])
    assert asus.path(0, 1) == (("gpu0", "vs0"), ("vs0", "gpu1"))
    assert asus.path(0, 2) == (("gpu0", "vs0"), ("vs0", "vs1"), ("vs1", "gpu2"))
    assert [b for _, b in asus.path(0, 4)] == [
        "vs0",
        "root_port_10",
        "socket0",
        "socket1",
        "root_port_80",
        "vs2",
        "gpu4",
    ]
    leaves = Topology.from_box(BOXES["wrx90-root-and-leaves"])
    assert [b for _, b in leaves.path(1, 2)] == ["leaf0", "root0", "leaf1", "gpu2"]


def test_a_path_back_is_the_path_reversed(box):
    topology = Topology.from_box(box)
    for i in range(8):
        assert topology.path(i, i) == ()
        for j in range(8):
            edges = topology.path(i, j)
            assert tuple((b, a) for a, b in reversed(edges)) == topology.path(j, i)
            assert all(edge in topology.edges() for edge in edges)
            assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False))


ISLANDS = {
    "asus-esc8000a-broadcom": [2, 4],
    "wrx90-two-switches": [4],
    "wrx90-root-and-leaves": [2, 4],
    "dual-turin-direct": [4],
    "dual-genoa-direct": [4],
}


@pytest.mark.parametrize("name", BOX_NAMES)
def test_candidate_islands(name):
    assert [len(p[0]) for p in Topology.from_box(BOXES[name]).islands()] == ISLANDS[name]


def test_ranks_that_alternate_between_switches_have_no_islands():
    topology = Topology.from_box(BOXES["wrx90-two-switches"])
    assert topology.select([0, 4, 1, 5, 2, 6, 3, 7]).islands() == ()
    assert topology.select([0, 1, 4, 5]).islands() == (((0, 1), (2, 3)),)
    assert topology.select([0, 1, 4]).islands() == ()


def test_what_a_driver_tells_counts_more_than_the_tree_and_moves_with_the_ranks():
    labels = BOXES["wrx90-two-switches"]["nvml_labels"]
    topology = Topology.from_box(BOXES["dual-turin-direct"])
    told = tuple(
        tuple("?" if (i, j) == (0, 7) else x for j, x in enumerate(row))
        for i, row in enumerate(labels)
    )
    told = dataclasses.replace(topology, told=told)
    assert (told.common(0, 1), told.derived(0, 1)) == ("PIX", "PHB")
    assert (told.common(0, 7), told.common(7, 0)) == ("SYS", "NODE")
    order = [7, 0, 4, 1]
    assert told.select(order).labels() == tuple(
        tuple(told.common(i, j) for j in order) for i in order
    )
    assert Topology.from_json(told.to_json()) == told


@pytest.mark.parametrize("told", [(("X",),), (("X", "PIX", "PIX"),) * 2, (("X", "NV1"),) * 2])
def test_labels_that_fit_no_ranks_are_refused(told):
    pair = Topology.from_box(BOXES["wrx90-two-switches"]).select([0, 1])
    with pytest.raises(ValueError, match="told must be a square of 2|a label must be one of"):
        dataclasses.replace(pair, told=told)


def test_islands_are_strictly_nearer():
    near = [[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
    assert equal_islands(near) == ()
    near[0][1] = near[1][0] = near[2][3] = near[3][2] = 0.5
    assert equal_islands(near) == (((0, 1), (2, 3)),)


SOUND = Topology(
    (Vertex("s", "socket"), Vertex("p", "root_port", "s"), Vertex("g", "gpu", "p")),
    (Gpu("g", 0),),
)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vertices": SOUND.vertices + (Vertex("s", "socket"),)}, "one name"),
        ({"vertices": (Vertex("s", "chip"),) + SOUND.vertices[1:]}, "kind"),
        ({"vertices": (Vertex("s", "socket", "p"),) + SOUND.vertices[1:]}, "no parent"),
        ({"vertices": SOUND.vertices[1:]}, "parent 's'"),
        ({"vertices": SOUND.vertices + (Vertex("h", "gpu", "g"),)}, "cannot be a parent"),
        (
            {"vertices": (*SOUND.vertices, Vertex("a", "switch", "b"), Vertex("b", "switch", "a"))},
            "circle",
        ),
        ({"gpus": (Gpu("p", 0),)}, "kind gpu"),
        ({"gpus": (Gpu("g", 0), Gpu("g", 1))}, "two ranks"),
        ({"links": (Link("wire", ("s", "s")),)}, "chip_fabric or interconnect"),
        ({"links": (Link("chip_fabric", ("s", "p")),)}, "must be a switch"),
    ],
)
def test_unsound_topologies_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SOUND, **change)


def test_no_way_between_two_ranks_is_an_error():
    apart = Topology(
        (
            Vertex("s", "socket"),
            Vertex("t", "socket"),
            Vertex("g", "gpu", "s"),
            Vertex("h", "gpu", "t"),
        ),
        (Gpu("g", 0), Gpu("h", 1)),
    )
    with pytest.raises(ValueError, match="no way from rank 0"):
        apart.path(0, 1)


def test_foreign_json_is_refused():
    with pytest.raises(ValueError, match="not the fields of a topology"):
        Topology.from_json('{"vertices": [{"colour": 1}], "gpus": [], "links": []}')
    with pytest.raises(ValueError, match="not the fields of a topology"):
        Topology.from_json("{}")
