"""``spec-kernels info`` and the settings that the libraries read."""

import os
import subprocess
import sys

import pytest
import torch

from spec_kernels import _library, info


def test_every_op_is_listed_with_what_will_run():
    facts = info.collect()
    assert list(facts["ops"]) == list(_library.SCHEMAS)
    for name, row in facts["ops"].items():
        assert row["reference"], name
        assert row["cpu"] == _library.has_kernel(name, "cpu")
        assert row["cpu_tensors"] == ("cpu" if row["cpu"] else "reference")
    text = info.render(facts)
    assert all(f"\n  {name} " in text for name in _library.SCHEMAS)
    assert torch.__version__ in text
    if _library.LIBRARIES["cpu"].loaded:
        assert f"kernels use {_library.cpu_isa()}, and {_library.cpu_bf16()} to" in text


def test_importing_the_package_imports_no_triton():
    code = "import sys, spec_kernels; sys.exit('triton' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120).returncode == 0


def python(code, isa):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SPEC_KERNELS_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_unknown_instruction_set_is_refused():
    done = python("import spec_kernels", "sse9")
    assert done.returncode == 1
    expected = f"expected one of {', '.join(_library.CPU_ISAS)}, got 'sse9'"
    assert done.stderr.splitlines()[-1] == f"ValueError: SPEC_KERNELS_CPU_ISA: {expected}"


@pytest.mark.skipif(
    _library.cpu_isa() in ("none", "plain"), reason=f"kernels here: {_library.cpu_isa()}"
)
def test_a_lower_instruction_set_is_taken():
    done = python(
        "from spec_kernels import _library as l; print(l.cpu_isa(), l.cpu_bf16())", "avx2"
    )
    assert done.stdout.split() == ["avx2", "fp32"], done.stderr
