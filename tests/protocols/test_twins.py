"""ThreadSanitizer on the flag protocols: a C++ twin of the CUDA ones, the CPU ones as they are.

Broken variants must be reported as a data race, give a wrong word, or get stuck.
"""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_on_host import host_build

HERE = Path(__file__).parent
CPU_FOLDER = host_build.ROOT / "csrc" / "pcie_allreduce"
RACE, WRONG, STUCK = 66, 3, 4

FLAGS = ["-std=c++17", "-O1", "-g1", "-fsanitize=thread", f"-I{host_build.ROOT / 'csrc'}"]
# Functions that need torch are dropped, since nothing here calls them.
CPU_FLAGS = [f"-isystem{host_build.torch_folder() / 'include'}", *host_build.DEFINES, "-w"]
CPU_FLAGS += ["-DSK_ISA=plain", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"]

# World size, island size, calls, seed.
RUNS = [("4", "2", "2000", "1"), ("3", "0", "2000", "2"), ("8", "4", "300", "3")]
# World size, calls, seed, polls before a rank sleeps, ranks that share a sum.
CPU_RUNS = [("4", "800", "1", "0", "1"), ("4", "800", "2", "200", "3"), ("3", "800", "3", "0", "2")]

BROKEN = {
    "one_slot": (WRONG, STUCK),
    "no_clear": (WRONG, STUCK),
    "wrong_clear": (WRONG, STUCK),
    "first_block": (WRONG, STUCK),
    "relaxed_flag": (RACE,),
    "relaxed_await": (RACE,),
    "no_flag": (RACE, WRONG),
}
# What of pcie_allreduce_cpu.cpp is replaced by what.
BROKEN_CPU = {
    "one half for all steps": ("(step_ & 1) * world_", "0 * world_"),
    "an arrival that releases nothing": (
        "h_.arrivals.value.fetch_add(1) + 1",
        "h_.arrivals.value.fetch_add(1, std::memory_order_relaxed) + 1",
    ),
    "a result that is not released": (
        "h_.progress.value.store(progress);",
        "h_.progress.value.store(progress, std::memory_order_relaxed);",
    ),
}


def unusable():
    """Why nothing runs under ThreadSanitizer here, if so."""
    if not host_build.compiler():
        return "no C++ compiler"
    if platform.system() != "Linux":
        return "the CPU collectives wait by Linux futexes"
    probe = [host_build.compiler(), "-fsanitize=thread", "-x", "c++", "-", "-o", "/dev/null"]
    done = subprocess.run(probe, input="int main() {}", capture_output=True, text=True)
    return None if done.returncode == 0 else "the compiler has no ThreadSanitizer"


pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))


def compiled(target, *arguments):
    done = host_build.run_compiler([host_build.compiler(), *FLAGS, *arguments, "-o", str(target)])
    assert done.returncode == 0, done.stderr[-8000:]
    return target


def compiled_cpu(target, source):
    kernels = CPU_FOLDER / "pcie_allreduce_cpu_kernels.cpp"
    twin = [f'-DTWIN_SOURCE="{source}"', str(HERE / "twin_cpu.cpp"), str(kernels)]
    return compiled(target, *CPU_FLAGS, *twin)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The twin, the CPU collectives, and those broken, by name."""
    folder = tmp_path_factory.mktemp("twins")
    source = CPU_FOLDER / "pcie_allreduce_cpu.cpp"
    text = source.read_text()
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            "cpu": pool.submit(compiled_cpu, folder / "cpu", source),
            "twin": pool.submit(compiled, folder / "twin", "-Wall", str(HERE / "twin.cpp")),
        }
        for number, (name, (old, new)) in enumerate(BROKEN_CPU.items()):
            assert text.count(old) == 1, f"{source.name} no longer has one {old!r}"
            broken = folder / f"broken{number}.cpp"
            broken.write_text(text.replace(old, new))
            jobs[name] = pool.submit(compiled_cpu, folder / f"broken{number}", broken)
        return {name: job.result() for name, job in jobs.items()}


def run(program, *arguments):
    command = [str(program), *arguments]
    # The sanitizer of older compilers finds no room where addresses are very random.
    if setarch := shutil.which("setarch"):
        probe = subprocess.run([setarch, "-R", "true"], capture_output=True)
        command = [setarch, "-R", *command] if probe.returncode == 0 else command
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment["TSAN_OPTIONS"] = "halt_on_error=1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", RUNS, ids=lambda a: f"{a[0]} ranks")
def test_case_30_the_twin_has_no_race_and_no_wrong_word(programs, arguments):
    code, output = run(programs["twin"], *arguments)
    assert code == 0 and f"{arguments[2]} calls" in output, output[-4000:]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_twin_is_noticed(programs, broken):
    code, output = run(programs["twin"], "4", "2", "400", "1", broken)
    assert code in BROKEN[broken], output[-4000:]
    assert code != RACE or "data race" in output


@pytest.mark.parametrize("arguments", CPU_RUNS, ids=lambda a: f"{a[0]} ranks, {a[4]} workers")
def test_case_30_the_cpu_collectives_have_no_race_and_no_wrong_word(programs, arguments):
    code, output = run(programs["cpu"], *arguments)
    assert code == 0 and f"{arguments[1]} calls" in output, output[-4000:]


@pytest.mark.parametrize("broken", BROKEN_CPU)
def test_broken_cpu_collectives_are_noticed(programs, broken):
    code, output = run(programs[broken], *CPU_RUNS[1])
    assert code in (RACE, WRONG, STUCK), output[-4000:]
    assert code != RACE or "data race" in output
