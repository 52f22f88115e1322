"""A few malformed calls of every op, and that the fuzzer sees what is wrong."""

import fuzz_ops
import pytest

from spec_kernels import _library


def faults(op, cases, namespace):
    found = []
    for seed in cases:
        what, wrong = fuzz_ops.run_case(op, seed, namespace)
        if wrong is not None:
            found.append(f"--op {op} --case {seed}: {what}: {wrong}")
    return found


@pytest.mark.skipif(
    not _library.LIBRARIES["cpu"].loaded, reason=f"_C_cpu: {_library.LIBRARIES['cpu'].reason}"
)
@pytest.mark.parametrize("op", fuzz_ops.MAKERS)
def test_malformed_calls_on_the_cpu(op):
    assert faults(op, range(40), _library.NAMESPACE) == []


@pytest.fixture
def triton(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("SPEC_KERNELS_CHECK", "1")
    return fuzz_ops.in_triton()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", fuzz_ops.FACES)
def test_malformed_calls_in_tritons_interpreter(op, triton):
    assert faults(op, range(12), triton) == []


@pytest.mark.parametrize("fault", ["differs from the reference", "unclear error: something"])
def test_a_wrong_result_and_an_unclear_error_are_faults(fault):
    library = _library.define_schemas(f"spec_kernels_fault_{len(fault)}")

    def wrong(outs, lses, out, lse):
        if "unclear" in fault:
            raise RuntimeError("something")
        out.zero_()

    library.impl("merge_states", wrong, "CPU")
    assert any(fault in found for found in faults("merge_states", range(12), library.ns))
