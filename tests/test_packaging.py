"""Building and installing: choices and their errors, what is packed, what the libraries need."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from spec_kernels import _library

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spec_kernels"
BUILT = sorted(PACKAGE.glob("_C_*.so")) + sorted(PACKAGE.glob("_host*.so"))
NM = shutil.which("nm")
COMPILERS = ("c++", "g++", "clang++")

in_source_tree = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="setup.py: not in a source tree"
)
pytestmark = in_source_tree


def load_setup():
    spec = importlib.util.spec_from_file_location("setup_under_test", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup(monkeypatch):
    for name in ("SPEC_KERNELS_BUILD", "SPEC_KERNELS_CUDA_ARCHS", "CXX", "CUDACXX"):
        monkeypatch.delenv(name, raising=False)
    return load_setup()


def build_environment(**changes):
    """This process's environment without the settings under test; None removes a name."""
    keep = {
        k: v for k, v in os.environ.items() if not k.startswith(("SPEC_KERNELS_", "PYTHONPATH"))
    }
    keep |= {k: v for k, v in changes.items() if v is not None}
    return {k: v for k, v in keep.items() if changes.get(k, v) is not None}


def copy_tree(to, kernels=("common", "hidden_capture")):
    """What a build needs, with few kernels so that it is quick, in a folder with a space."""
    for name in (
        "setup.py",
        "pyproject.toml",
        "CMakeLists.txt",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
    ):
        if (ROOT / name).exists():
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to)
    for name in kernels:
        shutil.copytree(ROOT / "csrc" / name, to / "csrc" / name)
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.safetensors")
    shutil.copytree(PACKAGE, to / "spec_kernels", ignore=ignore)
    return to


@pytest.fixture
def tree(tmp_path):
    return copy_tree(tmp_path / "a tree")


def run_setup(tree, *args, **environment):
    command = [sys.executable, "setup.py", "-q", *args]
    return subprocess.run(
        command, cwd=tree, capture_output=True, text=True, env=build_environment(**environment)
    )


def our_lines(text):
    return [line for line in text.splitlines() if line.startswith("spec-kernels: ")]


def path_without(tmp_path, *names):
    """A PATH on which the executables ``names`` do not exist and all others do."""
    folder = tmp_path / "few tools"
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for tool in Path(place).iterdir() if Path(place).is_dir() else ():
            if tool.name not in names and not (folder / tool.name).is_symlink():
                (folder / tool.name).symlink_to(tool)
    return str(folder)


# What the libraries need


def symbols(path, *options):
    """(type, mangled name) of every symbol that ``nm`` shows."""
    done = subprocess.run([NM, *options, str(path)], capture_output=True, text=True, check=True)
    return [tuple(line.split("@")[0].split()[-2:]) for line in done.stdout.splitlines() if line]


needs_libraries = pytest.mark.skipif(not BUILT, reason="no compiled library in the tree")
needs_nm = pytest.mark.skipif(NM is None, reason="nm is not installed")


@needs_libraries
@pytest.mark.parametrize("key", ["cpu", "cuda"])
def test_a_built_library_loads(key):
    """Also _C_cuda beside a torch without CUDA, on a machine without a GPU."""
    state = _library.LIBRARIES[key]
    if not state.path.exists():
        pytest.skip(f"{state.name} was not built")
    assert state.loaded, state.reason


@needs_libraries
@needs_nm
@pytest.mark.parametrize("path", BUILT, ids=lambda p: p.name)
def test_libraries_need_only_stable_symbols(path):
    """Neither torch's C++ symbols, which change with every release, nor (op libraries) Python's."""
    undefined = [name for _, name in symbols(path, "-D", "--undefined-only")]
    assert undefined
    torch_cxx = re.compile(r"_ZN?K?(?:T[VIS])?N?K?(?:2at|3c10|5torch|5caffe2)\d?")
    assert [name for name in undefined if torch_cxx.match(name)] == []
    if not path.name.startswith("_host"):
        assert [name for name in undefined if name.startswith(("Py", "_Py"))] == []


def test_the_symbol_rule_sees_violations():
    torch_cxx = re.compile(r"_ZN?K?(?:T[VIS])?N?K?(?:2at|3c10|5torch|5caffe2)\d?")
    for name in ("_ZN2at4_ops3add4callE", "_ZNK3c1010TensorImpl4sizeEv", "_ZTVN5torch7LibraryE"):
        assert torch_cxx.match(name)
    for name in ("_ZNSt13runtime_errorC1E", "aoti_torch_get_dim", "_ZN12spec_kernels7cpu_isaEv"):
        assert not torch_cxx.match(name)


