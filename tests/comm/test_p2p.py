"""Links between GPUs: what is recorded, tried and measured, on emulated devices of one process.

Ranks in processes of their own, whose links lose data: ``test_device_group.py``.
"""

import itertools
import json

import pytest
import torch
from cuda_on_host import emulated, fake_driver, host_build

from spec_kernels.cli import main
from spec_kernels.comm import p2p
from spec_kernels.comm.device_group import Platform
from spec_kernels.comm.p2p import (
    FlowMeasurement,
    GpuId,
    LinkMeasurements,
    Links,
    PeerReport,
    declare,
    flow_sets,
    groups_of,
)
from spec_kernels.comm.sysfs import Machine, PciDevice

GPUS = [GpuId(f"GPU-{i}", f"0000:{i:02x}:00.0") for i in range(3)]


def test_measurements_survive_json():
    rates = [[None, 50.5, 1.0], [2.0, None, 0.0], [3.0, 4, None]]
    flows = [FlowMeasurement(((0, 1), (2, 1)), 2.7, 51.1), FlowMeasurement(((0, 2),), read=1.0)]
    some = LinkMeasurements(GPUS, pair_write_gb_s=rates, flows=flows)
    assert LinkMeasurements.from_json(some.to_json()) == some
    plain = json.loads(some.to_json())
    assert plain["flows"][0] == {"flows": [[0, 1], [2, 1]], "write": 2.7, "read": 51.1}
    assert plain["flag_us"] == [[None] * 3] * 3 and plain["pair_write_gb_s"] == rates


@pytest.mark.parametrize(
    "text, said",
    [
        ("no json", "to_json"),
        ("[]", "to_json"),
        ("{}", "to_json"),
        ("[" * 100_000, "RecursionError"),
        ('{"gpus": [{"uuid": "a"}]}', "to_json"),
        ('{"gpus": [], "more": 1}', "to_json"),
        ('{"gpus": [], "flows": [{"flows": [[0, 1]]}]}', "below 0"),
        ('{"gpus": [{"uuid": "a", "pci": "b"}], "flag_us": [[1, 2]]}', r"\[1\]\[1\]"),
        ('{"gpus": [{"uuid": "a", "pci": "b"}], "flag_us": [["x"]]}', "'x'"),
        ('{"gpus": [{"uuid": "a", "pci": "b"}], "flag_us": [[NaN]]}', "nan"),
        ('{"gpus": [{"uuid": "a", "pci": "b"}], "flag_us": [[-1]]}', "-1"),
    ],
)
def test_what_is_no_measurement_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        LinkMeasurements.from_json(text)


@pytest.fixture(params=["cuda_on_host"])
def machine(request):
    if host_build.missing():
        pytest.skip(f"CUDA sources on the host: {host_build.missing()}")
    machine = host_build.load()
    machine.set_clock(1)
    machine.configure(seed=3)
    yield machine
    machine.configure(host_build.schedule())


@pytest.fixture
def fake(tmp_path):
    return fake_driver.load(tmp_path)


def links(machine, fake, num, num_bytes=32 << 10):
    fake.devices(num)
    made = Links(declare(machine.library), fake.driver(), num_bytes=num_bytes)
    made.duration_ms, made.num_trips = 0.002, 20
    return made


def test_all_pairs_are_tried_with_data(machine, fake):
    with links(machine, fake, 3) as tried:
        report = tried.verify()
        assert report.sound and str(report) == "all pairs of 3 ranks reach each other"
        assert report.write == report.read == [[None] * 3] * 3
    assert fake.held() == 0


def test_stores_that_stop_arriving_are_told_apart(machine, fake, monkeypatch):
    """From the second round on, what rank 0 stores for rank 1 stays away: what is there is old."""
    calls = itertools.count()
    with links(machine, fake, 2) as tried:
        worker, real = tried._workers[0].__class__, tried._workers[0].__class__.call

        def call(self, name, *arguments):
            if name == "fill" and self._device.name.ordinal == 0 and next(calls) == 3:
                return
            real(self, name, *arguments)

        monkeypatch.setattr(worker, "call", call)
        report = tried.verify(timeout_ms=1)
    assert not report.sound and report.read == [[None] * 2] * 2
    assert report.write == [[None, "only what was there before, after 1 ms"], [None, None]]
    assert "rank 0 (GPU-0001" in str(report) and "stores to rank 1" in str(report)


def test_pairs_that_the_driver_denies_are_reported_and_not_measured(machine, fake):
    fake.link(0, 1, fake_driver.REFUSED)
    with links(machine, fake, 3) as tried:
        report = tried.verify()
        assert report.write == [[None, "the driver says that it cannot", None], *[[None] * 3] * 2]
        assert report.read == report.write
        table = tried.measure()
    assert table.pair_write_gb_s[0][1] is None and table.pair_write_gb_s[1][0] > 0
    assert table.flag_us[0][1] is table.flag_us[1][0] is None and table.flag_us[0][2] > 0
    assert not any((0, 1) in f.flows or (1, 0) in f.flows for f in table.flows)


