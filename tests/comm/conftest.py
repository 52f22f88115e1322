"""A stand-in for NVML, compiled once, whose devices a text file describes."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fake_nvml.cpp"


@pytest.fixture(scope="session")
def build_nvml(tmp_path_factory):
    """Compiles a source (the stand-in), with the macros that are named."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the stand-in for NVML")
    folder = tmp_path_factory.mktemp("nvml")

    def build(*macros, source=SOURCE):
        path = folder / f"lib{source.stem}{'-'.join(macros)}.so"
        flags = [f"-D{macro}" for macro in macros]
        command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++17", *flags, str(source)]
        subprocess.run([*command, "-o", str(path)], check=True)
        return str(path)

    return build


@pytest.fixture(scope="session")
def library(build_nvml):
    return build_nvml()


@pytest.fixture
def describe(tmp_path, monkeypatch):
    """Says what the stand-in will say."""

    def write(*lines):
        path = tmp_path / "nvml.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        monkeypatch.setenv("FAKE_NVML", str(path))

    return write