@needs_libraries
@needs_nm
def test_cuda_library_reaches_torch_streams():
    """libtorch is what brings libtorch_cuda, where the weakly declared stream shim lives."""
    path = _library.LIBRARIES["cuda"].path
    if not path.exists():
        pytest.skip("_C_cuda was not built")
    assert ("w", "aoti_torch_get_current_cuda_stream") in symbols(path, "-D", "--undefined-only")
    needed = subprocess.run(
        ["readelf", "-d", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "[libtorch.so]" in needed
    assert "libcudart" not in needed


@needs_nm
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_kernels_of_an_instruction_set_keep_to_themselves(isa):
    """The linker keeps one copy of a weak function: one compiled for AVX-512 must not be it."""
    pattern = f"build/cmake-*/CMakeFiles/sk_kernels_{isa}.dir/**/*.o"
    objects = list(ROOT.glob(pattern))
    if not objects:
        pytest.skip(f"no object files of {isa} under build/")
    found = {p.name: leaks(symbols(p, "--defined-only"), isa) for p in objects}
    assert {name: names for name, names in found.items() if names} == {}


def leaks(found, isa):
    """Names visible to the linker that are not inside the namespace of ``isa``."""
    own = f"N12spec_kernels{len(isa)}{isa}"
    return [name for kind, name in found if kind in "TDBRWVu" and own not in name]


def test_the_namespace_rule_sees_violations():
    kernel = ("T", "_ZN12spec_kernels4avx219hidden_capture_rowsEv")
    static = ("t", "_ZL4helperv")
    assert leaks([kernel, static, ("W", "_ZN12spec_kernels4avx24pickIfEEvv")], "avx2") == []
    for name in (
        "_ZSt3minIlERKT_S2_S2_",
        "_ZN12spec_kernels8to_floatEf",
        "_ZN12spec_kernels5plain1fEv",
    ):
        assert leaks([kernel, ("W", name)], "avx2") == [name]


# What the build does with its settings


@pytest.mark.parametrize(
    "environment, message",
    [
        (
            {"SPEC_KERNELS_BUILD": "gpu"},
            "SPEC_KERNELS_BUILD: expected one of auto, cpu, cuda, none, got 'gpu'",
        ),
        (
            {"SPEC_KERNELS_CUDA_ARCHS": "Hopper"},
            "SPEC_KERNELS_CUDA_ARCHS: expected e.g. \"90a;120a\", got 'Hopper'",
        ),
        (
            {"SPEC_KERNELS_CUDA_ARCHS": ";"},
            "SPEC_KERNELS_CUDA_ARCHS: expected e.g. \"90a;120a\", got ';'",
        ),
    ],
)
def test_a_wrong_setting_is_an_error_before_compiling(tree, environment, message):
    done = run_setup(tree, "build_ext", "--inplace", **environment)
    assert done.returncode == 1
    assert our_lines(done.stderr) == [f"spec-kernels: {message}"]
    assert "Traceback" not in done.stderr
    assert not (tree / "build").exists()


@pytest.mark.skipif(load_setup().find_nvcc() is None, reason="nvcc is not installed")
def test_an_architecture_nvcc_does_not_know_is_an_error(setup, monkeypatch, capsys):
    monkeypatch.setenv("SPEC_KERNELS_CUDA_ARCHS", "80;80a,999")
    with pytest.raises(SystemExit):
        setup.make_plan("auto")
    assert "does not know 80a, 999" in capsys.readouterr().err
    monkeypatch.setenv("SPEC_KERNELS_CUDA_ARCHS", "90a;80")
    assert setup.make_plan("cuda").archs == ("90a", "80")


def test_default_architectures_shrink_to_what_nvcc_knows(setup, monkeypatch, capsys):
    monkeypatch.setattr(setup, "find_nvcc", lambda: "/a/nvcc")
    monkeypatch.setattr(setup, "nvcc_knows", lambda nvcc, arch: arch != "120a")
    monkeypatch.setattr(setup, "missing_tools", list)
    assert setup.make_plan("auto").archs == ("80", "90a")
    assert our_lines(capsys.readouterr().err) == [
        "spec-kernels: /a/nvcc does not know sm_120a: left out"
    ]


def test_no_nvcc(setup, monkeypatch, capsys):
    """auto says so in one line and goes on; cuda, or naming architectures, is an error."""
    monkeypatch.setattr(setup, "find_nvcc", lambda: None)
    monkeypatch.setattr(setup, "missing_tools", list)
    assert setup.make_plan("auto").archs == ()
    assert our_lines(capsys.readouterr().err) == ["spec-kernels: nvcc not found: CPU kernels only"]
    with pytest.raises(SystemExit):
        setup.make_plan("cuda")
    assert "SPEC_KERNELS_BUILD=cuda needs nvcc, not found" in capsys.readouterr().err
    monkeypatch.setenv("SPEC_KERNELS_CUDA_ARCHS", "90a")
    with pytest.raises(SystemExit):
        setup.make_plan("auto")
    assert "SPEC_KERNELS_CUDA_ARCHS=90a needs nvcc, not found" in capsys.readouterr().err


def test_no_python_headers(setup, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(setup, "missing_tools", list)
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(setup, "find_nvcc", lambda: "/a/nvcc")
    monkeypatch.setattr(setup, "nvcc_knows", lambda nvcc, arch: True)
    assert setup.make_plan("auto").host is False
    assert our_lines(capsys.readouterr().err) == [
        "spec-kernels: Python.h not found: no _host module, ranks meet through gloo"
    ]
    with pytest.raises(SystemExit):
        setup.make_plan("cpu")
    assert "needs Python.h" in capsys.readouterr().err


def test_no_compiler(tree, tmp_path):
    """One line, no library, and none of an earlier build stays behind; cpu asked for: an error."""
    (tree / "spec_kernels" / "_C_cpu.so").write_bytes(b"stale")
    path = path_without(tmp_path, *COMPILERS)
    done = run_setup(tree, "build_ext", "--inplace", PATH=path, CXX=None)
    assert done.returncode == 0, done.stderr
    assert our_lines(done.stderr) == [
        "spec-kernels: a C++ compiler not found: no compiled kernels; "
        "every op runs its PyTorch reference"
    ]
    assert list((tree / "spec_kernels").glob("*.so")) == []
    done = run_setup(tree, "build_ext", "--inplace", PATH=path, CXX=None, SPEC_KERNELS_BUILD="cpu")
    assert done.returncode == 1
    assert our_lines(done.stderr) == [
        "spec-kernels: SPEC_KERNELS_BUILD=cpu needs a C++ compiler, not found"
    ]


def test_no_torch(setup, monkeypatch, capsys, tmp_path):
    """One line that says what to type."""
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setup.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(setup.site, "getusersitepackages", lambda: str(tmp_path))
    with pytest.raises(SystemExit):
        setup.find_torch()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "type: pip install --no-build-isolation ." in lines[0]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cu128'\n")
    with pytest.raises(SystemExit):
        setup.find_torch()
    assert "torch: expected >= 2.10, got 2.9" in capsys.readouterr().err


def test_the_first_compiler_error_is_shown(tmp_path):
    if load_setup().missing_tools():
        pytest.skip("no C++ compiler or cmake")
    tree = copy_tree(tmp_path / "a tree", kernels=["common"])
    source = tree / "csrc" / "common" / "isa.cpp"
    source.write_text(source.read_text() + "\nint broken( { return no_such_name; }\n")
    done = run_setup(tree, "build_ext", "--inplace", SPEC_KERNELS_BUILD="cpu")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    at = next(i for i, line in enumerate(lines) if "compiling failed" in line)
    assert re.search(r"isa\.cpp:\d+:\d+: error:", lines[at + 1])
    assert len(lines) < 20
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "log, first",
    [
        ("[1/2] x\ncc -Werror -o error.o a\na.cpp:3:1: error: b\n  4 |\n", "a.cpp:3:1: error: b"),
        ("ok\nnvcc fatal   : Unsupported gpu\n", "nvcc fatal   : Unsupported gpu"),
        ("a.cu(3): error: identifier\nmore\n", "a.cu(3): error: identifier"),
        ("-- ok\nCMake Error at CMakeLists.txt:4 (project):\n  No\n", "CMake Error at CMakeLists"),
        (
            "g++: fatal error: Killed signal terminated program cc1plus\n",
            "g++: fatal error: Killed",
        ),
        ("/usr/bin/ld: cannot find -ltorch\n", "/usr/bin/ld: cannot find -ltorch"),
        ("nothing told\nbut it failed\n", "nothing told"),
    ],
)
def test_first_error(setup, log, first):
    assert setup.first_error(log).startswith(first)


def test_jobs_follow_free_memory(setup, monkeypatch):
    monkeypatch.setattr(setup.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for gib, jobs in ((0, 1), (1, 1), (5, 5), (200, 64)):
        monkeypatch.setattr(setup, "free_memory", lambda gib=gib: gib << 30)
        assert setup.num_jobs() == jobs
    monkeypatch.undo()
    assert 1 <= setup.num_jobs() <= (os.cpu_count() or 1)


# What is packed


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory):
    """A wheel built with nothing compiled, from a tree that holds a stale library and module."""
    tree = copy_tree(tmp_path_factory.mktemp("wheel") / "a tree")
    (tree / "spec_kernels" / "_C_cpu.so").write_bytes(b"stale")
    stale = tree / "build" / "lib" / "spec_kernels"
    stale.mkdir(parents=True)
    (stale / "removed_module.py").write_text("")
    (tree / "spec_kernels" / "assets" / "deep" / "er").mkdir(parents=True, exist_ok=True)
    (tree / "spec_kernels" / "assets" / "deep" / "er" / "file.json").write_text("{}")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "-w", str(tree / "dist"), str(tree)],
        capture_output=True,
        text=True,
        env=build_environment(SPEC_KERNELS_BUILD="none"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


def test_a_wheel_without_libraries_fits_every_platform(pure_wheel):
    assert pure_wheel.name.endswith("-py3-none-any.whl")


def test_a_wheel_holds_the_package_and_nothing_else(pure_wheel):
    names = zipfile.ZipFile(pure_wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"spec_kernels"}
    assert [n for n in names if n.endswith((".so", ".cpp", ".h", ".cu")) or "removed" in n] == []
    assert "spec_kernels/assets/deep/er/file.json" in names
    assert "spec_kernels/comm/boxes.json" in names
    ours = {
        str(p.relative_to(ROOT))
        for p in PACKAGE.rglob("*.py")
        if "assets" not in p.relative_to(PACKAGE).parts
    }
    assert ours - set(names) == set()
    assert any(name.endswith("licenses/LICENSE") or name.endswith("/LICENSE") for name in names)


def test_a_source_distribution_can_build(tree):
    done = run_setup(tree, "sdist", "--formats=zip")
    assert done.returncode == 0, done.stderr
    (archive,) = (tree / "dist").glob("*.zip")
    names = {name.split("/", 1)[1] for name in zipfile.ZipFile(archive).namelist()}
    kernels = {str(p.relative_to(tree)) for p in (tree / "csrc").rglob("*") if p.is_file()}
    assert kernels | {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE"} <= names
    assert [name for name in names if name.endswith(".so")] == []


# Every way to install, for real: minutes, so only on request (pytest -m install; .ci/run does).


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return copy_tree(tmp_path_factory.mktemp("source") / "a tree")


@pytest.fixture
def new_environment(tmp_path):
    """Makes a virtual environment that sees this one's packages as its own, or only pip's."""

    def make(with_torch=True):
        folder = tmp_path / "an environment"
        venv.create(folder, with_pip=False, symlinks=True)
        paths = {"base": str(folder), "platbase": str(folder)}
        packages = Path(sysconfig.get_path("purelib", vars=paths))
        if with_torch:
            here = Path(torch.__file__).parent.parent
            for installed in here.iterdir():
                if not installed.name.startswith(("spec_kernels", "__editable__", "_virtualenv")):
                    (packages / installed.name).symlink_to(installed)
        return folder / "bin" / "python"

    return make


def pip_install(python, *args, cwd, **environment):
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", *args]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=build_environment(**environment)
    )


CHECK = """
import sys, torch, spec_kernels
from spec_kernels import _library
residual = torch.ones(2, 8)
out = spec_kernels.hidden_capture(torch.ones(2, 8), residual, torch.ones(8), 1e-6)
assert torch.allclose(out, torch.ones(2, 8), atol=1e-5) and residual.eq(2).all()
assert spec_kernels.__version__ != "0.0.0+source"
print(_library.LIBRARIES["cpu"].reason, spec_kernels.__file__)
"""


def check_installed(python, tmp_path):
    """(state of _C_cpu, where the package is), seen from a folder without sources."""
    done = subprocess.run(
        [str(python), "-c", CHECK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=build_environment(),
    )
    assert done.returncode == 0, done.stderr
    state, place = done.stdout.strip().rsplit(" /", 1)
    return state, Path("/" + place)


@pytest.mark.install
@pytest.mark.parametrize("editable", [False, True], ids=["copied", "editable"])
@pytest.mark.parametrize("isolated", [False, True], ids=["plain", "isolated"])
def test_pip_install(source, new_environment, tmp_path, editable, isolated):
    python = new_environment()
    args = [*(() if isolated else ("--no-build-isolation",)), *(("-e",) if editable else ()), "."]
    done = pip_install(python, *args, cwd=source, SPEC_KERNELS_BUILD="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    state, place = check_installed(python, tmp_path)
    assert state == "loaded"
    assert place.is_relative_to(source) is editable


@pytest.mark.install
def test_pip_install_without_torch_says_what_to_type(source, new_environment):
    done = pip_install(new_environment(with_torch=False), ".", cwd=source)
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "spec-kernels: " in line]
    assert len(lines) == 1
    assert "type: pip install --no-build-isolation ." in lines[0]


@pytest.mark.install
def test_pip_install_without_a_compiler(source, new_environment, tmp_path):
    python = new_environment()
    path = path_without(tmp_path, *COMPILERS)
    done = pip_install(python, "-v", "--no-build-isolation", ".", cwd=source, PATH=path, CXX=None)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in (done.stdout + done.stderr).splitlines() if "not found" in line]
    assert len(told) == 1 and "every op runs its PyTorch reference" in told[0]
    assert check_installed(python, tmp_path)[0] == "not built"
