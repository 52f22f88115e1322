"""The emulated machine itself: what it runs is right, and what must not pass is an error."""

import ctypes
import functools
import os
import re
import subprocess
import sys

import pytest
import torch
from cuda_on_host import host_build

pytestmark = pytest.mark.skipif(
    host_build.missing() is not None, reason=f"no CUDA sources on the host: {host_build.missing()}"
)

SEEDS = range(8)
SELFTEST = host_build.HERE / "selftest.cu"


@functools.cache
def library(*defines):
    return ctypes.CDLL(str(host_build.build([SELFTEST], *defines)))


def run(name, seed=0, resident=0, max_steps=0, defines=()):
    loaded = library(*defines)
    host_build.configure_of(loaded)(seed, resident, max_steps)
    loaded.selftest.restype = ctypes.c_char_p
    return loaded.selftest(name.encode()).decode()


SOUND = [
    "indices",
    "warp_collectives",
    "block_barriers",
    "shared",
    "exchange",
    "atomic_sums",
    "launch_errors",
    "two_devices",
    "broken_captures",
]


@pytest.mark.parametrize("name", SOUND)
def test_runs_right_under_every_schedule(name):
    for seed in SEEDS:
        for resident in (0, 1, 5):
            assert run(name, seed, resident) == "", (seed, resident)


@pytest.mark.parametrize("name", SOUND)
def test_portable_contexts(name):
    """Where there is no hand-written switch, ucontext serves."""
    for seed in (0, 3):
        assert run(name, seed, defines=("SIMT_UCONTEXT",)) == ""


def test_a_missing_barrier_is_seen():
    """Schedules differ enough for stale values to show."""
    stale = [seed for seed in SEEDS if run("exchange_without_barrier", seed) == "stale"]
    assert len(stale) >= len(SEEDS) // 2, stale


@pytest.mark.parametrize(
    "name, message",
    [
        ("divergent", r"divergent block barrier: another thread is at .*selftest\.cu:\d+; at "),
        ("barrier_after_exit", r"(exit|exited)"),
        ("missing_lane", r"deadlock.*threads 0-6: wait at the warp collective of .*selftest\.cu"),
        ("mask_lacks_caller", "mask lacks the caller; at device 0, block"),
        ("lane_outside_mask", "a shuffle reads a lane outside its mask"),
        ("exited_lane", "names a lane that has exited"),
        ("waits_for_ever", "no end: threads wait for memory that does not change"),
        ("traps", r"__trap\(\); at device 0, block \(\d, 0, 0\), thread 3"),
    ],
)
def test_what_must_not_pass_is_an_error_and_the_machine_goes_on(name, message):
    for seed in SEEDS:
        got = run(name, seed, max_steps=20000)
        assert got.startswith("cuda_on_host: "), got
        assert re.search(message, got, re.S), got
        assert run("shared", seed) == ""


def test_a_schedule_can_be_repeated():
    first = [run("exchange_without_barrier", seed) for seed in range(20)]
    assert first == [run("exchange_without_barrier", seed) for seed in range(20)]


def numbers():
    """Every 16-bit float of both kinds, the midpoints beside it, and random bits."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    bf16 = (bits << 16).view(torch.float32)
    half = bits.to(torch.int16).view(torch.float16).float()
    middle = [(half.view(torch.int32) + step).view(torch.float32) for step in (-1, 1, 4095, 4096)]
    middle += [((bits << 16) + step).view(torch.float32) for step in (1, 32767, 32768, 32769)]
    generator = torch.Generator().manual_seed(0)
    wild = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).int()
    return torch.cat([bf16, half, *middle, wild.view(torch.float32)]).contiguous()


def test_conversions_round_as_torch_does():
    x = numbers()
    bf16 = torch.empty(len(x), dtype=torch.bfloat16)
    half = torch.empty(len(x), dtype=torch.float16)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, bf16, half)]
    library().convert(*pointers, ctypes.c_int64(len(x)))
    known = ~x.isnan()
    assert bf16[known].view(torch.int16).equal(x[known].bfloat16().view(torch.int16))
    assert half[known].view(torch.int16).equal(x[known].half().view(torch.int16))
    assert bf16[~known].isnan().all() and half[~known].isnan().all()


def test_conversions_back_are_exact():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    bf16, half = torch.empty(1 << 16), torch.empty(1 << 16)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (bits, bf16, half)]
    library().widen(*pointers, ctypes.c_int64(1 << 16))
    assert torch.equal(bf16.nan_to_num(7.0), bits.view(torch.bfloat16).float().nan_to_num(7.0))
    assert torch.equal(half.nan_to_num(7.0), bits.view(torch.float16).float().nan_to_num(7.0))


@pytest.mark.skipif(not host_build.sanitized(), reason="only under make sanitize")
def test_the_sanitizer_watches_shared_memory():
    code = "from cuda_on_host import test_simt; test_simt.run('shared_overflow')"
    environment = {**os.environ, "PYTHONPATH": f"{host_build.ROOT}:{host_build.HERE.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
