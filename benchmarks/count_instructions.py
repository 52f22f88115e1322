"""Instructions of the tree attention kernel, by callgrind: a regression shows without a clock.

    python benchmarks/count_instructions.py [--isa plain|avx2] [--json FILE]

The kernel's own source is compiled with the flags of the build and called once on one thread.
valgrind knows no AVX-512, so the counts are those of AVX2 (or plain) kernels. A count depends on
the compiler, which is printed with it, and on nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from spec_kernels.testing.timing import machine

ROOT = Path(__file__).resolve().parents[1]
# As in CMakeLists.txt.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
FLAGS += ["-Wno-ignored-attributes", "-DSK_MULTI_ISA"]
ISA_FLAGS = {"plain": [], "avx2": ["-mavx2", "-mfma", "-mf16c"]}
# form, queries, cache, context, nodes
CALLS = [
    ("mla", "fp32", "same", 1024, 16),
    ("mla", "bf16", "same", 1024, 16),
    ("mla", "fp16", "same", 1024, 16),
    ("mla", "bf16", "fp8", 1024, 16),
    ("mla", "bf16", "same", 1024, 1),
    ("gqa", "bf16", "same", 1024, 4),
]


def build(folder: Path, isa: str) -> Path:
    torch = Path(find_spec("torch").origin).parent
    program = folder / "count"
    sources = [
        ROOT / "csrc/tree_attention/tree_attention_cpu_kernels.cpp",
        ROOT / "benchmarks/count_instructions.cpp",
    ]
    includes = [f"-I{ROOT / 'csrc'}", "-isystem", str(torch / "include")]
    flags = [*FLAGS, *ISA_FLAGS[isa], f"-DSK_ISA={isa}"]
    command = ["g++", *flags, *includes, *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def count(program: Path, isa: str, call: tuple) -> int:
    """Instructions inside ``tree_attention_run`` and what it calls."""
    command = [
        "valgrind",
        "--tool=callgrind",
        f"--callgrind-out-file={program.with_suffix('.out')}",
        "--collect-atstart=no",
        f"--toggle-collect=spec_kernels::{isa}::tree_attention_run*",
        str(program),
        *map(str, call),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found or found[1] == "0":
        sys.exit(f"count_instructions: {' '.join(command)} counted nothing:\n{done.stderr[-2000:]}")
    return int(found[1])


def compiler() -> str:
    """What the counts depend on, as recorded with them."""
    done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--isa", choices=ISA_FLAGS, default="avx2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for tool in ("g++", "valgrind"):
        if shutil.which(tool) is None:
            sys.exit(f"count_instructions: needs {tool}, which is not on PATH")
    print(f"{compiler()}, {options.isa}; k_dim and v_dim: mla 576, 512; gqa 128, 128; 8 heads")
    print(
        f"{'form':6}{'queries':9}{'cache':7}{'context':>8}{'nodes':>7}{'instructions':>15}"
        f"{'per multiply-add':>18}"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), options.isa)
        for call in CALLS:
            form, queries, cache, context, nodes = call
            instructions = count(program, options.isa, call)
            products = 8 * nodes * (context + nodes) * (576 + 512 if form == "mla" else 256)
            each = instructions / products
            print(
                f"{form:6}{queries:9}{cache:7}{context:8}{nodes:7}{instructions:15,}{each:18.3f}",
                flush=True,
            )
            rows.append(
                {
                    "form": form,
                    "queries": queries,
                    "cache": cache,
                    "context": context,
                    "num_nodes": nodes,
                    "instructions": instructions,
                    "per_multiply_add": each,
                }
            )
    if options.json:
        report = {"machine": machine(), "compiler": compiler(), "isa": options.isa, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
