"""Other ways to meet: torchrun's environment, and gloo where memory cannot be shared."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from spec_kernels.comm import Communicator, communicator, from_environment
from spec_kernels.comm.communicator import shared_memory_reason
from spec_kernels.comm.launch import RankGroup, launch
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS
from spec_kernels.ops.pcie_allreduce.reference import lossy_sum, ordered_sum

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 60
needs_shared_memory = pytest.mark.skipif(
    shared_memory_reason() is not None, reason=f"no shared memory: {shared_memory_reason()}"
)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def in_environment(fn, world_size, *, tell=lambda rank: {}, timeout_ms=20_000, **options):
    """Runs ``fn(comm)`` in ranks that meet as under torchrun; outcomes of all."""
    port = free_port()

    def worker(_, rank):
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **{k: str(v) for k, v in tell(rank).items() if k.isupper()},
        }
        own = {k: v for k, v in tell(rank).items() if not k.isupper()}
        with from_environment(**{"timeout_ms": timeout_ms, **options, **own}) as comm:
            return fn(comm)

    groups = [RankGroup(worker, 1, (rank,)) for rank in range(world_size)]
    try:
        return [g.wait(TIMEOUT)[0] for g in groups]
    finally:
        for g in groups:
            g.stop()


def check_norm(comm, parts):
    """The residual to the bit; its norm is computed by another kernel on each transport."""
    num = parts[0].numel()
    hidden = {1: 1, 33: 11}.get(num, 500)
    x = parts[comm.rank].view(-1, hidden)
    residual, weight = torch.ones_like(x), torch.full((hidden,), 2.0, dtype=x.dtype)
    capture = torch.empty(x.shape[0], 1, hidden, dtype=x.dtype)
    got = comm.all_reduce_norm(x, residual, weight, 1e-5, capture=capture)
    whole = (ordered_sum(parts).view(-1, hidden).float() + 1).to(x.dtype)
    assert torch.equal(residual, whole) and torch.equal(capture[:, 0], whole)
    wide = whole.float()
    expected = 2 * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.allclose(got.float(), expected, rtol=1e-2, atol=1e-2)


def collectives(comm):
    world = comm.world_size
    for num in (0, 1, 33, 20_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            g = torch.Generator().manual_seed(num)
            parts = list((torch.randn((world, num), generator=g) * 1000).to(dtype))
            assert torch.equal(comm.all_reduce(parts[comm.rank]), ordered_sum(parts))
            assert torch.equal(comm.all_gather(parts[comm.rank]), torch.stack(parts))
            if dtype != torch.float16:
                check_norm(comm, parts)
            x = parts[comm.rank].clone()
            assert torch.equal(comm.broadcast(x, world - 1), parts[-1])
    parts = list(torch.randn((world, 3, 256), generator=torch.Generator().manual_seed(1)))
    for algorithm in ("two_shot_fp8", "two_shot_int8"):
        got = comm.all_reduce(parts[comm.rank], algorithm=algorithm)
        assert torch.equal(got, lossy_sum(parts, ALGORITHMS[algorithm]))
    flags = comm.all_gather(torch.tensor([[comm.rank % 2 == 0]]))
    assert flags.flatten().tolist() == [r % 2 == 0 for r in range(world)]
    comm.barrier()
    return comm.rank, comm.transport


@needs_shared_memory
def test_environment_shares_memory():
    outcomes = in_environment(collectives, 3)
    assert [o.value or o.error for o in outcomes] == [(r, "shared memory") for r in range(3)]


@needs_shared_memory
def test_environment_without_proc_falls_back_to_gloo(monkeypatch):
    """One rank that cannot open the segment sends all through gloo, and the transport says why."""

    class Host:
        class Segment:
            create = communicator._host.Segment.create

            @staticmethod
            def attach(pid, fd, id):
                raise PermissionError(13, "cannot open /proc/…/fd")

    monkeypatch.setattr(communicator, "_host", Host)
    outcomes = in_environment(collectives, 2)
    assert [(o.value or [o.error])[0] for o in outcomes] == [0, 1]
    for o in outcomes:
        assert o.value[1].startswith("gloo (rank 1: ") and "cannot open" in o.value[1]


def test_environment_of_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert from_environment().transport == "single"


@pytest.mark.parametrize(
    "environment,words",
    [
        ({"WORLD_SIZE": "9"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: expected a number, got 'two'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: expected a number, got ''"),
        (
            {"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK: expected",
        ),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "p"}, "MASTER_PORT"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK"),
    ],
)
def test_environment_refuses(monkeypatch, environment, words):
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=words):
        from_environment()


@pytest.mark.parametrize("options", [{"capacity": 0}, {"timeout_ms": 0}, {"transport": "nccl"}])
def test_environment_refuses_options_that_no_group_can_have(options):
    with pytest.raises(ValueError, match=f"from_environment: {next(iter(options))}: expected"):
        from_environment(**options)


@needs_shared_memory
def test_environment_settings_must_agree():
    outcomes = in_environment(
        collectives, 2, tell=lambda rank: {"timeout_ms": 20_000 + rank, "config": {"tp": rank}}
    )
    for o in outcomes:
        assert "timeout_ms: rank 0 has 20000, rank 1 has 20001" in o.error
        assert "config.tp: rank 0 has 0, rank 1 has 1" in o.error


@needs_shared_memory
def test_attach_refuses_what_is_not_the_segment():
    host = communicator._host
    group = Communicator.create_group(2)
    segment = group._segment
    again = host.Segment.attach(os.getpid(), segment.fd, segment.id)
    assert len(again) == len(segment) and again.id == segment.id
    with pytest.raises(RuntimeError, match="announced"):
        host.Segment.attach(os.getpid(), segment.fd, bytes(16))
    with open(__file__, "rb+") as f, pytest.raises(RuntimeError, match="not a segment"):
        host.Segment.attach(os.getpid(), f.fileno(), segment.id)
    with pytest.raises(OSError, match="cannot open"):
        host.Segment.attach(os.getpid(), 9999, segment.id)
    with pytest.raises(OSError):
        os.ftruncate(segment.fd, 4096)  # sealed: no peer can take the memory away


@needs_shared_memory
def test_torchrun(tmp_path):
    # A file each: what ranks print through one pipe may come out mixed.
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path

        import torch
        from spec_kernels.comm import from_environment
        with from_environment() as comm:
            total = comm.all_reduce(torch.full((5,), comm.rank + 1.0)).tolist()
            Path(sys.argv[1], str(comm.rank)).write_text(f"{total} {comm.transport}")
        """
    )
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python"]
    done = subprocess.run(
        [sys.executable, *command, sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told == dict.fromkeys("01", f"{[3.0] * 5} shared memory")


def gloo(fn, world_size, *args, **options):
    return launch(fn, world_size, *args, transport="gloo", timeout=TIMEOUT, **options)


def test_gloo_has_the_same_results():
    assert gloo(collectives, 3) == [(r, "gloo (asked for)") for r in range(3)]


def test_gloo_calls_that_differ_raise_on_all_ranks():
    def worker(comm):
        texts = []
        for call in (lambda: comm.all_reduce(torch.ones(3 + comm.rank)), comm.barrier):
            with pytest.raises(RuntimeError) as caught:
                call()
            texts.append(str(caught.value))
        return texts

    for first, later in gloo(worker, 2):
        assert "pcie_allreduce of 3 float32" in first and "of 4 float32" in first
        assert "ranks disagree" in later and later.startswith("pcie_barrier")


def test_gloo_algorithms_and_rows_that_differ_raise_on_all_ranks():
    def worker(comm):
        with pytest.raises(RuntimeError) as caught:
            comm.all_reduce(torch.ones(4), algorithm=comm.rank)
        return str(caught.value)

    for text in gloo(worker, 2):
        assert "of 4 float32 by algorithm 1" in text and "ranks disagree" in text

    def rows(comm):
        x = torch.ones((2, 6) if comm.rank else (6, 2))
        with pytest.raises(RuntimeError) as caught:
            comm.all_reduce_norm(x, x.clone(), x[0].clone(), 1e-5)
        return str(caught.value)

    for text in gloo(rows, 2):
        assert "in rows of 2" in text and "in rows of 6" in text


def test_gloo_killed_rank_and_abort():
    def worker(comm, aborts):
        if comm.rank == 1:
            if aborts:
                comm.abort("out of paper")
                return None
            os.kill(os.getpid(), 9)
        with pytest.raises(RuntimeError) as caught:
            comm.barrier()
        return str(caught.value)

    assert gloo(worker, 2, True)[0].endswith("aborted by rank 1: out of paper")
    with RankGroup(worker, 2, (False,), transport="gloo", timeout_ms=20_000) as ranks:
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
    assert "pcie_barrier: rank 0 of 2: gloo: " in outcomes[0].value


def test_gloo_configuration_must_agree():
    def worker(comm):
        raise AssertionError("ranks that disagree must not start")

    with RankGroup(worker, 2, config=lambda rank: {"tp": rank}, transport="gloo") as ranks:
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
    assert all("config.tp: rank 0 has 0, rank 1 has 1" in o.error for o in outcomes)


def test_gloo_bad_arguments():
    def worker(comm):
        for call in (
            lambda: comm.all_reduce(torch.ones(2, dtype=torch.int32)),
            lambda: comm.all_reduce(torch.ones(2), torch.ones(3)),
            lambda: comm.broadcast(torch.ones(2), 5),
            lambda: comm.all_reduce(torch.ones(2), algorithm=9),
            lambda: comm.all_reduce(torch.ones(2), algorithm="two_shot_fp8"),
            lambda: comm.all_reduce_norm(torch.ones(2, 3), torch.ones(2, 4), torch.ones(4), 1e-5),
            lambda: comm.all_gather(torch.ones(2, 3).t()),
        ):
            with pytest.raises(ValueError, match="^spec_kernels::"):
                call()
        return comm.all_reduce(torch.ones(2)).tolist()

    assert gloo(worker, 2) == [[2.0, 2.0]] * 2


def test_without_the_host_module_ranks_meet_through_gloo(monkeypatch):
    monkeypatch.setattr(communicator, "_host", None)
    monkeypatch.setattr(communicator, "_host_reason", "not built")
    assert Communicator.create_group(2).transport == "gloo (_host: not built)"
    with pytest.raises(RuntimeError, match="no shared memory: _host: not built"):
        Communicator.create_group(2, transport="shared memory")
