"""The ``backend`` fixture: one suite for every implementation this machine can run."""

import pytest
import torch

from spec_kernels import _library


def pytest_configure(config):
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    """Name to pass as ``backend=``; one whose library is not loaded is skipped, saying why."""
    if request.param == "cpu" and not _library.LIBRARIES["cpu"].loaded:
        pytest.skip(f"_C_cpu: {_library.LIBRARIES['cpu'].reason}")
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[torch.int32, torch.int64], ids=["int32", "int64"])
def int_dtype(request):
    return request.param
