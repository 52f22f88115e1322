"""The ranks of one machine as a group: how they find each other, agree, talk, and fail together."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Mapping
from datetime import timedelta

import torch

from spec_kernels import __version__, _library
from spec_kernels.comm.policy import Policy, choose_policy, num_cores
from spec_kernels.ops.pcie_allreduce import reference
from spec_kernels.ops.pcie_allreduce.algorithms import AUTO, algorithm_id
from spec_kernels.ops.pcie_allreduce.api import DEFAULT_TIMEOUT_MS
from spec_kernels.ops.pcie_allreduce.checks import MAX_RANKS

DEFAULT_CAPACITY = 256 << 10
_PREFIX = "spec_kernels::"
_environment_groups = itertools.count()

try:
    _host = importlib.import_module("spec_kernels._host")
    _host_reason = "loaded"
except ImportError as error:
    _host = None
    _host_reason = str(error)


def shared_memory_reason() -> str | None:
    """Why ranks cannot share memory here, or None when they can."""
    if _host is None:
        return f"_host: {_host_reason}"
    if not _library.has_kernel("pcie_allreduce", "cpu"):
        return f"_C_cpu: {_library.LIBRARIES['cpu'].reason}"
    return None


class Communicator:
    """One rank's end of a group of 1 to 8 ranks on one machine.

    Every rank must make the same calls in the same order, with the same shapes and dtypes. Sums are
    bit-identical on all ranks (see ``spec_kernels.ops.pcie_allreduce``). When a rank dies, leaves,
    is later than ``timeout_ms``, calls something else or aborts, every call on every rank raises
    ``RuntimeError`` naming it, now and ever after. Calls of one rank must not overlap in time (a
    second thread is refused).

    Made by ``single()``, by ``create_group(n)`` in a parent and ``bind(rank)`` in its forked
    children, or by ``from_environment()`` under ``torchrun``. ``transport`` says how ranks meet:
    ``"single"``, ``"shared memory"``, or ``"gloo (reason)"``, which has the same results and is
    some hundred times slower.
    """

    rank: int
    world_size: int
    transport: str

    def __init__(
        self, rank, world_size, transport, workspace, timeout_ms, *, segment=None, gloo=None
    ):
        self.rank = rank
        self.world_size = world_size
        self.transport = transport
        self.timeout_ms = timeout_ms
        self._workspace = workspace
        self._segment = segment
        self._gloo = gloo
        self._devices = None
        ops = torch.ops.spec_kernels
        if gloo is None:
            self._all_reduce = ops.pcie_allreduce.default
            self._all_reduce_norm = ops.pcie_allreduce_norm.default
            self._all_gather = ops.pcie_all_gather.default
            self._broadcast = ops.pcie_broadcast.default
            self._barrier = ops.pcie_barrier.default
        else:
            reference.GROUPS[workspace.data_ptr()] = gloo
            self._all_reduce = reference.pcie_allreduce_reference
            self._all_reduce_norm = reference.pcie_allreduce_norm_reference
            self._all_gather = reference.pcie_all_gather_reference
            self._broadcast = reference.pcie_broadcast_reference
            self._barrier = reference.pcie_barrier_reference

    @staticmethod
    def single() -> Communicator:
        """The group of one: sums are copies, gathers add a dimension, nothing waits."""
        workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        return Communicator(0, 1, "single", workspace, DEFAULT_TIMEOUT_MS)

    @staticmethod
    def create_group(
        world_size: int,
        *,
        capacity: int = DEFAULT_CAPACITY,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        policy: Policy | None = None,
        transport: str | None = None,
    ) -> Group:
        """Makes the shared segment, in the parent; ``bind`` it in each forked child.

        Args:
            world_size: 1 to 8.
            capacity: bytes of a slot, rounded up to whole pages; longer messages go in pieces. The
                segment takes ``2 * world_size + 1`` slots of anonymous memory, allocated here.
            timeout_ms: how long a call waits for peers.
            policy: see ``spec_kernels.comm.policy``; chosen from the cores when None.
            transport: ``"gloo"`` forbids shared memory, ``"shared memory"`` insists on it; None
                takes the best.

        Raises:
            ValueError: an argument is out of range.
            OSError: the memory is not there.
            RuntimeError: shared memory was insisted on and cannot be had.
        """
        return Group(world_size, capacity, timeout_ms, policy, transport)

    def attach_device(self, device, **options):
        """Gives the ranks a ``DeviceGroup``, which takes tensors on its device from then on.

        All ranks call it at the same time. Arguments, errors and what every rank must keep to: see
        ``comm.device_group.DeviceGroup``. Tensors elsewhere go the way that they went before.
        ``close`` closes it. A group that was closed, or left after a failure, may be replaced.
        """
        from spec_kernels.comm.device_group import DeviceGroup

        if self._devices is not None and not self._devices.closed:
            raise ValueError(f"attach_device: expected none yet, got {self._devices.device}")
        self._devices = DeviceGroup(self, device, **options)
        return self._devices

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor | None = None, algorithm: int | str = AUTO
    ) -> torch.Tensor:
        """Sum over ranks into ``out`` (``x`` itself for in place; a new tensor when None).

        ``algorithm``: a name or number of ``spec_kernels.ops.pcie_allreduce.algorithms``, the same
        on every rank.
        """
        if self._devices is not None and self._devices.takes(x):
            return self._devices.all_reduce(x, out, algorithm)
        if out is None:
            out = torch.empty_like(x)
        try:
            self._all_reduce(
                x,
                out,
                self._workspace,
                self.rank,
                self.world_size,
                self.timeout_ms,
                algorithm_id("pcie_allreduce", algorithm),
            )
        except RuntimeError as error:
            raise translated(error) from None
        return out

    def all_reduce_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        capture: torch.Tensor | None = None,
        slot: int = 0,
        out: torch.Tensor | None = None,
        algorithm: int | str = AUTO,
    ) -> torch.Tensor:
        """``residual +=`` sum of ``x`` over ranks; returns its RMSNorm, and captures it on request.

        The bits of ``all_reduce`` followed by ``hidden_capture``, in one call; arguments as for
        ``spec_kernels.pcie_allreduce_norm``.
        """
        if self._devices is not None and self._devices.takes(x):
            return self._devices.all_reduce_norm(
                x, residual, weight, eps, capture=capture, slot=slot, out=out, algorithm=algorithm
            )
        if out is None:
            out = torch.empty_like(x)
        try:
            self._all_reduce_norm(
                x,
                residual,
                weight,
                eps,
                out,
                capture,
                slot,
                self._workspace,
                self.rank,
                self.world_size,
                self.timeout_ms,
                algorithm_id("pcie_allreduce_norm", algorithm),
            )
        except RuntimeError as error:
            raise translated(error) from None
        return out

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's ``x``: ``[world_size, *x.shape]``, any dtype."""
        if self._devices is not None and self._devices.takes(x):
            return self._devices.all_gather(x, out)
        return self._gather(x, out)

    def _gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = x.new_empty((self.world_size, *x.shape))
        try:
            self._all_gather(x, out, self._workspace, self.rank, self.world_size, self.timeout_ms)
        except RuntimeError as error:
            raise translated(error) from None
        return out

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites ``x`` with rank ``src``'s, any dtype; returns ``x``."""
        if self._devices is not None and self._devices.takes(x):
            return self._devices.broadcast(x, src)
        try:
            self._broadcast(x, src, self._workspace, self.rank, self.world_size, self.timeout_ms)
        except RuntimeError as error:
            raise translated(error) from None
        return x

    def barrier(self) -> None:
        """Returns when every rank has called it: the processes, not what their devices do."""
        try:
            self._barrier(self._workspace, self.rank, self.world_size, self.timeout_ms)
        except RuntimeError as error:
            raise translated(error) from None

    def exchange(self, value: object) -> list:
        """Every rank's ``value``, in rank order: anything that JSON can hold, of any length."""
        text = json.dumps(value).encode()
        lengths = self._gather(torch.tensor([len(text)], device="cpu")).flatten().tolist()
        padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
        return [json.loads(bytes(row.tolist())) for row in self._gather(padded)]

    def abort(self, reason: str) -> None:
        """Makes every rank's present or next call raise with ``reason``, on devices as well."""
        if self._segment is not None:
            self._segment.abort(self.rank, reason)
        if self._gloo is not None:
            self._gloo.abort(reason)
        devices, self._devices = self._devices, None
        if devices is not None:
            devices.leave()

    def close(self) -> None:
        """Leaves the group; peers that still wait for this rank raise. May be called twice.

        An attached ``DeviceGroup`` is closed first, together with all ranks.
        """
        devices, self._devices = self._devices, None
        try:
            if devices is not None:
                devices.close()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._segment is not None:
            self._segment.leave()
        if self._gloo is not None:
            self._gloo.close()
            reference.GROUPS.pop(self._workspace.data_ptr(), None)
        self._segment = self._gloo = None
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._all_reduce = self._all_reduce_norm = _closed
        self._all_gather = self._broadcast = self._barrier = _closed

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None:
            self.abort(f"{kind.__name__}: {error}")
        self.close()

    def agree(self, settings: Mapping[str, object]) -> None:
        """Compares settings across ranks; all raise, naming what differs, or none does."""
        plain = json.loads(json.dumps(dict(settings), sort_keys=True, default=str))
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()
        digests = self._gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        if bool((digests == digests[0]).all()):
            return
        others = self.exchange(plain)
        differences = []
        for rank, other in enumerate(others[1:], 1):
            for key in sorted(others[0].keys() | other.keys()):
                zero, theirs = (d.get(key, "nothing") for d in (others[0], other))
                if zero != theirs:
                    differences.append(f"{key}: rank 0 has {zero}, rank {rank} has {theirs}")
        self.close()
        raise RuntimeError(
            "communicator: ranks disagree on their configuration: " + "; ".join(differences)
        )


