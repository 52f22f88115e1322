"""``spec-kernels tune`` and ``bench allreduce`` as commands."""

import json
from dataclasses import replace

import pytest
import torch

from spec_kernels.cli import main
from spec_kernels.comm import bench, gpu_timing
from spec_kernels.comm.bench import Row
from spec_kernels.comm.p2p import GpuId, LinkMeasurements
from spec_kernels.comm.selection import Entry, Selection
from spec_kernels.comm.simulator import boxes

BOX = "wrx90-two-switches"
TABLE = Selection((Entry(1 << 20, "two_shot", 16),), 2, "measured")


@pytest.fixture
def run(capsys, monkeypatch):
    """Exit code, stdout and stderr of a command on a machine without GPUs."""
    monkeypatch.setattr(gpu_timing, "gpus_here", lambda: "no GPU here, and sums take two")

    def call(*argv):
        code = main([str(a) for a in argv])
        return code, *capsys.readouterr()

    return call


def links(num=8, **fields):
    gpus = [GpuId(f"GPU-{i}", f"0000:{i:02x}:00.0") for i in range(num)]
    matrix = [[None if i == j else 50.0 for j in range(num)] for i in range(num)]
    return LinkMeasurements(gpus, pair_write_gb_s=matrix, **fields)


def test_tune_a_described_box(run):
    code, text, error = run("tune", "--box", BOX)
    assert (code, error) == (0, "")
    assert text.startswith(f"{BOX}: 8 GPUs") and "PREDICTED" in text and "MISFIT" in text
    code, text, _ = run("tune", "--box", BOX, "--json")
    (data,) = json.loads(text)
    assert code == 0 and data["origin"] == data["selection"]["origin"] == "predicted"
    assert {row["check"] for row in data["rows"]} == {"predicted"}
    assert Selection.from_dict(data["selection"]).pick(14336)[0] == "one_shot"
    assert any(c["misfit"] for c in data["comparisons"])


def test_tune_all_boxes(run):
    code, text, _ = run("tune", "--box", "all", "--tokens", 1, "--json")
    assert code == 0 and [d["box"] for d in json.loads(text)] == list(boxes())


def test_tune_some_ranks(run):
    code, text, _ = run("tune", "--box", BOX, "--ranks", 3, "--tokens", 2, 5, "--hidden", 64)
    assert code == 0 and "3 ranks" in text and "no islands" in text
    assert [line.split()[:2] for line in text.splitlines()[4:6]] == [["2", "256"], ["5", "640"]]


