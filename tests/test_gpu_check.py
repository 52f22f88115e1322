"""The GPU report: what it says where there is no GPU, and that its checks can fail."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import spec_kernels
from spec_kernels import _library

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_the_report_says_that_nothing_ran(gpu_check, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "report")])
    assert gpu_check.main() == 0
    assert "Nothing ran" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ran"] is False and report["timings"] == [] and report["ops"] == {}
    assert "Nothing ran" in (tmp_path / "report.md").read_text()


def test_every_cuda_kernel_has_a_check(gpu_check):
    if not _library.LIBRARIES["cuda"].loaded:
        pytest.skip(f"_C_cuda: {_library.LIBRARIES['cuda'].reason}")
    kernels = {name for name in _library.SCHEMAS if _library.has_kernel(name, "cuda")}
    assert kernels and kernels - gpu_check.CHECKS.keys() == set()


def test_the_check_passes_a_right_kernel(gpu_check, backend):
    assert len(gpu_check.check_hidden_capture("cpu", backend)) == 24


@pytest.mark.parametrize("fault", ["sum", "norm", "slot"])
def test_the_check_fails_a_wrong_kernel(gpu_check, monkeypatch, fault):
    right = spec_kernels.hidden_capture

    def wrong(x, residual, weight, eps, *, capture, slot, backend):
        out = right(x, residual, weight, eps, capture=capture, slot=slot, backend=backend)
        if fault == "sum" and x is not None:
            residual += 1e-6
        if fault == "norm":
            out *= 1.02
        if fault == "slot":
            capture[:, 0] = 0
        return out

    monkeypatch.setattr(spec_kernels, "hidden_capture", wrong)
    with pytest.raises(AssertionError):
        gpu_check.check_hidden_capture("cpu", "reference")