def test_every_link_is_measured(machine, fake):
    """The figures mean nothing here; that there is one for each pair and flow does."""
    with links(machine, fake, 3) as measured:
        table = measured.measure()
    assert [g.pci for g in table.gpus] == ["0000:c1:00.0", "0000:c2:00.0", "0000:c3:00.0"]
    for matrix in (table.pair_write_gb_s, table.pair_read_gb_s, table.flag_us, table.read_128b_us):
        for i, j in itertools.product(range(3), repeat=2):
            assert (matrix[i][j] is None) == (i == j) and (i == j or matrix[i][j] > 0)
    assert [f.flows for f in table.flows] == flow_sets(3)
    assert all(f.write > 0 and f.read > 0 for f in table.flows)
    assert LinkMeasurements.from_json(table.to_json()) == table


def test_a_flag_that_never_comes_ends_the_measurement(machine, fake, monkeypatch):
    with links(machine, fake, 2) as tried:
        monkeypatch.setattr(tried, "timeout_ms", 0.05)
        worker, real = tried._workers[1].__class__, tried._workers[1].__class__.call

        def call(self, name, *arguments):
            if name == "ping" and self._device.name.ordinal == 1:
                return
            real(self, name, *arguments)

        monkeypatch.setattr(worker, "call", call)
        assert tried.flag_us(0, 1) is None


def test_flows_cover_fan_out_halves_and_the_collapse():
    sets = flow_sets(8)
    for num in (2, 3, 7):
        assert sum(len(f) == num and len({s for s, _ in f}) == 1 for f in sets) == 8
    assert ((0, 4), (1, 5), (2, 6), (3, 7)) in sets and ((4, 0), (5, 1), (6, 2), (7, 3)) in sets
    assert ((0, 4), (1, 6)) in sets and ((0, 2), (1, 4)) in sets and ((0, 4), (2, 6)) not in sets
    assert ((0, 4), (2, 6)) in flow_sets(8, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert len(sets) == len(set(sets)) and flow_sets(1) == []
    assert all(s != d for f in sets for s, d in f)


def test_a_report_names_every_bad_direction():
    report = PeerReport(["A", "B"], [[None, "lost"], [None, None]], [[None, None], ["old", None]])
    assert "rank 0 (A) stores to rank 1 (B): lost; rank 1 (B) loads from rank 0 (A): old" in str(
        report
    )


def test_groups_are_the_gpus_behind_one_switch(fake):
    devices = {
        "root": PciDevice("root", port_type="root_port"),
        "up": PciDevice("up", parent="root", port_type="upstream"),
        "down1": PciDevice("down1", parent="up", port_type="downstream"),
        "down2": PciDevice("down2", parent="up", port_type="downstream"),
        "0000:c1:00.0": PciDevice("0000:c1:00.0", parent="down1"),
        "0000:c3:00.0": PciDevice("0000:c3:00.0", parent="down2"),
        "0000:c2:00.0": PciDevice("0000:c2:00.0", parent="root"),
    }
    fake.devices(4)
    names = fake.driver().devices
    assert groups_of(Machine(devices), names) == [[0, 2]]
    assert groups_of(Machine({}), names) == []


@pytest.fixture
def command(machine, fake, monkeypatch, capsys):
    """``spec-kernels links`` on emulated GPUs."""
    platform = emulated.platform(fake, machine, host_clock=False)
    monkeypatch.setattr(Platform, "cuda", lambda: platform)

    def small(library, driver, devices=None):
        made = Links(library, driver, devices, num_bytes=32 << 10)
        made.duration_ms, made.num_trips = 0.002, 5
        return made

    monkeypatch.setattr(p2p, "Links", small)

    def run(*arguments):
        return main(["links", *arguments]), *capsys.readouterr()

    return run


def test_the_command_prints_what_others_take(command, fake):
    fake.devices(3)
    code, text, error = command("--json", "--devices", "2", "0000:c1:00.0")
    table = LinkMeasurements.from_json(text)
    assert code == 0 and "all pairs of 2 ranks reach each other" in error
    assert [g.pci for g in table.gpus] == ["0000:c3:00.0", "0000:c1:00.0"]
    code, text, _ = command()
    assert code == 0 and "write, GB/s: row stores into column" in text and "0>1 0>2" in text
    assert command("--verify-only")[:2] == (0, "")


def test_the_command_says_what_cannot_be_relied_on(command, fake):
    fake.devices(2)
    fake.link(1, 0, fake_driver.REFUSED)
    code, text, error = command("--json")
    assert code == 1 and "stores to rank 0" in error and "the driver says that it cannot" in error
    assert LinkMeasurements.from_json(text).flag_us == [[None] * 2] * 2


def test_the_command_without_anything_to_try(command, fake, monkeypatch):
    fake.devices(1)
    assert command()[0] == 2
    for device in ("7", "²", "9" * 5000):
        assert command("--devices", device)[0] == 2
    fake.devices(0)
    code, _, error = command()
    assert code == 2 and "CUDA_ERROR_NO_DEVICE" in error
    monkeypatch.undo()
    if not torch.cuda.is_available():
        code, _, error = command()
        assert code == 2 and ("no CUDA driver" in error or "CUDA_ERROR" in error)
