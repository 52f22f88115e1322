"""What nvcc makes of the CUDA sources: ptxas' report, and the machine code of each architecture."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cuda_on_host import host_build

ARCHS = ("80", "90a", "120a")


@functools.cache
def nvcc():
    path = host_build.ROOT / "setup.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("setup_for_budgets", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.find_nvcc()


@functools.cache
def nvdisasm() -> str | None:
    """CUDA's disassembler: the toolkit's, or that of PyPI's nvidia-cuda-nvdisasm."""
    folders = [Path(nvcc()).resolve().parent] if nvcc() else []
    # A namespace package; PyPI's archives unpack into nvidia/cu13/bin, older ones elsewhere in it.
    for found in (
        importlib.util.find_spec("nvidia").submodule_search_locations
        if (importlib.util.find_spec("nvidia"))
        else ()
    ):
        folders += sorted(p.parent for p in Path(found).glob("**/bin/nvdisasm"))
    paths = [shutil.which("nvdisasm", path=str(f)) for f in folders]
    return next(filter(None, [*paths, shutil.which("nvdisasm")]), None)


def _kept(source: Path) -> Path:
    version = subprocess.run([nvcc(), "--version"], capture_output=True, text=True).stdout
    key = host_build.content([source, *host_build.included(source)])
    name = hashlib.sha256(f"{key} {version} {ARCHS}".encode()).hexdigest()[:16]
    return host_build.OUT / f"{source.stem}-{name}"


def compile_device_code(source: Path) -> str:
    """What ptxas says of ``source``; it and the code are kept until what it includes changes."""
    host_build.OUT.mkdir(parents=True, exist_ok=True)
    kept = _kept(source)
    report = kept.with_suffix(".ptxas.json")
    # Of several processes that want the same, the first compiles and the others find it made.
    with open(host_build.OUT / f"{source.stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if report.exists():
            return json.loads(report.read_text())
        with tempfile.TemporaryDirectory(dir=host_build.OUT) as folder:
            command = [nvcc(), "-fatbin", "-std=c++17", "-O3", "-Xptxas", "-v", str(source)]
            command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHS]
            command += ["-o", f"{folder}/all.fatbin", f"-I{host_build.ROOT / 'csrc'}"]
            command += ["-isystem", str(host_build.torch_folder() / "include")]
            command += [*host_build.DEFINES, "-keep", "-keep-dir", folder]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-8000:]
            for arch in ARCHS:
                (cubin,) = Path(folder).glob(f"*_{arch}.cubin")
                os.replace(cubin, kept.with_suffix(f".{arch}.cubin"))
        report.write_text(json.dumps(done.stderr))
        return done.stderr


def machine_code(source: Path, arch: str) -> str:
    """The instructions of ``source``'s kernels on sm_``arch``, in nvdisasm's words."""
    compile_device_code(source)
    command = [nvdisasm(), "-c", str(_kept(source).with_suffix(f".{arch}.cubin"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
