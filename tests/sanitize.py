"""Builds the libraries under AddressSanitizer and UBSan and checks them (make sanitize).

    python tests/sanitize.py BUILD_DIR [--simd] [SCRIPT ARGUMENT...]
    python tests/sanitize.py --cuda-on-host [SECONDS [SCHEDULES [SHARE]]]

The first is about the CPU libraries, the second about the CUDA sources on the emulated machine of
``tests/cuda_on_host``: its own tests, the ops' suites under so many SCHEDULES (4), then malformed
calls for SECONDS (30). SHARE, as 0/2 or 1/2, is the half of the suites' tests that is run.

The libraries go beside a copy of the package in ``BUILD_DIR/tree``, where nothing else finds them;
the check (``tests/fuzz_ops.py`` by default) runs against that copy. Only the plain kernels are
built, or, with ``--simd``, the same sources for this machine's own instruction set. Needs gcc.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = (1, 2, 3, 0)
# Suites that take minutes here run under one schedule each; malformed calls have all.
LONG_SUITES = {
    "test_allreduce_cuda": 1,
    "test_tree_verify": 2,
    "test_tree_verify_coins": 1,
    "test_tree_verify_cuda": 3,
    "test_tree_verify_drafts": 2,
}


def library(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        sys.exit(f"sanitize: {compiler} has no {name}")
    return os.path.realpath(found)


def build(folder: Path, simd: bool) -> None:
    torch = importlib.util.find_spec("torch").submodule_search_locations[0]
    cmake = shutil.which("cmake") or shutil.which("cmake", path=sysconfig.get_path("scripts"))
    if cmake is None:
        sys.exit("sanitize: needs cmake, not found")
    flags = "-O1 -DNDEBUG" + (" -march=native" if simd else "")
    configure = [cmake, f"-S{ROOT}", f"-B{folder}", f"-DSK_OUTPUT_DIR={folder / 'out'}"]
    configure += [f"-DSK_TORCH_DIR={torch}", "-DSK_SANITIZE=ON", "-DSK_ONE_ISA=ON"]
    configure += ["-DCMAKE_BUILD_TYPE=Sanitize", f"-DCMAKE_CXX_FLAGS_SANITIZE={flags}"]
    configure += [f"-DSK_PYTHON_INCLUDE={sysconfig.get_path('include')}"]
    configure += [f"-DSK_PYTHON_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}"]
    jobs = str(len(os.sched_getaffinity(0)))
    for command in (configure, [cmake, "--build", str(folder), "-j", jobs]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"sanitize: {done.stdout[-4000:]}{done.stderr[-4000:]}")


def sanitized_environment() -> dict[str, str]:
    return {
        **os.environ,
        # The interpreter is not instrumented: the runtime must be there first, and libstdc++ with
        # it, or the runtime misses its exceptions.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        # A refused allocation must reach the op as it would without the runtime. Python leaks by
        # design.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def check_cuda_on_host(seconds: str = "30", num_schedules: str = "4", share: str = "0/1") -> int:
    suites = [
        p for d in ("comm", "ops", "compat") for p in sorted((ROOT / "tests" / d).glob("test_*.py"))
    ]
    suites = [p for p in suites if '"cuda_on_host"' in p.read_text()]
    short = [str(p) for p in suites if p.stem not in LONG_SUITES]
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    machine = [*pytest, str(ROOT / "tests" / "cuda_on_host" / "test_simt.py")]
    fuzz = [sys.executable, str(ROOT / "tests" / "fuzz_ops.py"), "--cuda-on-host"]
    on_host = [*pytest, "-k", "cuda_on_host"]
    runs = [
        (p.stem, LONG_SUITES[p.stem], [*on_host, str(p)]) for p in suites if p.stem in LONG_SUITES
    ]
    runs += [
        ("the other suites", seed, [*on_host, *short]) for seed in SCHEDULES[: int(num_schedules)]
    ]
    runs += [("malformed calls", 0, [*fuzz, "--seconds", seconds])]

    def run(name, seed, command):
        environment = sanitized_environment()
        environment |= {"SIMT_SANITIZE": "1", "SIMT_SEED": str(seed), "PYTHONPATH": str(ROOT)}
        if command is not machine:
            environment["SPEC_KERNELS_TEST_SHARE"] = share
        environment.setdefault("SPEC_KERNELS_ALLREDUCE_CALLS", "4")
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        last = (done.stdout.splitlines() or ["nothing was printed"])[-1]
        output = done.stdout if done.returncode else last
        print(f"sanitize: {name}, schedule {seed}: {output}", flush=True)
        return done.returncode

    codes = [run("the machine", 0, machine)]
    with ThreadPoolExecutor(min(2, len(os.sched_getaffinity(0)))) as pool:
        codes += pool.map(lambda job: run(*job), runs)
    return int(any(codes))


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--cuda-on-host"]:
        return check_cuda_on_host(*arguments[1:])
    simd = "--simd" in arguments
    arguments = [a for a in arguments if a != "--simd"]
    if not arguments:
        sys.exit(__doc__)
    folder = Path(arguments[0]).resolve()
    script, *rest = arguments[1:] or ["tests/fuzz_ops.py"]
    command = [str(ROOT / script), *rest]
    cmake, tree = folder / ("cmake-simd" if simd else "cmake"), folder / "tree"
    build(cmake, simd)
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(
        ROOT / "spec_kernels",
        tree / "spec_kernels",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    for made in (cmake / "out").glob("*.so"):
        shutil.copy2(made, tree / "spec_kernels")
    environment = sanitized_environment() | {"PYTHONPATH": str(tree)}
    return subprocess.run([sys.executable, *command], env=environment, cwd=tree).returncode


if __name__ == "__main__":
    sys.exit(main())
