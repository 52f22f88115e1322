"""The ``backend`` fixture: one suite for every implementation this machine can run.

A suite whose op has more than the usual two names them in its ``BACKENDS``. Kernels for a GPU come
twice: as a machine without one can run them, and on a device (marked ``gpu``; deselected where
there is none). A suite that the interpreter is too slow for names ``triton_on_device`` alone.
"""

import importlib
import os

# Threads that wait by spinning take minutes from a suite where other programs want the cores too.
# OpenMP reads it when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from cuda_on_host import host_build

from spec_kernels import _library
from spec_kernels.testing import on_device

# What runs the same kernels without a GPU, and on one.
ON_DEVICE = {"cuda_on_host": "cuda_on_device", "triton": "triton_on_device"}

# Suites of half a minute and more, the longest first: of several processes that take a suite each,
# none is left with one of these while the others have nothing to do.
LONG_SUITES = (
    "test_tree_attention_triton",
    "test_mutants",
    "test_tree_attention_infinite",
    "test_models",
    "test_budgets",
    "test_tree_attention",
    "test_rope_append",
    "test_tree_verify",
    "test_communicator",
)


def _rank(item):
    name = item.path.stem
    return LONG_SUITES.index(name) if name in LONG_SUITES else len(LONG_SUITES)


def pytest_configure(config):
    # Triton reads it when it is first imported: a process interprets, or compiles for a device.
    if on_device.missing() or config.option.markexpr != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = getattr(metafunc.module, "BACKENDS", ("reference", "cpu"))
        devices = ON_DEVICE.values()
        here = [name for name in names if name not in devices]
        there = [ON_DEVICE.get(name, name) for name in names if name in {*ON_DEVICE, *devices}]
        on_gpu = [pytest.param(name, marks=pytest.mark.gpu) for name in there]
        metafunc.parametrize("backend", [*here, *on_gpu], indirect=True)


def pytest_collection_modifyitems(config, items):
    if on_device.missing():
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
    items.sort(key=_rank)
    _keep_share(config, items)


def _keep_share(config, items):
    """``SPEC_KERNELS_TEST_SHARE=i/n`` runs one test of n, those of another i otherwise."""
    index, count = map(int, os.environ.get("SPEC_KERNELS_TEST_SHARE", "0/1").split("/"))
    left_out = [item for i, item in enumerate(items) if i % count != index]
    if left_out:
        items[:] = items[index::count]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter, config):
    if on_device.missing():
        terminalreporter.write_line(f"tests for a GPU: deselected, {on_device.missing()}")


@pytest.fixture
def backend(request):
    """Name to pass as ``backend=``; one that this machine lacks is skipped, saying why."""
    if request.param == "cpu" and not _library.LIBRARIES["cpu"].loaded:
        pytest.skip(f"_C_cpu: {_library.LIBRARIES['cpu'].reason}")
    if request.param == "triton":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton compiles in this process")
        importlib.import_module("spec_kernels.testing.interpreter").speed_up()
    if request.param == "cuda_on_host":
        if host_build.missing():
            pytest.skip(f"CUDA sources on the host: {host_build.missing()}")
        host_build.load()
    if request.param in ON_DEVICE.values():
        on_device.load()
        if request.param == "cuda_on_device" and not _library.LIBRARIES["cuda"].loaded:
            pytest.skip(f"_C_cuda: {_library.LIBRARIES['cuda'].reason}")
        if request.param == "triton_on_device":
            pytest.importorskip("triton")
            if os.environ.get("TRITON_INTERPRET") == "1":
                pytest.skip("Triton interprets in this process; pytest -m gpu compiles")
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[torch.int32, torch.int64], ids=["int32", "int64"])
def int_dtype(request):
    return request.param
