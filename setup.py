"""Builds the libraries with CMake when the toolchain allows; installs pure Python when it does not.

SPEC_KERNELS_BUILD=auto|cpu|cuda|none chooses (auto: what this machine can build; an explicit value
that cannot be met is an error). SPEC_KERNELS_CUDA_ARCHS, e.g. "90a;120a", overrides the CUDA
targets. torch is looked up but never imported: its headers and libraries are enough, so build
isolation does no harm.
"""

import filecmp
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MODES = ("auto", "cpu", "cuda", "none")
CUDA_ARCHS = ("80", "90a", "120a")
MIN_TORCH = (2, 10)
BYTES_PER_JOB = 1 << 30
FALLBACK = "no compiled kernels; every op runs its PyTorch reference"


def say(text):
    print(f"spec-kernels: {text}", file=sys.stderr, flush=True)


def stop(text):
    say(text)
    raise SystemExit(1)


def build_mode():
    mode = os.environ.get("SPEC_KERNELS_BUILD") or "auto"
    if mode not in MODES:
        stop(f"SPEC_KERNELS_BUILD: expected one of {', '.join(MODES)}, got {mode!r}")
    return mode


def find_tool(*names):
    """The first of ``names`` on PATH, else in this interpreter's scripts folder."""
    for path in (None, sysconfig.get_path("scripts")):
        for name in names:
            found = shutil.which(name, path=path)
            if found:
                return found
    return None


def find_compiler():
    named = shlex.split(os.environ.get("CXX", ""))
    return find_tool(*named[:1]) if named else find_tool("c++", "g++", "clang++")


def find_nvcc():
    named = shlex.split(os.environ.get("CUDACXX", ""))
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return find_tool(*named[:1]) if named else find_tool("nvcc", str(Path(home) / "bin" / "nvcc"))


def missing_tools():
    found = {
        "a C++ compiler": find_compiler(),
        "cmake": find_tool("cmake"),
        "ninja or make": find_tool("ninja", "make"),
    }
    return [what for what, path in found.items() if not path]


def find_torch():
    """The installed torch; under build isolation, that of the environment pip installs into."""
    spec = importlib.util.find_spec("torch")
    places = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    places += [Path(p) / "torch" for p in (*site.getsitepackages(), site.getusersitepackages())]
    torch = next((p for p in places if (p / "version.py").exists()), None)
    if torch is None:
        stop(
            "torch is not installed where this build can see it; install torch>=2.10, then type: "
            "pip install --no-build-isolation . "
            "(or, without kernels: SPEC_KERNELS_BUILD=none pip install .)"
        )
    version = re.search(r"__version__ = '(\d+)\.(\d+)", (torch / "version.py").read_text())
    if version and (int(version[1]), int(version[2])) < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        stop(f"torch: expected >= {wanted}, got {version[1]}.{version[2]} at {torch}")
    return torch.resolve()


def nvcc_knows(nvcc, arch):
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [nvcc, "--dryrun", target, *f"-x cu -c {os.devnull} -o {os.devnull}".split()]
    return subprocess.run(command, capture_output=True).returncode == 0


def cuda_archs(nvcc):
    """Targets to compile for: all that are asked for, else those of CUDA_ARCHS that nvcc knows."""
    text = os.environ.get("SPEC_KERNELS_CUDA_ARCHS", "")
    named = [a for a in re.split(r"[;,\s]+", text) if a]
    if text and not named:
        stop(f'SPEC_KERNELS_CUDA_ARCHS: expected e.g. "90a;120a", got {text!r}')
    for arch in named:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            stop(f'SPEC_KERNELS_CUDA_ARCHS: expected e.g. "90a;120a", got {arch!r}')
    if not nvcc:
        if named:
            stop(f"SPEC_KERNELS_CUDA_ARCHS={text} needs nvcc, not found")
        return []
    unknown = [a for a in named or CUDA_ARCHS if not nvcc_knows(nvcc, a)]
    if named and unknown:
        stop(f"SPEC_KERNELS_CUDA_ARCHS: {nvcc} does not know {', '.join(unknown)}")
    if unknown:
        say(f"{nvcc} does not know sm_{', sm_'.join(unknown)}: left out")
    return [a for a in named or CUDA_ARCHS if a not in unknown]


