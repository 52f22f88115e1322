"""Ahead-of-time builds of Triton kernels: registers, spills and shared memory, without a GPU.

For a process of its own: one that has chosen the interpreter cannot compile.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

ARCHS = (80, 90, 120)
# Shared memory that one block may have.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}


def compile_kernel(
    kernel, types, constants, divisible, arch, warps, stages, **options
) -> dict[str, int]:
    """Builds one kernel; ``types`` names the Triton type of each argument that is no constant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(kernel, signature, values, attrs)
    built = triton.compile(
        source,
        GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": stages, **options},
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(
        item.split(":") for line in text.splitlines() if "REG:" in line for item in line.split()
    )
    return {
        "registers": int(usage["REG"]),
        "spills": int(usage["STACK"]) + int(usage["LOCAL"]),
        "shared": built.metadata.shared,
        "cp_async": built.asm["ptx"].count("cp.async.c"),
        "fma": built.asm["ptx"].count("fma.rn"),
        "mma": built.asm["ptx"].count("mma"),
    }
