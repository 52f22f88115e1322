"""Starts the ranks of one machine by fork, watches them, and ends them together.

Forking from a parent that has imported torch starts eight ranks in milliseconds; importing torch in
each would take seconds. What makes it safe here:

- Ranks are forked from a thread made for it. A thread pool of OpenMP belongs to the thread that
  first used it, and a child whose forking thread had one hangs at its first parallel region; a
  fresh thread has none.
- A rank dies with its parent (PR_SET_PDEATHSIG), and with any other rank: the parent ends the rest
  at once.
- Ranks ignore SIGINT: a terminal sends Ctrl-C to all of them, and only the parent answers it, by
  ending the ranks.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import selectors
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from spec_kernels.comm.communicator import (
    DEFAULT_CAPACITY,
    DEFAULT_TIMEOUT_MS,
    Communicator,
    Group,
)
from spec_kernels.comm.policy import num_cores

_TERM_SECONDS = 1.0  # between asking a rank to end and making it
_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """A rank raised, or died. ``rank`` says which; the text has its traceback."""

    def __init__(self, rank: int, message: str, trace: str = ""):
        super().__init__(f"rank {rank}: {message}" + (f"\n{trace.rstrip()}" if trace else ""))
        self.rank = rank
        self.message = message


@dataclass
class Outcome:
    """How one rank ended: ``value`` if ``error`` is None; ``signal`` if one killed it."""

    value: object = None
    error: str | None = None
    trace: str = ""
    failed_at: float = 0.0  # on the clock that all ranks share
    signal: int | None = None


def default_num_threads(world_size: int) -> int:
    """Threads of a rank's torch pool: an equal share of the cores, at least one."""
    return max(1, num_cores() // world_size)


class RankGroup:
    """Running ranks; a context manager that ends them. ``launch`` is the short way.

    Args:
        fn: called as ``fn(comm, *args)`` in each rank; what it returns is pickled for the parent.
        world_size: 1 to 8.
        args: passed on.
        config, capacity, timeout_ms, transport: see ``Communicator.create_group`` and
            ``Group.bind``; a callable ``config`` is called with the rank.
        num_threads: torch threads of each rank (default: ``default_num_threads``).
    """

    def __init__(
        self,
        fn: Callable[..., object],
        world_size: int,
        args: tuple = (),
        *,
        config: Mapping[str, object] | bytes | Callable[[int], object] | None = None,
        capacity: int = DEFAULT_CAPACITY,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        transport: str | None = None,
        num_threads: int | None = None,
        policy=None,
    ):
        self._group = Communicator.create_group(
            world_size, capacity=capacity, timeout_ms=timeout_ms, transport=transport, policy=policy
        )
        self._fn, self._args, self._config = fn, args, config
        self._num_threads = num_threads or default_num_threads(world_size)
        self.pids: list[int] = []
        self.outcomes: dict[int, Outcome] = {}
        self._pipes: dict[int, int] = {}
        self._received = {rank: bytearray() for rank in range(world_size)}
        self._ended_by_us: set[int] = set()
        self._finished = threading.Event()
        started = threading.Event()
        failure: list[BaseException] = []

        def fork_all() -> None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    for rank in range(world_size):
                        self._fork(rank)
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                failure.append(error)
            started.set()
            self._finished.wait()  # ranks die with the thread that forked them

        sys.stdout.flush()
        sys.stderr.flush()
        self._thread = threading.Thread(target=fork_all, name="spec-kernels-fork", daemon=True)
        self._thread.start()
        try:
            started.wait()
            if failure:
                raise failure[0]
        except BaseException:
            self.stop()
            raise

    def _fork(self, rank: int) -> None:
        parent = os.getpid()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write_end)
            self.pids.append(pid)
            self._pipes[rank] = read_end
            return
        code = 1
        try:
            os.close(read_end)
            for other in self._pipes.values():
                os.close(other)
            code = _run_rank(
                self._group,
                rank,
                self._fn,
                self._args,
                self._config,
                self._num_threads,
                parent,
                write_end,
            )
        finally:
            # No clean-up of the parent's: its atexit handlers and buffers are not this process's to
            # run.
            os._exit(code)

    def wait(self, timeout: float | None = None, *, stop_on_failure: bool = True) -> list[Outcome]:
        """Waits for all ranks; when one fails, ends the others unless told not to.

        Raises:
            TimeoutError: ranks still run after ``timeout`` seconds (they are left running).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank, pipe in self._pipes.items():
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(self.outcomes) < len(self.pids):
                # A rank's own children may hold its pipe open after its death, so pids are looked
                # at as well.
                for key, _ in selector.select(0.2):
                    self._read(key.data, selector)
                self._reap()
                if stop_on_failure and any(o.error for o in self.outcomes.values()):
                    self.stop()
                    break
                if deadline is not None and time.monotonic() > deadline:
                    running = [r for r in range(len(self.pids)) if r not in self.outcomes]
                    if running:
                        raise TimeoutError(f"ranks {running} still run after {timeout} s")
        self._finished.set()
        return [self.outcomes[r] for r in range(len(self.pids))]

    def failure(self) -> RankError | None:
        """The cause, if any rank failed: one that was killed, else the first to raise."""
        failed = [(o.signal is None, o.failed_at, r) for r, o in self.outcomes.items() if o.error]
        if not failed:
            return None
        _, _, rank = min(failed)
        return RankError(rank, self.outcomes[rank].error, self.outcomes[rank].trace)

    def stop(self) -> None:
        """Ends ranks that still run: asks, then kills after a second. Never blocks longer."""
        self._reap()
        for sig, patience in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, 60.0)):
            running = [r for r in range(len(self.pids)) if r not in self.outcomes]
            for rank in running:
                self._ended_by_us.add(rank)
                os.kill(self.pids[rank], sig)
            give_up = time.monotonic() + patience
            while running and time.monotonic() < give_up:
                self._reap()
                running = [r for r in running if r not in self.outcomes]
                if running:
                    time.sleep(0.002)
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes.clear()
        self._finished.set()
        self._thread.join()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def _read(self, rank: int, selector) -> None:
        chunk = os.read(self._pipes[rank], 1 << 20)
        self._received[rank] += chunk
        if not chunk:
            selector.unregister(self._pipes[rank])

    def _reap(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank in self.outcomes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.outcomes[rank] = self._outcome(rank, status)

    def _outcome(self, rank: int, status: int) -> Outcome:
        # The writer is gone: what the pipe still holds is all there is, and reading must not wait
        # for more.
        pipe = self._pipes[rank]
        os.set_blocking(pipe, False)
        try:
            while chunk := os.read(pipe, 1 << 20):
                self._received[rank] += chunk
        except BlockingIOError:
            pass
        try:
            return Outcome(*pickle.loads(bytes(self._received[rank])))
        except (EOFError, pickle.UnpicklingError):
            pass  # it ended before it could report
        if not os.WIFSIGNALED(status):
            return Outcome(error=f"ended with code {os.WEXITSTATUS(status)} and no report")
        number = os.WTERMSIG(status)
        if rank in self._ended_by_us:
            return Outcome(error="ended by the launcher", failed_at=float("inf"))
        return Outcome(error=f"killed by {signal.Signals(number).name}", signal=number)


def launch(
    fn: Callable[..., object], world_size: int, *args, timeout: float | None = None, **options
) -> list[object]:
    """Runs ``fn(comm, *args)`` in ``world_size`` ranks on this machine; returns what each returned.

    Output goes where the parent's goes. When a rank raises or dies, the others are ended at once
    and ``RankError`` names it; Ctrl-C ends all, and so does ``timeout`` (seconds;
    ``TimeoutError``). ``options`` as for ``RankGroup``.
    """
    with RankGroup(fn, world_size, args, **options) as ranks:
        outcomes = ranks.wait(timeout)
        failure = ranks.failure()
    if failure is not None:
        raise failure
    return [o.value for o in outcomes]


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _run_rank(group: Group, rank, fn, args, config, num_threads, parent, pipe) -> int:
    """The life of one rank; returns its exit code."""
    comm = None
    try:
        _die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(num_threads)
        comm = group.bind(rank, config(rank) if callable(config) else config)
        report = pickle.dumps((fn(comm, *args),))
        code = 0
    except BaseException as error:  # noqa: BLE001 - a rank forwards whatever it raised
        message = f"{type(error).__name__}: {error}"
        report = pickle.dumps((None, message, traceback.format_exc(), time.monotonic()))
        code = 1
    # The report goes first: once this rank leaves, the others raise too, and the parent wants the
    # cause, not the echo.
    with os.fdopen(pipe, "wb") as stream:
        stream.write(report)
    if comm is not None:
        if code:
            comm.abort(message)
        comm.close()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
