"""Tuning and timing device groups: emulated kernels in processes, on a clock that is made up."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cuda_on_host import emulated, fake_driver, host_build

from spec_kernels.comm import gpu_timing
from spec_kernels.comm.bench import PREDICTED
from spec_kernels.comm.communicator import shared_memory_reason
from spec_kernels.comm.gpu_timing import (
    CudaTimer,
    GroupClock,
    gpus_here,
    graph_times,
    group_topology,
    kept_selection,
    key_of,
    measured_on_gpus,
    tune_on_gpus,
)
from spec_kernels.comm.launch import RankError, launch
from spec_kernels.comm.schedules import algorithms_for
from spec_kernels.comm.selection import Entry, Selection
from spec_kernels.comm.topology import Gpu, Topology, Vertex
from spec_kernels.comm.tuning import load, store

REASON = host_build.missing() or shared_memory_reason()
needs_emulator = pytest.mark.skipif(REASON is not None, reason=f"no emulated ranks: {REASON}")


class MadeUpTimer:
    """Runs calls as they are; their time is what is written here, whatever they take."""

    US = {"one_shot": 9.0, "two_shot": 7.0, "hierarchical": 8.0, "hierarchical_pull": 8.0}

    def run(self, device, call):
        call()
        self.algorithm = next(
            c.cell_contents for c in call.__closure__ if c.cell_contents in self.US
        )

    def times(self, device, call):
        call()
        return [self.US[self.algorithm] + k for k in (0.0, 0.1, 0.2)]


class MadeUpRival:
    def __init__(self, comm, listener, device):
        assert device == torch.device("cpu") and listener.getsockname()[1] > 0

    def times(self, timer, num_bytes):
        return [14.2]

    def close(self):
        pass


@pytest.fixture
def platform(tmp_path):
    return emulated.platform(fake_driver.load(tmp_path), host_build.load(), host_clock=True)


def uuids_of(platform, num):
    """Asked in a process of its own: ranks cannot fork from one that has used the driver."""
    return launch(lambda comm: [d.uuid for d in platform.driver().devices][:num], 1)[0]


def report_of(uuids):
    """As much of a report as is looked at: GPUs of two sockets, half and half."""
    half = len(uuids) // 2
    vertices = []
    for s, ranks in enumerate((range(half), range(half, len(uuids)))):
        socket, port, switch = f"socket{s}", f"0000:{s}0:01.0", f"0000:{s}1:00.0"
        vertices.append(Vertex(socket, "socket", numa=s))
        vertices.append(Vertex(port, "root_port", socket, s))
        vertices.append(Vertex(switch, "switch", port, s))
        vertices += [Vertex(f"0000:{s}{r + 2}:00.0", "gpu", switch, s) for r in ranks]
    names = [v.name for v in vertices if v.kind == "gpu"]
    gpus = tuple(Gpu(n, i, uuid, n) for i, (n, uuid) in enumerate(zip(names, uuids, strict=True)))
    return SimpleNamespace(
        topology=Topology(tuple(vertices), gpus),
        nvml=SimpleNamespace(driver="580.1"),
        machine=SimpleNamespace(driver=None),
    )


def made(platform, **options):
    return partial(
        GroupClock,
        timer=MadeUpTimer(),
        platform=platform,
        one_shot_bytes=4 << 10,
        two_shot_bytes=8 << 10,
        **options,
    )


@needs_emulator
def test_tuned_kept_and_taken_again(platform, tmp_path):
    uuids = uuids_of(platform, 4)
    report = report_of(uuids)
    said, directory = [], tmp_path / "cache"
    options = dict(directory=directory, warn=said.append, sizes=[16, 4096], blocks=[1])
    table = tune_on_gpus(report, make_clock=made(platform), **options)
    # Two islands of two: all algorithms are there, and the one that is made the fastest is chosen.
    assert table.island_size == 2 and table.origin == "measured"
    assert {e.algorithm for e in table.entries} == {"two_shot"}
    key = key_of(report, report.topology)
    assert load(key, directory) == table

    def never(*args):
        pytest.fail("timed although a table is kept")

    class Never(GroupClock):
        __call__ = never

    assert tune_on_gpus(report, make_clock=Never, **options) == table
    with pytest.raises(RankError, match="timed although"):
        tune_on_gpus(report, make_clock=Never, refresh=True, **options)


@needs_emulator
def test_rows_of_every_algorithm(platform):
    uuids = uuids_of(platform, 4)
    rows = measured_on_gpus(
        report_of(uuids), [64, 20000], make_clock=made(platform), make_rival=MadeUpRival
    )
    assert [(r.num_bytes, r.algorithm) for r in rows] == [
        (size, name) for size in (64, 20000) for name in algorithms_for(4, 2)
    ]
    assert {r.check for r in rows} == {"bit-exact"} != {PREDICTED}
    for row in rows:
        us = MadeUpTimer.US[row.algorithm] + 0.1
        assert row.us[1] == pytest.approx(us)
        assert row.rival == ("NCCL", pytest.approx(14.2 / us))


@needs_emulator
def test_rows_without_a_rival(platform):
    report = report_of(uuids_of(platform, 2))
    rows = measured_on_gpus(report, [64], make_clock=made(platform), make_rival=None)
    assert [(r.algorithm, r.rival) for r in rows] == [("one_shot", None), ("two_shot", None)]


@needs_emulator
def test_a_wrong_sum_is_never_timed(platform, monkeypatch):
    uuids = uuids_of(platform, 2)
    real = gpu_timing.ordered_sum

    def wrong(parts):
        out = real(parts)
        out[-1] += 1
        return out

    monkeypatch.setattr(gpu_timing, "ordered_sum", wrong)
    monkeypatch.setattr(MadeUpTimer, "times", lambda *args: pytest.fail("timed"))
    with pytest.raises(RankError, match=r"one_shot, 64 bytes, .*: wrong sums on ranks \[0, 1\]"):
        measured_on_gpus(report_of(uuids), [64], make_clock=made(platform), make_rival=MadeUpRival)


def test_the_key_names_devices_places_and_driver():
    report = report_of(["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    key = key_of(report, report.topology)
    assert key.uuids == ("GPU-a", "GPU-b", "GPU-c", "GPU-d") and key.driver == "580.1"
    assert key.pci_paths[0] == "socket0/0000:00:01.0/0000:01:00.0/0000:02:00.0"
    assert key.pci_paths[3] == "socket1/0000:10:01.0/0000:11:00.0/0000:15:00.0"
    assert key.island_size == 2
    two = key_of(report, group_topology(report, 2))
    assert two.uuids == ("GPU-a", "GPU-b") and two.island_size == 0
    assert two.digest != key.digest


def test_a_gpu_without_a_name():
    report = report_of(["GPU-a", ""])
    with pytest.raises(ValueError, match="no UUID is known of GPU 0000:13:00.0"):
        key_of(report, report.topology)


@pytest.mark.parametrize("num_ranks", [1, 5, 0, -1])
def test_ranks_that_are_not_there(num_ranks):
    with pytest.raises(ValueError, match="expected 2 to 4 GPUs of this machine"):
        group_topology(report_of(["a", "b", "c", "d"]), num_ranks)


def test_this_machine_is_read():
    """Wherever this runs: a report, or a reason of one line."""
    found = gpus_here()
    assert "\n" not in found if isinstance(found, str) else found.topology.num_ranks >= 2


def test_the_kept_table(tmp_path, monkeypatch):
    report = report_of(["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    monkeypatch.setattr(gpu_timing, "gpus_here", lambda: report)
    for num_ranks in (None, 2):
        assert kept_selection(num_ranks, directory=tmp_path) is None
        topology = group_topology(report, num_ranks)
        key = key_of(report, topology)
        entries = (Entry(64 * topology.num_ranks, "one_shot", 1),)
        table = Selection(entries, key.island_size, "measured")
        store(key, table, tmp_path)
        assert kept_selection(num_ranks, directory=tmp_path) == table
    monkeypatch.setattr(gpu_timing, "gpus_here", lambda: "no GPU here")
    assert kept_selection(directory=tmp_path) is None


# Inside a graph.


class FakeCuda:
    """As much of torch.cuda as is used here, on a clock of its own: 5 us a call."""

    def __init__(self):
        self.now = 0.0
        self.captured = None
        self.log = []
        self.entered = 0

    def call(self):
        if self.captured is None:
            self.now += 400.0  # an eager first call
        else:
            self.captured += 1

    def set_device(self, device):
        self.log.append(f"device {device}")

    def Stream(self, device):  # noqa: N802
        self.log.append("new stream")
        return self

    def stream(self, stream):
        assert stream is self
        return self

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *error):
        self.entered -= 1

    def current_stream(self):
        return self

    def synchronize(self):
        self.log.append("synchronize")

    def CUDAGraph(self):  # noqa: N802
        fake, graph = self, SimpleNamespace()

        def replay():
            fake.log.append("replay")
            fake.now += 5.0 * graph.num

        graph.replay = replay
        return graph

    def graph(self, graph, stream):
        fake = self

        class Capture:
            def __enter__(self):
                fake.captured = 0

            def __exit__(self, *error):
                graph.num, fake.captured = fake.captured, None

        return Capture()

    def Event(self, enable_timing):  # noqa: N802
        fake = self

        class Event:
            def record(self, stream):
                self.at = fake.now

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        return Event()


def test_times_inside_a_graph(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    assert graph_times(fake.call, calls=7, replays=3) == pytest.approx([5.0] * 3)
    # The first eager call and the first replay are not in.
    assert fake.log == ["synchronize", *["replay"] * 4, "synchronize"]


def test_calls_stay_on_one_stream(monkeypatch):
    """A device group takes calls on one stream alone."""
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    timer = CudaTimer(calls=3, replays=2)
    inside = []
    timer.run("cuda:1", lambda: inside.append(fake.entered))
    assert timer.times("cuda:1", fake.call) == pytest.approx([5.0] * 2)
    assert inside == [1] and fake.entered == 0
    assert fake.log.count("new stream") == 1 and fake.log.count("device cuda:1") == 2