@dataclass(frozen=True)
class Plan:
    """``archs`` empty: no CUDA library, though there may be an nvcc."""

    torch: Path
    cmake: str
    nvcc: str | None
    archs: tuple
    host: bool


def make_plan(mode):
    """What to build, or None for nothing; says in one line each what the machine lacks."""
    if mode == "none":
        say(f"SPEC_KERNELS_BUILD=none: {FALLBACK}")
        return None
    missing = missing_tools()
    if missing:
        for name in ("SPEC_KERNELS_BUILD", "SPEC_KERNELS_CUDA_ARCHS"):
            if os.environ.get(name) not in (None, "", "auto"):
                stop(f"{name}={os.environ[name]} needs {' and '.join(missing)}, not found")
        say(f"{' and '.join(missing)} not found: {FALLBACK}")
        return None
    nvcc = find_nvcc()
    if mode == "cuda" and not nvcc:
        stop("SPEC_KERNELS_BUILD=cuda needs nvcc, not found")
    torch = find_torch()
    archs = [] if mode == "cpu" else cuda_archs(nvcc)
    if mode == "cuda" and not archs:
        stop(f"SPEC_KERNELS_BUILD=cuda: {nvcc} knows none of sm_{', sm_'.join(CUDA_ARCHS)}")
    if mode == "auto" and not nvcc:
        say("nvcc not found: CPU kernels only")
    host = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    if not host:
        if mode != "auto":
            stop(f"SPEC_KERNELS_BUILD={mode} needs Python.h (Debian: python3-dev), not found")
        say("Python.h not found: no _host module, ranks meet through gloo")
    return Plan(torch, find_tool("cmake"), nvcc, tuple(archs), host)


