"""The shape of the tree: one stem everywhere, imports one way, nothing that must not be there."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from spec_kernels import _library

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spec_kernels"
STEMS = sorted(p.name for p in (PACKAGE / "ops").iterdir() if (p / "api.py").exists())
MODULES = sorted(PACKAGE.rglob("*.py"))

# Higher may import lower. testing may see all, and only tests and benchmarks see it.
LAYERS = {
    "_library": 0,
    "ops": 1,
    "compat": 2,
    "comm": 2,
    "models": 3,
    "decode": 4,
    "integrations": 5,
    "planning": 5,
    "training": 5,
    "info": 6,
    "cli": 6,
    "__main__": 6,
    "testing": 7,
}
# Sideways imports within a layer would make a circle possible; the command line is one thing.
MAY_MEET = {("cli", "info"), ("__main__", "cli")}
ENGINES = {"vllm", "sglang", "flashinfer", "tensorrt_llm"}


def tracked_files():
    """Files under version control; without git, those of the source folders."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]
    folders = ("csrc", "spec_kernels", "tests", "benchmarks")
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    return [p for p in found if p.suffix not in (".so", ".pyc")]


def imported_modules(path):
    """Absolute names of what ``path`` imports, wherever in the file, and the line."""
    package = ("spec_kernels", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            for alias in node.names:
                yield ".".join([*base, alias.name]), node.lineno


def part_of(path):
    """The layer's name: the first folder, or the module, below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_stems_are_those_of_the_design():
    assert STEMS == [
        "compact",
        "draft_sample",
        "hidden_capture",
        "merge_states",
        "moe_experts",
        "pcie_allreduce",
        "rope_append",
        "tree_attention",
        "tree_build",
        "tree_verify",
    ]


@pytest.mark.parametrize("stem", STEMS)
def test_one_stem_everywhere(stem):
    expected = [
        f"csrc/{stem}/{stem}.h",
        f"csrc/{stem}/{stem}_cpu.cpp",
        f"spec_kernels/ops/{stem}/__init__.py",
        f"spec_kernels/ops/{stem}/api.py",
        f"spec_kernels/ops/{stem}/reference.py",
        f"tests/ops/test_{stem}.py",
        f"benchmarks/bench_{stem}.py",
    ]
    assert [name for name in expected if not (ROOT / name).exists()] == []


def test_no_file_without_a_stem():
    kernels = {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()} - {"common", "host"}
    # A long suite is split by what it tests: test_<stem>_<what>.py.
    suites = {
        name if not (stems := [s for s in STEMS if name.startswith(f"{s}_")]) else max(stems)
        for name in (p.stem.removeprefix("test_") for p in (ROOT / "tests/ops").glob("test_*.py"))
    }
    benches = {p.stem.removeprefix("bench_") for p in (ROOT / "benchmarks").glob("bench_*.py")}
    assert kernels - set(STEMS) == set()
    assert suites - set(STEMS) == set()
    assert benches - {*STEMS, "decode", "tree_shape"} == set()


@pytest.mark.parametrize("name", _library.SCHEMAS)
def test_every_schema_has_a_reference_in_its_stem(name):
    import spec_kernels.ops  # noqa: F401  the references register on import

    reference = _library.REFERENCES.get(name)
    assert reference is not None, f"no reference is registered for {name}"
    assert re.fullmatch(rf"spec_kernels\.ops\.({'|'.join(STEMS)})\.\w+", reference.__module__)


def test_every_part_has_a_layer():
    parts = {part_of(p) for p in MODULES} - {"__init__"}
    assert parts - LAYERS.keys() == set()


def wrong_imports(path):
    here = part_of(path)
    for name, line in imported_modules(path):
        parts = name.split(".")
        if parts[0] in ENGINES and here != "integrations":
            yield f"{path.relative_to(ROOT)}:{line} imports engine {parts[0]}"
        if parts[0] != "spec_kernels" or len(parts) < 2 or parts[1] not in LAYERS:
            continue
        there = parts[1]
        if there == here or (here, there) in MAY_MEET:
            continue
        allowed = {"ops"} if here == "__init__" else {k for k in LAYERS if LAYERS[k] < LAYERS[here]}
        if here == "compat":
            allowed = {"ops", "_library"}
        allowed -= {"compat", "integrations"} if here != "testing" else set()
        if there not in allowed:
            yield f"{path.relative_to(ROOT)}:{line} imports spec_kernels.{there}"


def test_imports_point_one_way():
    assert [wrong for path in MODULES for wrong in wrong_imports(path)] == []


@pytest.mark.parametrize(
    "place, source, wrong",
    [
        ("ops/x/api.py", "from spec_kernels.models import config", True),
        ("ops/x/api.py", "from ...decode import engine", True),
        ("ops/x/api.py", "def f():\n    import spec_kernels.cli", True),
        ("models/x.py", "from spec_kernels.testing import compare", True),
        ("training/x.py", "from spec_kernels.planning import cost", True),
        ("decode/x.py", "import vllm", True),
        ("decode/x.py", "from spec_kernels.ops import compact", False),
        ("cli.py", "from spec_kernels import info", False),
    ],
)
def test_the_import_rule_sees_violations(place, source, wrong, tmp_path, monkeypatch):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert bool(list(wrong_imports(path))) is wrong


def test_setup_never_imports_torch():
    tree = ast.parse((ROOT / "setup.py").read_text())
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert [n for n in names if n and n.split(".")[0] == "torch"] == []


UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve"}
# What a rank that we forked returns to its parent is no file.
OWN_PROCESSES = {"comm/launch.py"}


def unsafe_reads(path):
    """Places that could run code from a file, or from a checkpoint's repository."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for name in names:
                if name.split(".")[0] in UNPICKLERS:
                    yield node.lineno, name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            yield node.lineno, "torch.load"
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            yield node.value.lineno, node.arg


def test_no_file_can_run_code():
    """Weights and checkpoints are safetensors."""
    found = []
    for path in [*MODULES, *(ROOT / "benchmarks").glob("*.py")]:
        place = str(path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT))
        for line, what in unsafe_reads(path):
            if what == "torch.load" or place not in OWN_PROCESSES:
                found.append(f"{place}:{line} {what}")
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_rule_on_files_sees_violations(source, tmp_path):
    path = tmp_path / "x.py"
    path.write_text(source)
    assert list(unsafe_reads(path))


def test_sizes():
    files = tracked_files()
    assets = [p for p in files if PACKAGE / "assets" in p.parents]
    large = {str(p.relative_to(ROOT)): p.stat().st_size for p in files if p not in assets}
    assert {name: size for name, size in large.items() if size > 4 << 20} == {}
    assert sum(p.stat().st_size for p in assets) <= 16_000_000


def test_nothing_is_left_to_do():
    """Markers of unfinished work, and paths of one machine, have no place in the sources."""
    marker = re.compile(
        "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error"])
    )
    machine = re.compile("|".join(["/ro" + "ot/", "/wor" + "k/", "/opt/wh" + "eels"]))
    suffixes = {".py", ".h", ".cpp", ".cu", ".cuh", ".txt", ".toml", ".md", ".in", ""}
    found = []
    for path in tracked_files():
        if path.suffix not in suffixes or PACKAGE / "assets" in path.parents:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if marker.search(line) or machine.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
