"""``fake_driver.cpp`` as a library that ``cuda_driver.Driver`` loads, and its switches.

``load()`` gives one copy of the library for each name: what a suite switches on in its copy is not
seen through another.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil

from cuda_on_host import host_build

from spec_kernels.comm.cuda_driver import Driver

SOURCE = host_build.HERE / "fake_driver.cpp"
FLAGS = ("-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
WORKS, REFUSED, DROPS, PARTIAL, LATE, SAYS_NONE = range(6)


@functools.cache
def build() -> str:
    host_build.OUT.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(SOURCE.read_bytes() + repr(FLAGS).encode()).hexdigest()[:16]
    made = host_build.OUT / f"libfakecuda-{name}.so"
    if not made.exists():
        part = f"{made}.{os.getpid()}"
        command = [host_build.compiler(), *FLAGS, "-Wall", "-Wextra", str(SOURCE), "-o", part]
        done = host_build.run_compiler(command)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-8000:]}")
        os.replace(part, made)
    return str(made)


class FakeDriver:
    """Switches of one copy of the library. ``driver()`` initialises it, in this process."""

    def __init__(self, path: str):
        self.path = path
        self.library = ctypes.CDLL(path)

    def driver(self) -> Driver:
        return Driver(self.path)

    def devices(self, num: int, rotate: int = 0) -> None:
        """What this process sees: ordinal i is device ``(i + rotate) % num`` of the machine."""
        self.library.fake_devices(num, rotate)

    def fail(self, call: str, status: int, after: int = 0) -> None:
        """Of the calls to come, one gives ``status``; ``after`` before it succeed."""
        self.library.fake_fail(call.encode(), status, after)

    def link(self, source: int, target: int, kind: int) -> None:
        """How device ``source`` of the machine reaches memory of ``target``."""
        self.library.fake_link(source, target, kind)

    def held(self) -> int:
        """Allocations, open handles, host memory and contexts that this process holds."""
        return self.library.fake_held()

    def violations(self) -> int:
        """Times that this process freed memory that another had open."""
        return self.library.fake_violations()


def load(folder, name: str = "libcuda.so.1") -> FakeDriver:
    """A copy of the library in ``folder``, which the loader takes for another one."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        shutil.copy(build(), path)
    return FakeDriver(path)
