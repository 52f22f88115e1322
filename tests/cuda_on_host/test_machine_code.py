"""What the collectives' kernels are in machine code: which fences, atomics, widths and spills."""

import functools
import re
from collections import Counter

import pytest
from cuda_on_host import device_code, host_build
from cuda_on_host.device_code import ARCHS

FOLDER = host_build.ROOT / "csrc" / "pcie_allreduce"
DTYPES = {"f": "float", "6__half": "half", "13__nv_bfloat16": "bfloat16"}
EXACT = ("one_shot", "two_shot", "hierarchical", "hierarchical_pull")
NAMES = ("auto", *EXACT, "hierarchical_bf16", "two_shot_fp8", "two_shot_int8")
# Names of the kernels that wait for peers, as the linker knows them.
KERNEL = re.compile(
    r"\d+(allreduce_kernel|allreduce_norm_kernel|pass_on_kernel)(?:I(\w+?)Li(\d)E)?"
)
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)")


def missing():
    if device_code.nvcc() is None:
        return "nvcc is not installed"
    if device_code.nvdisasm() is None:
        return "no nvdisasm (pip install nvidia-cuda-nvdisasm)"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def count(text):
    """Instructions of each kernel: {(kernel, dtype, algorithm): Counter of operations}."""
    kernels, current = {}, None
    for line in text.splitlines():
        if line.startswith(".text."):
            found = KERNEL.search(line)
            current = found and kernels.setdefault(
                (found[1], DTYPES.get(found[2]), found[3] and NAMES[int(found[3])]), Counter()
            )
        elif current is not None and (found := INSTRUCTION.search(line)):
            current[found[1]] += 1
    return kernels


@functools.cache
def kernels(arch):
    return count(device_code.machine_code(FOLDER / "pcie_allreduce_cuda.cu", arch))


def some(operations, *beginnings):
    return {op: n for op, n in operations.items() if op.startswith(beginnings)}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_is_looked_at(arch):
    expected = {("allreduce_kernel", d, a) for d in DTYPES.values() for a in EXACT}
    expected |= {("allreduce_norm_kernel", d, a) for d in ("float", "bfloat16") for a in EXACT}
    assert set(kernels(arch)) >= expected | {("pass_on_kernel", None, None)}


@pytest.mark.parametrize("arch", ARCHS)
def test_pushed_data_needs_no_fence_and_a_flag_one(arch):
    for (kernel, dtype, algorithm), operations in kernels(arch).items():
        fences = some(operations, "MEMBAR", "FENCE", "ERRBAR", "CCTL")
        if kernel == "pass_on_kernel" or algorithm == "hierarchical_pull":
            membars = some(operations, "MEMBAR")
            assert sum(membars.values()) == 1, (kernel, dtype, algorithm, membars)
            assert all(op.endswith(".SYS") for op in membars)
        else:
            assert not fences, (kernel, dtype, algorithm, fences)


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics_are_those_of_the_own_control_page(arch):
    for name, operations in kernels(arch).items():
        atomics = some(operations, "ATOM", "RED", "SUATOM")
        # The claim of the failure record, once for each place that records; the block's arrival.
        assert set(atomics) == {"ATOMG.E.CAS.STRONG.GPU", "ATOMG.E.ADD.STRONG.GPU"}, (name, atomics)
        assert atomics["ATOMG.E.ADD.STRONG.GPU"] == 1, (name, atomics)


def test_atomics_in_the_sources_name_the_own_control_page():
    uses = [
        use
        for path in sorted(FOLDER.glob("*.cu*"))
        if path.name != "p2p_cuda.cu"
        for use in re.findall(r"\b(?:atomic\w+|__nv_atomic\w*|red|atom)[.(][^;]*", path.read_text())
    ]
    assert len(uses) == 2 and all(re.match(r"atomic\w+\(&control_\.", use) for use in uses), uses


@pytest.mark.parametrize("arch", ARCHS)
def test_packets_travel_whole(arch):
    for name, operations in kernels(arch).items():
        assert operations["STG.E.128.STRONG.SYS"] > 0, name
        assert operations["LDG.E.128.STRONG.SYS"] > 0, name
        # Inputs too, where aligned, and outputs; ptxas may split those for older architectures.
        assert operations["LDG.E.128"] > 0, name
        assert operations["STG.E.128"] > 0 or arch != "120a", name
        assert not some(operations, "LDG.E.64.STRONG.SYS", "STG.E.64.STRONG.SYS"), name


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_is_spilled(arch):
    for name, operations in kernels(arch).items():
        assert not some(operations, "STL", "LDL"), name


def test_the_parser_sees_what_must_not_be():
    text = """
.text._ZN1n16allreduce_kernelI6__halfLi2EEEvNS_4pcie6ParamsE:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 MEMBAR.SC.SYS ;
        /*0020*/              @UP1 STL.64 [R1], R2 ;
        /*0030*/                   REDG.E.ADD.STRONG.SYS desc[UR4][R2.64], R4 ;
.text.other:
        /*0000*/                   LDL R1, [R2] ;
"""
    assert count(text) == {
        ("allreduce_kernel", "half", "two_shot"): Counter(
            {"LDC": 1, "MEMBAR.SC.SYS": 1, "STL.64": 1, "REDG.E.ADD.STRONG.SYS": 1}
        )
    }
