"""What Triton makes of the kernels of tree attention: registers, spills, shared memory.

Built ahead of time, without a GPU, in a process that has not chosen the interpreter. As a script it
prints the whole table as Markdown: ``python tests/ops/test_tree_attention_budgets.py``.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# q, cache, k_dim, v_dim, rope_dim, num_words, features
MLA = (512, 512, 64)
BUILDS = {
    "MLA 512+64, bf16": ("bf16", "bf16", *MLA, 1, ""),
    "MLA 512+64, bf16, sharded, 64 nodes": ("bf16", "bf16", *MLA, 2, "sharded"),
    "MLA 512+64, fp8": ("bf16", "u8", *MLA, 1, ""),
    "MLA 512+64, fp8, sharded, 64 nodes": ("bf16", "u8", *MLA, 2, "sharded"),
    "heads of 64, bf16": ("bf16", "bf16", 64, 64, 0, 1, ""),
    "heads of 64, fp8": ("bf16", "u8", 64, 64, 0, 1, ""),
    "heads of 128, bf16": ("bf16", "bf16", 128, 128, 0, 1, ""),
    "heads of 128, fp16, everything": ("fp16", "fp16", 128, 128, 0, 32, "all"),
    "heads of 128, fp8": ("bf16", "u8", 128, 128, 0, 1, ""),
    "heads of 128, fp8, everything": ("bf16", "u8", 128, 128, 0, 32, "all"),
    "heads of 256, bf16": ("bf16", "bf16", 256, 256, 0, 1, ""),
    "heads of 256, bf16, everything": ("bf16", "bf16", 256, 256, 0, 32, "all"),
    "heads of 256, fp8": ("bf16", "u8", 256, 256, 0, 1, ""),
    "heads of 128, fp32": ("fp32", "fp32", 128, 128, 0, 1, ""),
    "MLA 512+64, fp32": ("fp32", "fp32", *MLA, 1, ""),
}
# Everywhere: both forms in bf16 and fp8. The rest where the limits are tightest.
EVERYWHERE = ("MLA 512+64, bf16", "MLA 512+64, fp8", "heads of 128, bf16", "heads of 128, fp8")
DEFAULT = [(name, 120) for name in BUILDS]
DEFAULT += [(name, arch) for name in EVERYWHERE for arch in (80, 90)]
MERGE = "merge of 512 columns"
# Tables of one split, which the kernel finishes itself.
DIRECT = [
    *(("MLA 512+64, bf16", arch) for arch in (80, 90, 120)),
    *((name, 90) for name in ("MLA 512+64, fp8", "heads of 128, bf16", "heads of 128, fp8")),
    *((f"heads of {dim}, {kind}, everything", 120) for dim, kind in ((128, "fp8"), (256, "bf16"))),
]
ONE_SPLIT = ", one split"
# Bytes that spill all the same, in a call over at most 64 positions.
SPILLS = {f"MLA 512+64, bf16{ONE_SPLIT}, sm_80": 24}


def _arguments(kernel, constants, element, stored):
    pointers = (
        (element, "q q_rope out"),
        (stored, "k_cache v_cache"),
        ("fp32", "k_scale v_scale sinks values sums lse"),
        ("i32", "tables context_lens ancestors"),
    )
    types = {n: f"*{kind}" for kind, names in pointers for n in names.split()}
    types = {n: t for n, t in types.items() if n in kernel.arg_names}
    divisible = [*types]
    # The launcher's own: a stride of 1 becomes a constant.
    constants = constants | {n: 1 for n in ("stride_tm", "stride_aw", "stride_c")}
    constants = {n: v for n, v in constants.items() if n in kernel.arg_names}
    for name in kernel.arg_names:
        if name not in types and name not in constants:
            types[name] = "fp32" if name in ("scale", "logit_cap") else "i32"
            if re.fullmatch("stride_[qrkv].", name):
                divisible.append(name)
    return types, constants, divisible


def build(name: str, arch: int) -> dict[str, int]:
    """One build; for a process without the interpreter."""
    kernels = importlib.import_module("spec_kernels.ops.tree_attention.triton")
    schedule = importlib.import_module("spec_kernels.ops.tree_attention.schedule")
    compile_kernel = importlib.import_module("triton_budgets").compile_kernel
    if name == MERGE:
        features = dict(v_dim=512, num_words=32, sinks=True, window=True, sharded=True)
        kernel, constants = kernels.merge_kernel, kernels.merge_constants(**features)
        arguments = _arguments(kernel, constants, "bf16", "bf16")
        return compile_kernel(
            kernel, *arguments, arch, kernels.MERGE_WARPS, 3, enable_fp_fusion=False
        )
    direct, name = name.endswith(ONE_SPLIT), name.removesuffix(ONE_SPLIT)
    element, stored, k_dim, v_dim, rope_dim, num_words, features = BUILDS[name]
    fp8 = stored == "u8"
    tile = schedule.attention_tile(k_dim, v_dim, 4 if element == "fp32" else 2, fp8, arch)
    everything = features == "all"
    constants = kernels.split_constants(
        page=16,
        k_dim=k_dim,
        v_dim=v_dim,
        rope_dim=rope_dim,
        num_words=num_words,
        tile=tile,
        latent=rope_dim > 0,
        fp8=("native" if arch >= 89 else "bits") if fp8 else "",
        capped=everything,
        sinks=everything,
        window=everything,
        sharded=bool(features),
        direct=direct,
    )
    arguments = _arguments(kernels.split_kernel, constants, element, stored)
    stages = kernels.split_stages(tile, direct, arch)
    found = compile_kernel(
        kernels.split_kernel, *arguments, arch, tile.warps, stages, enable_fp_fusion=False
    )
    return found | {"threads": 32 * tile.warps, "programs": tile.programs_per_sm}


def _build_all(names) -> dict[str, dict[str, int]]:
    folders = (ROOT, ROOT / "tests", Path(__file__).parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(f) for f in folders)}
    env.pop("TRITON_INTERPRET", None)
    code = (
        "import json, sys, test_tree_attention_budgets as t\n"
        "for n, a in json.loads(sys.argv[1]):\n"
        "    print(json.dumps([f'{n}, sm_{a}', t.build(n, a)]), flush=True)"
    )
    # Two processes, since a machine has at least two cores and each build takes seconds.
    halves = [names[::2], names[1::2]]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(half)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for half in halves
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
    one_split = [(name + ONE_SPLIT, arch) for name, arch in DIRECT]
    return _build_all([*DEFAULT, *one_split, (MERGE, 120)])


def test_nothing_spills():
    found = default_builds()
    assert len(found) == len(DEFAULT) + len(DIRECT) + 1
    spills = {name: usage["spills"] for name, usage in found.items() if usage["spills"]}
    assert spills.keys() <= SPILLS.keys() and all(n <= SPILLS[name] for name, n in spills.items())


def shared_limit(name: str) -> int:
    """That of sm_120, the least, but for the build that has a stage of its own on sm_90."""
    limits = importlib.import_module("triton_budgets").SHARED_LIMIT
    return limits[90 if name.endswith(f"{ONE_SPLIT}, sm_90") else 120]


def test_shared_memory_fits_the_smallest_device():
    over = {n: u["shared"] for n, u in default_builds().items() if u["shared"] > shared_limit(n)}
    assert over == {}


def test_as_many_programs_fit_a_multiprocessor_as_the_grid_has():
    """65,536 registers and shared memory for all, of which 1 KiB a program is taken."""
    for name, usage in default_builds().items():
        if "programs" not in usage:
            continue
        registers = -(-usage["registers"] // 8) * 8 * usage["threads"]
        assert registers * usage["programs"] <= 65536, (name, usage)
        shared = (usage["shared"] + 1024) * usage["programs"]
        assert shared <= shared_limit(name) + 1024, (name, usage)


def test_16_bit_products_use_tensor_cores_and_loads_overlap_them():
    for name, usage in default_builds().items():
        if "fp32" in name or MERGE in name:
            continue
        assert usage["mma"] > 0, (name, usage)
        # Loads of bf16 and fp16 tiles are asynchronous; fp8 tiles pass through registers.
        ahead = "fp8" not in name and (ONE_SPLIT not in name or "sm_90" not in name)
        assert (usage["cp_async"] > 0) == ahead, (name, usage)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    archs = importlib.import_module("triton_budgets").ARCHS
    table = _build_all([(name, arch) for name in (*BUILDS, MERGE) for arch in archs])
    print(
        "| build | registers: sm_80 / sm_90 / sm_120 | shared memory, bytes |\n| --- | --- | --- |"
    )
    for name in (*BUILDS, MERGE):
        row = [table[f"{name}, sm_{arch}"] for arch in archs]
        registers = " / ".join(
            f"{u['registers']}" + (f", {u['spills']} B spilled" if u["spills"] else "") for u in row
        )
        shared = " / ".join(str(s) for s in dict.fromkeys(u["shared"] for u in row))
        print(f"| {name} | {registers} | {shared} |")
