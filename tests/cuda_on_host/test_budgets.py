"""What nvcc makes of every kernel for every target: no spills, registers within bounds."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda_on_host import device_code, host_build
from cuda_on_host.device_code import ARCHS, compile_device_code

# Registers a thread; 256 threads of 128 leave room for two blocks on a multiprocessor. By stem
# where another bound is meant.
MAX_REGISTERS = 128
REGISTERS = {"compact": 80, "tree_build": 64}
MAX_STATIC_SHARED = 40 << 10  # what launch_kernel counts on
# Of one kernel's parameters; more needs newer drivers.
MAX_PARAMETERS = 4096

SOURCES = [s for s in host_build.cuda_sources() if "__global__" in s.read_text()]


pytestmark = pytest.mark.skipif(device_code.nvcc() is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def reports():
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SOURCES, pool.map(compile_device_code, SOURCES), strict=True))


KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.S,
)


def kernels(report):
    found = [m.groupdict() for m in KERNEL.finditer(report)]
    assert len(found) == report.count("Compiling entry function")
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.parent.name)
def test_kernels_keep_to_their_budget(reports, source):
    report = reports[source]
    assert "warning" not in report, report
    found = kernels(report)
    assert {k["arch"] for k in found} == set(ARCHS)
    most = REGISTERS.get(source.parent.name, MAX_REGISTERS)
    for k in found:
        assert int(k["stack"]) == int(k["stores"]) == int(k["loads"]) == 0, k
        assert int(k["registers"]) <= most, k
        shared = re.search(r"(\d+) bytes smem", k["rest"])
        assert not shared or int(shared[1]) <= MAX_STATIC_SHARED, k
        # sm_80 keeps its parameters after 352 bytes of constant bank 0.
        constants = re.search(r"(\d+) bytes cmem\[0\]", k["rest"])
        assert not constants or int(constants[1]) <= MAX_PARAMETERS + 352, k


def test_the_budget_sees_spills():
    report = (
        "ptxas info    : Compiling entry function '_Z1k' for 'sm_80'\n"
        "ptxas info    : Function properties for _Z1k\n"
        "    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 52 bytes smem, 400 bytes cmem[0]\n"
    )
    (k,) = kernels(report)
    assert (k["stack"], k["stores"], k["loads"], k["registers"]) == ("24", "8", "16", "255")
