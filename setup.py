"""Builds the libraries with CMake when the toolchain allows; installs pure Python when it does not.

SPEC_KERNELS_BUILD=auto|cpu|cuda|none chooses (auto: what the machine can build; an explicit value that cannot be met
is an error). SPEC_KERNELS_CUDA_ARCHS, e.g. "90a;120a", overrides the CUDA targets.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
MODES = ("auto", "cpu", "cuda", "none")
BYTES_PER_JOB = 1 << 30


def say(text):
    print(f"spec-kernels: {text}", file=sys.stderr, flush=True)


def stop(text):
    say(text)
    raise SystemExit(1)


def torch_dir():
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def num_jobs():
    """One compiler job a core, but no more than free memory carries."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/meminfo") as f:
            free = next(
                int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable")
            )
    except (OSError, ValueError, StopIteration):
        free = BYTES_PER_JOB
    return max(1, min(cores, free // BYTES_PER_JOB))


def first_error(log):
    lines = log.splitlines()
    for i, line in enumerate(lines):
        if "error" in line.lower() and "-Werror" not in line:
            return "\n".join(lines[max(0, i - 2) : i + 12])
    return "\n".join(lines[-30:])


class CMakeBuild(build_ext):
    def run(self):
        mode = os.environ.get("SPEC_KERNELS_BUILD", "auto")
        if mode not in MODES:
            stop(f"SPEC_KERNELS_BUILD: expected one of {', '.join(MODES)}, got {mode!r}")
        if mode == "none":
            say("SPEC_KERNELS_BUILD=none: no compiled kernels; every op runs its PyTorch reference")
            return
        torch = torch_dir()
        if torch is None:
            stop(
                "torch is not visible to the build; install torch first, then run: "
                "pip install --no-build-isolation . (or set SPEC_KERNELS_BUILD=none)"
            )
        missing = [
            what
            for what, found in (
                (
                    "a C++ compiler",
                    shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"),
                ),
                ("cmake", shutil.which("cmake")),
                ("make or ninja", shutil.which("ninja") or shutil.which("make")),
            )
            if not found
        ]
        if missing:
            if mode != "auto":
                stop(f"SPEC_KERNELS_BUILD={mode} needs {', '.join(missing)}, not found")
            say(
                f"{', '.join(missing)} not found: no compiled kernels; every op runs its PyTorch reference"
            )
            return
        nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
        if mode == "cuda" and not nvcc:
            stop("SPEC_KERNELS_BUILD=cuda needs nvcc, not found")
        if mode == "auto" and not nvcc:
            say("nvcc not found: CPU kernels only")
        self.cmake(torch, nvcc if mode != "cpu" else None)

    def cmake(self, torch, nvcc):
        out = (
            ROOT / "spec_kernels"
            if self.inplace or self.editable_mode
            else Path(self.build_lib).resolve() / "spec_kernels"
        )
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            str(ROOT),
            f"-DSK_TORCH_DIR={torch}",
            f"-DSK_OUTPUT_DIR={out}",
            f"-DSK_PYTHON_INCLUDE={sysconfig.get_paths()['include']}",
            f"-DSK_PYTHON_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}",
            f"-DSK_BUILD_CUDA={'ON' if nvcc else 'OFF'}",
        ]
        if shutil.which("ninja"):
            configure.append("-GNinja")
        if nvcc:
            configure.append(f"-DCMAKE_CUDA_COMPILER={nvcc}")
            archs = os.environ.get("SPEC_KERNELS_CUDA_ARCHS")
            if archs:
                real = ";".join(f"{a}-real" for a in archs.replace(",", ";").split(";") if a)
                configure.append(f"-DSK_CUDA_ARCHS={real}")
        jobs = num_jobs()
        for command in (configure, ["cmake", "--build", str(build), "-j", str(jobs)]):
            done = subprocess.run(
                command, cwd=build, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            (build / "log.txt").write_text(done.stdout)
            if done.returncode:
                stop(
                    f"{' '.join(command[:3])} … failed; first error:\n{first_error(done.stdout)}\nwhole log: {build}/log.txt"
                )
        built = sorted(p.name for p in out.glob("*.so"))
        say(f"built {', '.join(built)} with {jobs} jobs")

    def get_outputs(self):
        return [str(p) for p in (Path(self.build_lib) / "spec_kernels").glob("*.so")]


setup(
    # The one extension makes the wheel platform-specific and build_ext run; CMake decides what it holds.
    ext_modules=[Extension("spec_kernels._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
