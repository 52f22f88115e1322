"""Starting ranks: results, errors with rank and traceback, and ranks that end together."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from spec_kernels.comm.launch import RankError, RankGroup, launch
from spec_kernels.comm.policy import num_cores

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 60


def gone(pid):
    """True once the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def script(body, *arguments, **options):
    """A program of its own, so that signals and streams are its own too."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(body), *arguments],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_returns_what_each_rank_returned(world_size):
    def worker(comm, offset):
        return comm.rank + offset, torch.full((2,), comm.rank), torch.get_num_threads()

    results = launch(worker, world_size, 10, timeout=TIMEOUT)
    assert [r[0] for r in results] == list(range(10, 10 + world_size))
    assert all(torch.equal(r[1], torch.full((2,), i)) for i, r in enumerate(results))
    assert {r[2] for r in results} == {max(1, num_cores() // world_size)}


def test_large_results_do_not_block():
    results = launch(lambda comm: bytes(3_000_000), 2, timeout=TIMEOUT)
    assert [len(r) for r in results] == [3_000_000] * 2


def test_error_names_rank_and_traceback():
    def worker(comm):
        if comm.rank == 2:
            raise LookupError("no such layer")
        comm.barrier()

    with pytest.raises(RankError, match="^rank 2: LookupError: no such layer") as caught:
        launch(worker, 4, timeout=TIMEOUT)
    assert caught.value.rank == 2 and "in worker" in str(caught.value)


def test_killed_rank_ends_the_others():
    pids = []

    def worker(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with RankGroup(worker, 3) as ranks:
        pids += ranks.pids
        outcomes = ranks.wait(TIMEOUT)
        assert str(ranks.failure()).startswith("rank 1: killed by SIGKILL")
    assert all(o.error for o in outcomes) and all(gone(p) for p in pids)


def test_rank_that_ignores_sigterm_or_is_stopped_is_killed():
    def worker(comm):
        if comm.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if comm.rank == 2:
            raise ValueError("the end")
        time.sleep(600)

    with RankGroup(worker, 3) as ranks:
        ranks.wait(TIMEOUT)
        assert all(gone(p) for p in ranks.pids)
        assert "rank 2: ValueError: the end" in str(ranks.failure())


def test_exit_without_a_report_is_an_error():
    def worker(comm):
        os._exit(3)

    with pytest.raises(RankError, match="rank 0: ended with code 3 and no report"):
        launch(worker, 1, timeout=TIMEOUT)


def test_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RankError, match="rank 0: .*pickle"):
        launch(lambda comm: lambda: None, 1, timeout=TIMEOUT)


def test_timeout_ends_the_ranks():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        launch(lambda comm: time.sleep(600), 2, timeout=0.5)


def test_parallel_regions_work_after_the_parent_used_its_own():
    """A fork from the thread that started the parent's OpenMP pool would hang in the child."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.randn(400, 400)
    expected = x @ x

    def worker(comm):
        y = x @ x
        (torch.zeros(1 << 20) + 1).sum()
        return torch.equal(y, expected)

    try:
        assert launch(worker, 2, num_threads=2, timeout=TIMEOUT) == [True, True]
    finally:
        torch.set_num_threads(before)


def test_output_streams_and_ctrl_c_ends_all():
    child = script(
        """
        import os, time
        from spec_kernels.comm.launch import launch
        def worker(comm):
            if comm.rank == 0:
                print("first line", flush=True)
            comm.barrier()
            os.write(1, f"pid {os.getpid()}\\n".encode())  # one write: ranks share the pipe
            time.sleep(600)
        launch(worker, 3)
        """,
        start_new_session=True,
    )
    lines = [child.stdout.readline() for _ in range(4)]
    assert lines[0] == "first line\n"
    pids = [int(line.split()[1]) for line in lines[1:]]
    os.killpg(child.pid, signal.SIGINT)  # what a terminal does
    _, errors = child.communicate(timeout=TIMEOUT)
    assert child.returncode != 0 and errors.count("KeyboardInterrupt") == 1
    wait_until(lambda: all(gone(p) for p in pids))


def test_no_rank_survives_its_parent():
    child = script(
        """
        import os, time
        from spec_kernels.comm.launch import launch
        def worker(comm):
            os.write(1, f"pid {os.getpid()}\\n".encode())  # one write: ranks share the pipe
            time.sleep(600)
        launch(worker, 3)
        """
    )
    pids = [int(child.stdout.readline().split()[1]) for _ in range(3)]
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=TIMEOUT)
    wait_until(lambda: all(gone(p) for p in pids))
