"""Every mutant of ``mutants.py`` makes its test fail: the suites notice what they are there for."""

import json
import re
import subprocess
import sys

import pytest
from cuda_on_host import host_build
from cuda_on_host.mutants import MUTANTS

pytestmark = pytest.mark.skipif(
    host_build.missing() is not None, reason=f"no CUDA sources on the host: {host_build.missing()}"
)

CRASHES = (-6, -7, -8, -11)


@pytest.fixture(scope="module")
def outcomes():
    command = [sys.executable, str(host_build.HERE / "mutants.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_named_test_fails(outcomes, mutant):
    code, output = outcomes[mutant]
    assert code in (1, *CRASHES), f"{mutant} survives {MUTANTS[mutant][1]}:\n{output[-2000:]}"
    assert code != 1 or "1 failed" in output, output[-2000:]


def test_every_mutant_of_the_sources_is_listed():
    sources = [
        p for p in (host_build.ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".h", ".cuh")
    ]
    named = {n for p in sources for n in re.findall(r'\bmutant\("(\w+)"\)', p.read_text())}
    assert named == set(MUTANTS)
