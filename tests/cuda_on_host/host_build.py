"""The CUDA sources, compiled by g++ for the emulated machine of ``include/simt.h``, as ops.

``load()`` makes ``backend="cuda_on_host"`` known: the same ops on CPU tensors. Nothing here is
part of the package. Settings, from the environment:

SIMT_SEED      which schedule (``simt.h``); 0, threads in order, if unset
SIMT_SANITIZE  AddressSanitizer and UBSan; the process must preload libasan (``tests/sanitize.py``)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from spec_kernels import _library
from spec_kernels.ops import common

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
OUT = ROOT / "build" / "cuda_on_host"
BACKEND = "cuda_on_host"
NAMESPACE = "spec_kernels_cuda_on_host"

# Arrays that CUDA unrolls into registers look half set to g++, which does not unroll them.
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas")
WARNINGS += ("-Wno-maybe-uninitialized",)
# Contraction would fuse products into sums that the sources name apart.
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *WARNINGS)
DEFINES = ("-DTORCH_TARGET_VERSION=0x020a000000000000",)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
)


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def missing() -> str | None:
    """Why the sources cannot be compiled here, if they cannot."""
    return None if compiler() else "no C++ compiler"


def cuda_sources() -> list[Path]:
    return sorted((ROOT / "csrc").glob("*/*_cuda.cu"))


def content(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def torch_folder() -> Path:
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def run_compiler(command: Sequence[str]) -> subprocess.CompletedProcess:
    # A sanitizer's runtime that this process preloads would slow the compiler down severalfold.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def included(source: Path) -> list[Path]:
    """The headers of ``csrc`` that ``source`` includes, and those that they do."""
    found, waiting = set(), [source]
    while waiting:
        for name in INCLUDE.findall(waiting.pop().read_text()):
            header = ROOT / "csrc" / name
            if header not in found and header.exists():
                found.add(header)
                waiting.append(header)
    return sorted(found)


def _compile(source: Path, flags: tuple[str, ...]) -> Path:
    """The object of ``source``, from the last run if nothing that it may include has changed."""
    shim = sorted((HERE / "include").iterdir())
    headers = included(source)
    version = subprocess.run([compiler(), "-v"], capture_output=True, text=True).stderr
    key = content([source, *shim, *headers]) + repr(flags) + version + torch.__version__
    made = OUT / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.o"
    if made.exists():
        return made
    command = [compiler(), "-c", "-x", "c++", str(source), "-o", f"{made}.{os.getpid()}", *flags]
    command += [
        f"-I{HERE / 'include'}",
        f"-I{ROOT / 'csrc'}",
        f"-isystem{torch_folder() / 'include'}",
    ]
    done = run_compiler(command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-8000:]}")
    os.replace(f"{made}.{os.getpid()}", made)
    return made


def sanitized() -> bool:
    return bool(os.environ.get("SIMT_SANITIZE"))


def build(sources: Sequence[Path], *defines: str) -> Path:
    """A library of ``sources`` and the machine, compiled with ``-D`` for each of ``defines``."""
    OUT.mkdir(parents=True, exist_ok=True)
    flags = (*FLAGS, *DEFINES)
    flags += ("-O1", "-g1", *SANITIZERS) if sanitized() else ("-O2",)
    flags += tuple(f"-D{name}" for name in defines)
    work = [(source, flags) for source in (HERE / "simt.cpp", *sources)]
    # Of several processes that want the same, the first compiles and the others find it made.
    with open(OUT / "lock", "w") as lock, ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = list(pool.map(lambda job: _compile(*job), work))
    names = "\n".join(map(str, objects)).encode()
    made = OUT / f"_C_cuda_on_host-{hashlib.sha256(names).hexdigest()[:16]}.so"
    if made.exists():
        return made
    command = [compiler(), "-shared", "-o", f"{made}.{os.getpid()}", *map(str, objects)]
    command += [
        f"-L{torch_folder() / 'lib'}",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    command += SANITIZERS[:1] if sanitized() else ()
    done = run_compiler(command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-8000:]}")
    os.replace(f"{made}.{os.getpid()}", made)
    return made


def configure_of(library: ctypes.CDLL):
    """``simt::configure`` of a loaded library; each library is a machine of its own."""
    function = library.simt_configure
    function.argtypes, function.restype = (ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64), None
    return function


def schedule() -> int:
    """The schedule that the environment asks for."""
    return int(os.environ.get("SIMT_SEED", "0"))


class Machine:
    """The loaded library: its ops are registered, its schedule can be chosen."""

    def __init__(self, path: Path):
        self.definitions = _library.define_schemas(NAMESPACE)
        torch.ops.load_library(str(path))
        self.library = ctypes.CDLL(str(path))
        self._configure = configure_of(self.library)
        self._declare()
        self.configure(schedule())
        common.EXTRA_BACKENDS[BACKEND] = NAMESPACE

    def configure(self, seed: int, resident_blocks: int = 0, max_steps: int = 0) -> None:
        """The schedule of the launches to come; see ``simt.h``."""
        self._configure(seed, resident_blocks, max_steps)

    def _declare(self) -> None:
        pointer, word, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        for name, result, *arguments in (
            ("simt_create_stream", pointer, number),
            ("simt_destroy_stream", None, pointer),
            ("simt_choose_stream", pointer, pointer),
            ("simt_slow_device", None, number, number),
            ("simt_watch", None, number, pointer, word),
            ("simt_watch_nothing", None),
            ("simt_accesses", word, number, number, number),
            ("simt_set_clock", None, word),
            ("simt_steps", word),
            ("simt_begin_record", None),
            ("simt_end_record", number),
            ("simt_breach", ctypes.c_char_p),
            ("simt_replay", None, number, pointer),
            ("simt_synchronize", ctypes.c_char_p),
        ):
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments

    def create_stream(self, device: int) -> int:
        """A stream of emulated device ``device``: a queue that ``synchronize`` works off."""
        return self.library.simt_create_stream(device)

    def destroy_stream(self, stream: int) -> None:
        self.library.simt_destroy_stream(stream)

    @contextlib.contextmanager
    def on_stream(self, stream: int | None):
        """Ops called by this thread launch on ``stream``; they return at once."""
        before = self.library.simt_choose_stream(stream)
        try:
            yield
        finally:
            self.library.simt_choose_stream(before)

    def synchronize(self) -> None:
        """Runs all streams, interleaved, until they are empty. RuntimeError: they cannot be."""
        failure = self.library.simt_synchronize()
        if failure is not None:
            raise RuntimeError(failure.decode())

    def slow(self, device: int, factor: int) -> None:
        """Threads of ``device`` are chosen ``factor`` times less often."""
        self.library.simt_slow_device(device, factor)

    @contextlib.contextmanager
    def watch(self, ranges: Sequence[tuple[int, int]]):
        """Counts accesses to memory that peers share, for each of ``ranges`` (address, bytes).

        Yields ``bytes(device, range, is_store)``: what threads of a device stored or loaded.
        """
        for k, (address, num_bytes) in enumerate(ranges):
            self.library.simt_watch(k, address, num_bytes)
        try:
            yield self.library.simt_accesses
        finally:
            self.library.simt_watch_nothing()

    def set_clock(self, nanoseconds_per_step: int) -> None:
        """What ``globaltimer`` shows; 0: the host's clock, and spinning yields the processor."""
        self.library.simt_set_clock(nanoseconds_per_step)

    def steps(self) -> int:
        return self.library.simt_steps()

    @contextlib.contextmanager
    def record(self):
        """Yields a list; at the end it holds the number of the graph of this thread's launches.

        RuntimeError, if nothing else was raised: a call that waits, copies to or from the host,
        allocates or frees, which a device refuses or may refuse during a capture.
        """
        graph: list[int] = []
        self.library.simt_begin_record()
        try:
            yield graph
        finally:
            graph.append(self.library.simt_end_record())
        if graph[0] < 0:
            raise RuntimeError(f"a capture was broken by {self.library.simt_breach().decode()}")

    def replay(self, graph: list[int], stream: int | None = None) -> None:
        """Enqueues the launches again, on their own streams or all on ``stream``."""
        self.library.simt_replay(graph[0], stream)

    def num_launches(self) -> int:
        """Of all kernels since the library was loaded."""
        self.library.simt_num_launches.restype = ctypes.c_uint64
        return self.library.simt_num_launches()


_loaded: list[Machine] = []


def load() -> Machine:
    """Builds where needed, and registers, once a process.

    Mutants are in it and sleep until one is chosen (``mutants.py``): a second library without them
    would take as long again to compile.
    """
    if not _loaded:
        _loaded.append(Machine(build(cuda_sources(), "SK_MUTANTS")))
    return _loaded[0]