@pytest.mark.parametrize("wrapped", [False, True])
def test_tune_by_measured_links(run, tmp_path, wrapped):
    """Alone, all GPUs are below one switch; a tree beside them says otherwise."""
    measured, tree = tmp_path / "links.json", tmp_path / "tree.json"
    measured.write_text(links().to_json())
    topology = boxes()[BOX].topology.as_dict()
    tree.write_text(json.dumps({"schema": 1, "topology": topology} if wrapped else topology))
    argv = ["tune", "--measurements", measured, "--tokens", 1, "--json"]
    found = {}
    for name, more in (("alone", []), ("tree", ["--topology", tree])):
        code, text, error = run(*argv, *more)
        assert (code, error) == (0, "")
        (data,) = json.loads(text)
        assert data["box"] == "this machine" and data["comparisons"] == []
        found[name] = {r["algorithm"]: r["us_p50"] for r in data["rows"]}
    assert found["alone"]["one_shot"] < found["tree"]["one_shot"]


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--box", "nobody"], "expected all or one of asus-esc8000a-broadcom"),
        (["--box", BOX, "--measurements", "x"], "exclude each other"),
        (["--box", BOX, "--topology", "x"], "goes with --measurements"),
        (["--box", BOX, "--ranks", 0], "--ranks: expected 1 to 8, got 0"),
        (["--box", BOX, "--ranks", 9], "--ranks: expected 1 to 8, got 9"),
        (["--box", BOX, "--tokens", 0], "positive"),
        (["--box", BOX, "--hidden", -1], "positive"),
        (["--measurements", "/nonexistent/x"], "No such file"),
    ],
)
@pytest.mark.parametrize("command", [["tune"], ["bench", "allreduce"]], ids=["tune", "bench"])
def test_bad_arguments(run, command, argv, text):
    code, out, error = run(*command, *argv)
    assert (code, out) == (2, "") and text in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "content, text",
    [
        ("", "LinkMeasurements"),
        ("[]", "LinkMeasurements"),
        ('{"gpus": [{"uuid": "a"}]}', "LinkMeasurements"),
        (links(2, flows=[]).to_json().replace("50.0", "-50.0"), "LinkMeasurements"),
        ('{"gpus": [], "flows": [{"flows": [[Infinity, 0]]}]}', "LinkMeasurements"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_bad_files(run, tmp_path, content, text):
    path = tmp_path / "links.json"
    path.write_text(content)
    code, _, error = run("tune", "--measurements", path)
    assert code == 2 and text in error


def test_trees_of_another_machine(run, tmp_path):
    measured, tree = tmp_path / "links.json", tmp_path / "tree.json"
    measured.write_text(links(4).to_json())
    tree.write_text(boxes()[BOX].topology.to_json())
    code, _, error = run("tune", "--measurements", measured, "--topology", tree)
    assert code == 2 and "expected 8 GPUs as in the topology, got 4" in error
    for wrong in ("[]", "{}", "not JSON"):
        tree.write_text(wrong)
        assert run("tune", "--measurements", measured, "--topology", tree)[0] == 2


def test_nothing_to_tune_without_gpus(run):
    code, out, error = run("tune")
    assert (code, out) == (2, "")
    assert "no GPU here" in error and "--box NAME or --measurements FILE predicts" in error


def test_tune_on_gpus(run, monkeypatch):
    asked = []

    def tuned(report, num_ranks, *, refresh):
        asked.append((report, num_ranks, refresh))
        return TABLE

    monkeypatch.setattr(gpu_timing, "gpus_here", lambda: ("report",))
    monkeypatch.setattr(gpu_timing, "tune_on_gpus", tuned)
    code, text, _ = run("tune", "--ranks", 4, "--refresh")
    assert code == 0 and "two_shot, 16 blocks" in text and "measured" in text
    assert json.loads(run("tune", "--json")[1]) == TABLE.as_dict()
    assert asked == [(("report",), 4, True), (("report",), None, False)]


def test_bench_a_described_box(run):
    code, text, error = run("bench", "allreduce", "--box", BOX, "--tokens", 1, 4)
    assert (code, error) == (0, "")
    title, head, *rows = text.splitlines()
    assert "PREDICTED by the simulator" in title and head.split("|")[-1].strip() == "check"
    assert len(rows) == 14 and all(row.endswith("| predicted") for row in rows)
    code, text, _ = run("bench", "allreduce", "--box", BOX, "--ranks", 2, "--json")
    (data,) = json.loads(text)
    assert {r["check"] for r in data["rows"]} == {"predicted"} and data["rows"][0]["ranks"] == 2


def test_bench_this_cpu(run):
    argv = ["--ranks", 2, "--tokens", 1, "--hidden", 64, "--rounds", 1, "--calls", 2]
    code, text, _ = run("bench", "allreduce", *argv)
    title, head, row = text.splitlines()
    assert code == 0 and title.startswith("2 ranks on") and "no GPU here" in title
    assert "x gloo" in head and row.endswith("| bit-exact") and "[" in row
    for wrong in (["--ranks", 1], ["--rounds", 0], ["--calls", 0]):
        assert run("bench", "allreduce", *argv, *wrong)[0] == 2


def test_bench_a_wrong_sum(run, monkeypatch):
    real = bench.ordered_sum
    monkeypatch.setattr(bench, "ordered_sum", lambda parts: real(parts) + 1)
    argv = ["--ranks", 2, "--tokens", 1, "--hidden", 64, "--rounds", 1, "--calls", 1, "--cpu"]
    code, out, error = run("bench", "allreduce", *argv)
    assert (code, out) == (1, "") and "bits as expected: False" in error


def test_bench_gpus(run, monkeypatch):
    class Report:
        class nvml:
            gpus = [type("Gpu", (), {"name": "A GPU"})]

    row = Row(14336, "two_shot", (9.0, 10.0, 11.0), 2, ("NCCL", 1.5), "bit-exact")
    monkeypatch.setattr(gpu_timing, "gpus_here", lambda: Report)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(gpu_timing, "measured_on_gpus", lambda report, sizes, ranks: [row])
    code, text, _ = run("bench", "allreduce")
    assert code == 0 and text.startswith("2 GPUs of this machine, A GPU")
    assert "10.0 [9.0-11.0]" in text and "x NCCL" in text and "1.50" in text

    def without(report, sizes, ranks, make_rival):
        assert make_rival is None
        return [replace(row, rival=None)]

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(gpu_timing, "measured_on_gpus", without)
    code, text, _ = run("bench", "allreduce")
    assert code == 0 and "NCCL: unsupported, this torch has none" in text.splitlines()[0]
