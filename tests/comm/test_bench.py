"""The all-reduce benchmark of the command line: checked before timed, predictions labelled."""

import pytest
import torch

from spec_kernels.comm import bench
from spec_kernels.comm.bench import (
    PREDICTED,
    Row,
    check_sums,
    contribution,
    fastest,
    measured_on_cpu,
    percentiles,
    predicted,
    table,
    take_turns,
)
from spec_kernels.comm.launch import RankError
from spec_kernels.comm.schedules import SCHEDULED, algorithms_for
from spec_kernels.comm.simulator import boxes


def test_bus_bandwidth():
    """NCCL's: 2 (n - 1) / n of the message over the time."""
    row = Row(1 << 20, "two_shot", (90.0, 100.0, 110.0), 8, None, "bit-exact")
    assert row.bus_gb_s == pytest.approx(1.75 * (1 << 20) / 100e-6 / 1e9)
    assert Row(64, "one_shot", (1.0, 1.0, 1.0), 1, None, PREDICTED).bus_gb_s == 0


def test_percentiles_are_of_all_samples():
    assert percentiles([[float(k) for k in range(50)], range(50, 101)]) == (10.0, 50.0, 90.0)


def test_predictions_are_labelled():
    box = boxes()["asus-esc8000a-broadcom"]
    rows = predicted(box, [256, 14336], 8, 4)
    assert [r.algorithm for r in rows] == [*SCHEDULED] * 2
    assert {r.check for r in rows} == {PREDICTED}
    # NCCL was measured there at 256 bytes (27.1 us) and not at 14336.
    for row in rows:
        known = row.num_bytes == 256
        assert row.rival == (("NCCL", pytest.approx(27.1 / row.us[1])) if known else None)
    text = table(rows)
    assert len(text) == 1 + len(rows) and all(PREDICTED in line for line in text[1:])
    assert [part.strip() for part in text[0].split("|")] == [
        "bytes",
        "algorithm",
        "us p50 [p10-p90]",
        "bus GB/s",
        "x NCCL",
        "check",
    ]
    assert not any("[" in line for line in text[1:])  # a prediction has no spread
    assert [r.algorithm for r in predicted(box, [64], 6, 0, lossy=False)] == [*algorithms_for(6)]


def test_the_fastest_of_each_size():
    def row(size, name, us):
        return Row(size, name, (us, us, us), 8, None, PREDICTED)

    rows = [row(1, "a", 3.0), row(1, "b", 2.0), row(2, "a", 5.0), row(2, "b", 5.0)]
    assert {s: r.algorithm for s, r in fastest(rows).items()} == {1: "b", 2: "a"}
    assert fastest(rows, lossy=["b"])[1].algorithm == "a"


def test_contenders_take_turns():
    log = []
    contenders = {
        "a": (lambda: log.append("a"), 2),
        "b": (lambda: log.append("b"), 1),
    }
    samples = take_turns(lambda: log.append("|"), contenders, 2)
    assert "".join(log) == "|aaa|bb|aaa|bb"  # the first of each turn is not timed
    assert [len(part) for part in samples["a"]] == [2, 2]
    assert [len(part) for part in samples["b"]] == [1, 1]


def test_one_bit_is_seen():
    x = contribution(0, 2, 64)
    check_sums(x, x, x, "same")
    off = x.clone()
    off.view(torch.int16)[1, 3] ^= 1
    with pytest.raises(AssertionError, match="bits as expected: False"):
        check_sums(off, x, x, "ours")
    check_sums(x, off, x, "a rival may round")
    with pytest.raises(AssertionError, match="the rival differs"):
        check_sums(x, torch.zeros_like(x), x, "a rival that is wrong")


def test_measured_rows():
    rows = measured_on_cpu(2, [1, 3], 64, 2, 3)
    assert [r.num_bytes for r in rows] == [128, 384]
    for row in rows:
        assert row.check == "bit-exact" and row.rival[0] == "gloo" and row.rival[1] > 0
        assert 0 < row.us[0] <= row.us[1] <= row.us[2] and row.num_ranks == 2
    assert len(table(rows)) == 3


def test_nothing_wrong_is_timed(monkeypatch):
    real = bench.ordered_sum
    monkeypatch.setattr(bench, "ordered_sum", lambda parts: real(parts) + 1)
    monkeypatch.setattr(bench, "take_turns", lambda *a: pytest.fail("timed"))
    with pytest.raises(RankError, match="AssertionError: 1 rows, rank .: bits as expected: False"):
        measured_on_cpu(2, [1], 64, 1, 1)