def free_memory():
    """Bytes this process may still take: the machine's, or its container's if that is less."""
    free = []
    try:
        meminfo = Path("/proc/meminfo").read_text()
        free.append(int(re.search(r"MemAvailable:\s+(\d+)", meminfo)[1]) * 1024)
        cgroup = Path("/sys/fs/cgroup")
        limit, used = (
            (cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current")
        )
        if limit != "max":
            free.append(int(limit) - int(used))
    except (OSError, TypeError):  # not Linux, or no cgroup here: what was read so far counts
        pass
    return min(free, default=BYTES_PER_JOB)


def num_jobs():
    """One compiler job a core, but no more than free memory carries."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(cores, free_memory() // BYTES_PER_JOB))


def first_error(log):
    """The first diagnostic with its context, without the compiler's command line before it."""
    lines = log.splitlines()
    pattern = re.compile(
        r"\berror\b[^:]{0,12}:|^CMake Error|undefined reference|\bld: |\bfatal\s*:"
    )
    first = next((i for i, line in enumerate(lines) if pattern.search(line)), None)
    return "\n".join(
        line[:300] for line in (lines[first : first + 12] if first is not None else lines[-20:])
    )


class BuildKernels(build_ext):
    def run(self):
        in_tree = self.inplace or getattr(self, "editable_mode", False)
        package = (ROOT if in_tree else Path(self.build_lib).resolve()) / "spec_kernels"
        plan = make_plan(build_mode())
        libraries = self.compile(plan) if plan else []
        # Libraries of an earlier build that this one leaves out must not stay behind.
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for old in (*package.glob("_C_*.so"), package / f"_host{suffix}"):
            if old.name not in {new.name for new in libraries}:
                old.unlink(missing_ok=True)
        for new in libraries:
            target = package / new.name
            if not (target.exists() and filecmp.cmp(new, target, shallow=False)):
                package.mkdir(parents=True, exist_ok=True)
                # Renamed into place: a process that has the old file mapped keeps it.
                half = target.with_suffix(".new")
                shutil.copy2(new, half)
                os.replace(half, target)

    def compile(self, plan):
        """Configures and builds; returns the libraries."""
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        jobs, start = num_jobs(), time.monotonic()
        say(f"building with {jobs} job{'s'[: jobs > 1]}")
        log = self.configure(build, plan)
        if log and plan.archs and build_mode() == "auto":
            reason = first_error(log).splitlines()[0]
            say(f"{plan.nvcc} does not work here ({reason}): CPU kernels only")
            plan = replace(plan, archs=())
            log = self.configure(build, plan)
        what = "configuring"
        if not log:
            what = "compiling"
            log = self.call(build, [plan.cmake, "--build", str(build), "-j", str(jobs)])
        if log:
            stop(f"{what} failed; the first error:\n{first_error(log)}\nwhole log: {build}/log.txt")
        # A folder that also served a CUDA build still holds that library.
        left_out = () if plan.archs else ("_C_cuda.so",)
        libraries = [p for p in sorted((build / "out").glob("*.so")) if p.name not in left_out]
        archs = f" (sm_{', sm_'.join(plan.archs)})" if plan.archs else ""
        names = ", ".join(p.name + (archs if p.name == "_C_cuda.so" else "") for p in libraries)
        say(f"built {names} in {time.monotonic() - start:.0f} s")
        return libraries

    def configure(self, build, plan):
        """Runs CMake in ``build``; returns its output if it failed, else None."""
        ninja = find_tool("ninja")
        fixed = [
            f"-S{ROOT}",
            f"-B{build}",
            f"-DSK_TORCH_DIR={plan.torch}",
            f"-DSK_OUTPUT_DIR={build / 'out'}",
            f"-DSK_PYTHON_INCLUDE={sysconfig.get_path('include') if plan.host else ''}",
            f"-DSK_PYTHON_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}",
            *(["-GNinja"] if ninja else []),
            *([f"-DCMAKE_CUDA_COMPILER={plan.nvcc}"] if plan.nvcc else []),
        ]
        # CMake keeps its first compiler, generator and paths: another choice needs a fresh folder.
        flags = [os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS")]
        key = "\n".join([*fixed, str(find_compiler()), *flags])
        record = build / "configuration"
        if not record.exists() or record.read_text() != key:
            shutil.rmtree(build, ignore_errors=True)
            build.mkdir(parents=True)
            record.write_text(key)
        archs = ";".join(f"{a}-real" for a in plan.archs)
        free = [f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        return self.call(build, [plan.cmake, *fixed, *free, f"-DSK_CUDA_ARCHS={archs}"])

    def call(self, build, command):
        """Runs ``command`` and logs its output; returns it if the command failed, else None."""
        done = subprocess.run(
            command, cwd=build, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        (build / "log.txt").write_text(done.stdout)
        return (done.stdout or command[0]) if done.returncode else None

    def get_source_files(self):
        return []

    def get_outputs(self):
        return [str(p) for p in (Path(self.build_lib) / "spec_kernels").glob("*.so")]

    def get_output_mapping(self):
        return {}


class BuildPython(build_py):
    def run(self):
        # A module that was deleted from the tree must not come back out of an earlier build folder.
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(Path(self.build_lib) / "spec_kernels", ignore_errors=True)
        super().run()


class KernelDistribution(Distribution):
    def has_ext_modules(self):
        """Whether the wheel is tied to a platform; it is not where nothing can be compiled."""
        return build_mode() != "none" and not (build_mode() == "auto" and missing_tools())


class Build(build):
    # Also without a compiler: build_ext then says what is missing, and removes stale libraries.
    sub_commands = [("build_py", None), ("build_ext", None)]


if __name__ == "__main__":
    setup(
        # Not in pyproject.toml, where the forms for old and new setuptools exclude each other.
        license="Apache-2.0",
        distclass=KernelDistribution,
        # Sources are CMake's; the entry makes setuptools run build_ext.
        ext_modules=[Extension("spec_kernels._C", sources=[])],
        cmdclass={"build": Build, "build_ext": BuildKernels, "build_py": BuildPython},
    )
