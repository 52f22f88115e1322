"""What Triton makes of the kernels of moe_experts: registers, spills, shared memory.

Built ahead of time, without a GPU, in a process that has not chosen the interpreter. As a script it
prints the whole table as Markdown: ``python tests/ops/test_moe_experts_budgets.py``.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Kernel, type of x, type of routed weights; the rest as in Kimi-K2.5 over eight ranks.
BUILDS = {
    "scores, bf16": ("scores", "bf16", "bf16"),
    "scores, fp32": ("scores", "fp32", "fp32"),
    "choice, 384 experts": ("choose", "bf16", "bf16"),
    "choice, 256 experts in 8 groups": ("choose", "bf16", "groups"),
    "gate and up, INT4": ("gate_up", "bf16", "i32"),
    "gate and up, bf16": ("gate_up", "bf16", "bf16"),
    "gate and up, fp32": ("gate_up", "fp32", "fp32"),
    "gate and up, INT4, x in fp32": ("gate_up", "fp32", "i32"),
    "down, INT4": ("down", "bf16", "i32"),
    "down, bf16": ("down", "bf16", "bf16"),
    "down, fp32": ("down", "fp32", "fp32"),
    "down, INT4, x in fp32": ("down", "fp32", "i32"),
}
DEFAULT = [(name, 120) for name in BUILDS]
DEFAULT += [
    (f"{what}, {kind}", arch)
    for what in ("gate and up", "down")
    for kind in ("INT4", "bf16")
    for arch in (80, 90)
]
# Programs that a multiprocessor should hold: with a few kilobytes in flight each, they keep its
# share of the bandwidth busy.
PROGRAMS = 2


def _arguments(kernel, constants, x, weight):
    pointers = (
        (x, "x act shared_act out shared_w"),
        (weight, "w weight"),
        ("bf16", "scale"),
        ("fp32", "logits bias weights parts shared_parts"),
        ("i32", "ids counters"),
    )
    types = {n: f"*{kind}" for kind, names in pointers for n in names.split()}
    types = {n: t for n, t in types.items() if n in kernel.arg_names}
    divisible = [*types]
    for name in kernel.arg_names:
        if name not in types and name not in constants:
            types[name] = "fp32" if name == "scaling" else "i32"
            if name.startswith("stride") or name in ("hidden", "inner", "shared_inner"):
                divisible.append(name)
    return types, constants, divisible


def build(name: str, arch: int) -> dict[str, int]:
    """One build; for a process without the interpreter."""
    kernels = importlib.import_module("spec_kernels.ops.moe_experts.triton")
    compile_kernel = importlib.import_module("triton_budgets").compile_kernel
    what, x, weight = BUILDS[name]
    fp32 = x == "fp32"
    kernel = getattr(kernels, f"{what}_kernel")
    if what == "choose":
        experts, groups = (256, 8) if weight == "groups" else (384, 1)
        constants = kernels.choice_blocks(experts, groups, 8)
        constants |= dict(HAS_BIAS=True, NORMALIZE=True)
        arguments = _arguments(kernel, constants | {"stride_bias": 1}, x, x)
        found = compile_kernel(
            kernel, *arguments, arch, kernels.CHOICE_WARPS, 3, enable_fp_fusion=False
        )
        return found | {"threads": 32 * kernels.CHOICE_WARPS}
    tile = getattr(kernels, f"{'router' if what == 'scores' else what}_tile")(fp32)
    if what == "scores":
        constants = dict(
            OUTS=tile.outs, SLICES=tile.slices, DEPTH=tile.depth, SPLIT=kernels.SPLIT,
            ROWS=kernels.ROWS,
        )  # fmt: skip
    else:
        constants = tile.constants | dict(
            TOP_K=8, ROWS=kernels.ROWS, INT4=weight == "i32", GROUP=32, HAS_ROUTED=True,
            HAS_SHARED=True, BY_EXPERT=False, CHUNK=kernels.CHUNKS[-1],
        )  # fmt: skip
    arguments = _arguments(kernel, constants, x, weight)
    options = {k: v for k, v in tile.launch.items() if k not in ("num_warps", "num_stages")}
    found = compile_kernel(kernel, *arguments, arch, tile.warps, tile.stages, **options)
    return found | {"threads": 32 * tile.warps}


def _build_all(names) -> dict[str, dict[str, int]]:
    folders = (ROOT, ROOT / "tests", Path(__file__).parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(f) for f in folders)}
    env.pop("TRITON_INTERPRET", None)
    code = (
        "import json, sys, test_moe_experts_budgets as t\n"
        "for n, a in json.loads(sys.argv[1]):\n"
        "    print(json.dumps([f'{n}, sm_{a}', t.build(n, a)]), flush=True)"
    )
    # Two processes, since a machine has at least two cores and each build takes seconds.
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(half)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for half in (names[::2], names[1::2])
    ]
    found = {}
    for process in running:
        out, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        found |= dict(json.loads(line) for line in out.splitlines())
    return found


@functools.cache
def default_builds() -> dict[str, dict[str, int]]:
    pytest.importorskip("triton")
    return _build_all(DEFAULT)


def test_nothing_spills():
    found = default_builds()
    assert len(found) == len(DEFAULT)
    assert {name: usage["spills"] for name, usage in found.items() if usage["spills"]} == {}


def test_several_programs_fit_a_multiprocessor_of_the_smallest_device():
    """65,536 registers and 100 KiB of shared memory for all, of which 1 KiB a program is taken."""
    for name, usage in default_builds().items():
        registers = -(-usage["registers"] // 8) * 8 * usage["threads"]
        assert registers * PROGRAMS <= 65536, (name, usage)
        assert (usage["shared"] + 1024) * PROGRAMS <= 100 * 1024, (name, usage)


def test_16_bit_products_use_tensor_cores_and_loads_overlap_them():
    for name, usage in default_builds().items():
        if "choice" not in name:
            assert usage["cp_async"] > 0, (name, usage)
            assert (usage["mma"] > 0) == ("fp32" not in name), (name, usage)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    archs = importlib.import_module("triton_budgets").ARCHS
    table = _build_all([(name, arch) for name in BUILDS for arch in archs])
    print(
        "| build | registers: sm_80 / sm_90 / sm_120 | shared memory, bytes |\n| --- | --- | --- |"
    )
    for name in BUILDS:
        row = [table[f"{name}, sm_{arch}"] for arch in archs]
        registers = " / ".join(
            f"{u['registers']}" + (f", {u['spills']} B spilled" if u["spills"] else "") for u in row
        )
        shared = " / ".join(str(s) for s in dict.fromkeys(u["shared"] for u in row))
        print(f"| {name} | {registers} | {shared} |")
