"""README's examples run as they stand, and what it links to is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spec_kernels import _library

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="README.md: not in a source tree")


def test_examples_run(tmp_path):
    """In order, as one program: later blocks use what earlier ones made."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def test_every_op_is_shown():
    text = README.read_text()
    stems = {f.__module__.split(".")[2] for f in _library.REFERENCES.values()}
    assert [stem for stem in sorted(stems) if f"**{stem}**" not in text] == []


def kernels(pattern, op):
    """Ops whose kernel a file of ``pattern`` holds, as ``op`` finds them."""
    found = (re.findall(op, path.read_text(), re.MULTILINE) for path in ROOT.glob(pattern))
    return {name for names in found for name in names}


def test_the_table_of_what_is_supported_is_true():
    text = README.read_text()
    rows = re.findall(r"^\| ([a-z].*?) \|.*\| (tested) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    cuda = kernels("csrc/*/*_cuda.cu", r'm\.impl\("(\w+)"')
    triton = kernels("spec_kernels/ops/*/triton.py", r"^def (\w+)_triton\(")
    seen = set()
    for names, _, on_cuda, on_triton in rows:
        ops = set(names.split(":")[0].split(", ")) & _library.SCHEMAS.keys()
        seen |= ops
        for op in ops:
            assert on_cuda == ("on the host" if op in cuda else "-"), op
            assert on_triton == ("interpreter" if op in triton else "-"), op
    assert {op for op in _library.SCHEMAS if not op.startswith("pcie_")} <= seen


@pytest.mark.parametrize(
    "page", ["README.md", "docs/kernels.md", "docs/allreduce.md", "docs/planning.md"]
)
def test_links_lead_somewhere(page):
    def headings(path):
        return {
            re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in path.read_text().splitlines()
            if line.startswith("#")
        }

    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not heading or heading in headings(path), target


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pattern = r"(?:^|`)make ([a-z]+)"
    named = set(re.findall(pattern, README.read_text(), re.MULTILINE))
    assert named and named - targets == set()
