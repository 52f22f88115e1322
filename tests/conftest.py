"""The ``backend`` fixture: one suite for every implementation this machine can run.

A suite whose op has more than the usual two names them in its ``BACKENDS``.
"""

import os

# Threads that wait by spinning take minutes from a suite where other programs want the cores too.
# OpenMP reads it when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from cuda_on_host import host_build

from spec_kernels import _library

# Without a device Triton's kernels run in its interpreter; it reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = getattr(metafunc.module, "BACKENDS", ("reference", "cpu"))
        metafunc.parametrize("backend", names, indirect=True)


@pytest.fixture
def backend(request):
    """Name to pass as ``backend=``; one that this machine lacks is skipped, saying why."""
    if request.param == "cpu" and not _library.LIBRARIES["cpu"].loaded:
        pytest.skip(f"_C_cpu: {_library.LIBRARIES['cpu'].reason}")
    if request.param == "triton":
        pytest.importorskip("triton")
    if request.param == "cuda_on_host":
        if host_build.missing():
            pytest.skip(f"CUDA sources on the host: {host_build.missing()}")
        host_build.load()
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[torch.int32, torch.int64], ids=["int32", "int64"])
def int_dtype(request):
    return request.param