def _checked_capacity(caller: str, capacity: int, timeout_ms: int, transport: str | None) -> int:
    """``capacity`` in whole pages. ValueError for options that no group can have."""
    if capacity < 1:
        raise ValueError(f"{caller}: capacity: expected at least 1 byte, got {capacity}")
    if not 0 < timeout_ms < 1 << 31:
        raise ValueError(f"{caller}: timeout_ms: expected a positive number, got {timeout_ms}")
    if transport not in (None, "gloo", "shared memory"):
        raise ValueError(
            f"{caller}: transport: expected None, 'gloo' or 'shared memory', got {transport!r}"
        )
    return -(-capacity // 4096) * 4096


class Group:
    """A group before its ranks exist; see ``Communicator.create_group``."""

    def __init__(self, world_size, capacity, timeout_ms, policy, transport):
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(
                f"create_group: world_size: expected 1 to {MAX_RANKS} ranks, got {world_size}"
            )
        self.capacity = _checked_capacity("create_group", capacity, timeout_ms, transport)
        self.world_size = world_size
        self.timeout_ms = timeout_ms
        self._segment = self._listener = None
        if world_size == 1:
            self.transport = "single"
            return
        reason = "asked for" if transport == "gloo" else shared_memory_reason()
        if reason is None:
            policy = policy or choose_policy(world_size, num_cores())
            self._segment = _host.Segment.create(
                world_size=world_size, capacity=self.capacity, **policy.as_dict()
            )
            self.transport = "shared memory"
        elif transport == "shared memory":
            raise RuntimeError(f"create_group: no shared memory: {reason}")
        else:
            import socket

            # Bound here so that no rank has to guess a free port; rank 0 serves the store on it.
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
            self.transport = f"gloo ({reason})"

    def bind(self, rank: int, config: Mapping[str, object] | bytes | None = None) -> Communicator:
        """Makes this process rank ``rank``, and returns once all ranks are bound and agree.

        Args:
            rank: ``0 <= rank < world_size``, one process each.
            config: what all ranks must have alike (a mapping of JSON-able values, or bytes).

        Raises:
            ValueError: the rank is out of range or taken.
            RuntimeError: configurations differ (on all ranks, saying where), or a rank did not
                come.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"bind: rank: expected 0 <= rank < {self.world_size}, got {rank}")
        if self.world_size == 1:
            return Communicator.single()
        if self._segment is not None:
            return _bind_segment(self._segment, rank, self.timeout_ms, config)
        import torch.distributed as dist

        store = dist.TCPStore(
            "127.0.0.1",
            self._listener.getsockname()[1],
            self.world_size,
            is_master=rank == 0,
            timeout=timedelta(milliseconds=self.timeout_ms),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach() if rank == 0 else None,
        )
        return _bind_gloo(store, rank, self.world_size, self.timeout_ms, self.transport, config)


def from_environment(
    config: Mapping[str, object] | bytes | None = None,
    *,
    capacity: int = DEFAULT_CAPACITY,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    transport: str | None = None,
) -> Communicator:
    """The group that ``torchrun`` describes in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Ranks meet through torch's store; rank 0 announces its segment there (process and descriptor),
    and the others open it through ``/proc``. If any of them cannot (another machine, another user),
    all go through gloo instead, and ``transport`` says why. Without WORLD_SIZE in the environment,
    or with 1, this is ``Communicator.single()``.

    Args and errors as for ``Communicator.create_group`` and ``Group.bind``.
    """
    slot_bytes = _checked_capacity("from_environment", capacity, timeout_ms, transport)
    world_size = _environment_number("WORLD_SIZE", "1")
    if world_size == 1:
        return Communicator.single()
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"from_environment: WORLD_SIZE: expected 1 to {MAX_RANKS} ranks, got {world_size}"
        )
    missing = [k for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise ValueError(
            f"from_environment: expected {', '.join(missing)} beside WORLD_SIZE, got none"
        )
    rank = _environment_number("RANK")
    _environment_number("MASTER_PORT")
    if not 0 <= rank < world_size:
        raise ValueError(f"from_environment: RANK: expected 0 <= RANK < {world_size}, got {rank}")
    import torch.distributed as dist

    timeout = timedelta(milliseconds=timeout_ms)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"spec_kernels/{restart}/{next(_environment_groups)}", store)
    store.set_timeout(timeout)

    segment, reason = None, None
    if rank == 0:
        reason = "asked for" if transport == "gloo" else shared_memory_reason()
        if reason is None:
            segment = _host.Segment.create(
                world_size=world_size,
                capacity=slot_bytes,
                **choose_policy(world_size, num_cores()).as_dict(),
            )
            store.set("segment", json.dumps([os.getpid(), segment.fd, segment.id.hex()]))
        else:
            store.set("segment", json.dumps(reason))
    else:
        announced = json.loads(store.get("segment"))
        reason = shared_memory_reason()
        if isinstance(announced, str):
            reason = announced
        elif reason is None:
            pid, fd, identity = announced
            try:
                segment = _host.Segment.attach(pid, fd, bytes.fromhex(identity))
            except (OSError, RuntimeError) as error:
                reason = f"rank {rank}: {error}"
    store.set(f"reason/{rank}", reason or "")
    reasons = [store.get(f"reason/{r}").decode() for r in range(world_size)]
    reason = next((r for r in reasons if r), None)
    if reason is not None:
        if transport == "shared memory":
            raise RuntimeError(f"from_environment: no shared memory: {reason}")
        return _bind_gloo(store, rank, world_size, timeout_ms, f"gloo ({reason})", config, capacity)
    if segment.world_size != world_size:
        message = f"WORLD_SIZE: rank 0 has {segment.world_size}, rank {rank} has {world_size}"
        segment.abort(rank, message)
        raise RuntimeError(f"communicator: ranks disagree on their configuration: {message}")
    return _bind_segment(segment, rank, timeout_ms, config, capacity)


def _environment_number(name: str, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"from_environment: {name}: expected a number, got {text!r}") from None


def _settings(config, **own) -> dict[str, object]:
    settings = {"version": __version__, **own}
    if isinstance(config, bytes | bytearray):
        settings["config"] = hashlib.sha256(config).hexdigest()
    elif config is not None:
        settings |= {f"config.{key}": value for key, value in config.items()}
    return settings


def _bind_segment(segment, rank, timeout_ms, config, capacity=None) -> Communicator:
    segment.bind(rank)
    workspace = torch.frombuffer(segment, dtype=torch.uint8)
    world_size = segment.world_size
    comm = Communicator(rank, world_size, "shared memory", workspace, timeout_ms, segment=segment)
    capacity = capacity or segment.capacity
    comm.agree(_settings(config, world_size=world_size, capacity=capacity, timeout_ms=timeout_ms))
    return comm


def _bind_gloo(
    store, rank, world_size, timeout_ms, transport, config, capacity=None
) -> Communicator:
    gloo = reference.GlooGroup(store, rank, world_size, timeout_ms)
    workspace = torch.zeros(64, dtype=torch.uint8, device="cpu")  # its address names the group
    comm = Communicator(rank, world_size, transport, workspace, timeout_ms, gloo=gloo)
    comm._store = store  # rank 0 serves it
    comm.agree(_settings(config, world_size=world_size, capacity=capacity, timeout_ms=timeout_ms))
    return comm


def _closed(*args) -> None:
    raise RuntimeError("communicator: expected an open one, got one that was closed")


def translated(error: RuntimeError) -> Exception:
    """Bad arguments are ``ValueError``, failures of the group ``RuntimeError``; one line each."""
    text = str(error).split("\nException raised from", 1)[0]
    if text.startswith(_PREFIX):
        return ValueError(text)
    return RuntimeError(text)
