"""The device side of a communicator: slabs that peers write into, and who may reach which.

Ranks meet on the CPU (a ``Communicator``) to make a group, and no more after that: calls go from
device to device. Each rank allocates a slab of its own, peers map it through CUDA IPC, and the op
library learns where every slab stands.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed

from spec_kernels import __version__, _library
from spec_kernels.comm import p2p
from spec_kernels.comm.communicator import translated
from spec_kernels.comm.cuda_driver import Device, DeviceName, Driver
from spec_kernels.comm.meeting import Steps, run_alone, run_together, stage
from spec_kernels.comm.schedules import has_islands
from spec_kernels.comm.selection import MAX_ENTRIES, Selection, seed
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, AUTO, algorithm_id
from spec_kernels.ops.pcie_allreduce.api import DEFAULT_TIMEOUT_MS
from spec_kernels.ops.pcie_allreduce.checks import (
    MAX_RANKS,
    check_all_gather,
    check_allreduce,
    check_broadcast,
)

DEFAULT_ONE_SHOT_BYTES, DEFAULT_TWO_SHOT_BYTES = 64 << 10, 1 << 20
_UNLIMITED = (1 << 63) - 1
# Smaller allocations share a block of the driver's, and all of the block would be exported.
_EXPORT_ALIGNMENT = 2 << 20

# csrc/pcie_allreduce/slab.h


class Entry(ctypes.Structure):
    _fields_ = [
        ("max_bytes", ctypes.c_uint64),
        ("algorithm", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
    ]


VERSION = 1
STATUS_BYTES = 36
ABORT_OFFSET = 384  # of Control's word `abort` in a slab


class Attach(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("island_size", ctypes.c_int32),
        ("one_shot_bytes", ctypes.c_uint64),
        ("two_shot_bytes", ctypes.c_uint64),
        ("slabs", ctypes.c_void_p * MAX_RANKS),
        ("status_host", ctypes.c_void_p),
        ("status_device", ctypes.c_void_p),
        ("num_entries", ctypes.c_int32),
        ("table", Entry * MAX_ENTRIES),
    ]


_FUNCTIONS = {
    "spec_kernels_pcie_slab_bytes": (
        ctypes.c_uint64,
        [ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32],
    ),
    "spec_kernels_pcie_attach": (ctypes.c_char_p, [ctypes.POINTER(Attach)]),
    "spec_kernels_pcie_detach": (ctypes.c_char_p, [ctypes.c_void_p]),
    "spec_kernels_pcie_check": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_char_p]),
    "spec_kernels_pcie_use_stream": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_void_p]),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """``library`` with the types of the functions that a group calls."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class _OnDevice:
    """Memory of the driver's as torch takes it."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@dataclass
class Platform:
    """What a group stands on. ``cuda()`` makes the real one, tests put an emulated one here.

    Attributes:
        driver: loads and initialises the driver.
        library: the op library, after ``declare`` and ``p2p.declare``.
        ops: the namespace of ``torch.ops`` whose kernels ``library`` holds.
        torch_device: how torch calls a device of the driver's.
        tensor: ``tensor(address, num_bytes, torch_device)``, uint8, over memory of the driver's.
    """

    driver: Callable[[], Driver]
    library: ctypes.CDLL
    ops: object
    torch_device: Callable[[DeviceName], torch.device]
    tensor: Callable[[int, int, torch.device], torch.Tensor]

    @staticmethod
    def cuda() -> Platform:
        """RuntimeError: there is no CUDA driver, or the op library for CUDA is not loaded."""
        Driver()  # where there is none, no library would help
        state = _library.LIBRARIES["cuda"]
        if not state.loaded:
            raise RuntimeError(f"DeviceGroup: _C_cuda: {state.reason}")
        return Platform(
            driver=Driver,
            library=p2p.declare(declare(ctypes.CDLL(str(state.path)))),
            ops=torch.ops.spec_kernels,
            torch_device=lambda name: torch.device("cuda", name.ordinal),
            tensor=lambda address, num_bytes, device: torch.as_tensor(
                _OnDevice(address, num_bytes), device=device
            ),
        )


@dataclass(frozen=True)
class Settings:
    """What all ranks of a group must have alike.

    Attributes:
        one_shot_bytes, two_shot_bytes: longest message of one launch; longer ones take several. A
            slab takes about ``4 * world_size * one_shot_bytes + 10 * two_shot_bytes``.
        selection: which algorithm takes a message whose caller names none, as plain data.
        timeout_ms: how long a kernel waits for a peer. A captured call keeps what it was captured
            with.
        share_device: several ranks on one device, for correctness on a machine with one.
        fallback: name of the backend that takes messages beyond the selection, or None.
        verify: whether pairs are tried with data.
    """

    one_shot_bytes: int
    two_shot_bytes: int
    selection: dict
    timeout_ms: int
    share_device: bool
    fallback: str | None
    verify: bool

    def __post_init__(self) -> None:
        for name in ("one_shot_bytes", "two_shot_bytes"):
            if not 0 < getattr(self, name) <= 1 << 30:
                _fail(name, "1 byte to 1 GiB", getattr(self, name))
        if not 0 < self.timeout_ms < 1 << 31:
            _fail("timeout_ms", "a positive number of milliseconds", self.timeout_ms)


def _fail(name: str, expected: str, got: object):
    raise ValueError(f"DeviceGroup: {name}: expected {expected}, got {got}")


def _machine() -> str:
    """Names this boot of this machine, since host names need not differ."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class DeviceGroup:
    """One rank's end of a group of 1 to 8 ranks that sum on their devices.

    Made by all ranks of ``comm`` at the same time; what fails on one raises on all, and nothing is
    left behind. Every rank must make the same calls in the same order, with the same shapes and
    dtypes, on one stream: the first that calls eagerly, or ``use_stream``'s. Calls may be captured
    into graphs, which may be replayed in any order that is the same on all ranks. When a rank does
    otherwise, dies or is later than ``timeout_ms``, every rank's kernels end in time, their outputs
    all NaN, and ``check`` or the next call raises, now and ever after: make a new group.

    Args:
        comm: how the ranks meet; it must outlive the group.
        device: this rank's, as ``cuda_driver.Driver.find`` takes it: ``cuda:1``, a UUID, a PCI id.
        one_shot_bytes, two_shot_bytes, timeout_ms, share_device: see ``Settings``.
        selection: a ``comm.selection.Selection``, of ``spec-kernels tune`` or of one's own; its
            islands are ranks 0 to island_size - 1, and so on. None: ``selection.seed`` of this
            many ranks, for a machine that nobody has measured.
        fallback: a torch.distributed process group of the same ranks (NCCL, or gloo). It takes
            messages beyond the selection, and every call where ranks are on several machines; its
            sums are its own, not in the canonical order. Without one, messages beyond a selection
            that was given are an error, and otherwise several launches serve any size.
        verify: whether peers are tried with data first (``comm.p2p``), some milliseconds.
        platform: see ``Platform``.

    Attributes:
        devices: names of every rank's device.
        device: this rank's, as torch names it.
        links: what ``comm.p2p.verify`` found; None if it was not asked.
        limit: bytes of the longest message that the kernels take unless an algorithm is named.
        closed: whether this rank has left.

    Raises:
        ValueError: arguments that no group can have.
        RuntimeError: settings differ, a rank is missing, a device cannot be had or reached; the
            text names the rank.
    """

    def __init__(self, comm, device, *, platform: Platform | None = None, **options):
        self._meet = comm.exchange
        self._start(comm.rank, comm.world_size, None)
        run_alone(self._build(device, platform, **options), self._meet)

    @classmethod
    def local(cls, num_ranks: int, device, *, platform=None, **options) -> list[DeviceGroup]:
        """All ranks in this process, on one device: for correctness, and to time the protocol.

        Call each rank's group on a stream of its own, all of them before anything that waits for
        the device, as an allocation may: a rank's kernel runs until its peers' have run.
        """
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(
                f"DeviceGroup: num_ranks: expected 1 to {MAX_RANKS} ranks, got {num_ranks}"
            )
        groups = [cls.__new__(cls) for _ in range(num_ranks)]
        for rank, group in enumerate(groups):
            group._start(rank, num_ranks, groups)
        options |= {"share_device": True, "verify": False}
        run_together([group._build(device, platform, **options) for group in groups])
        return groups

    def _start(self, rank: int, world_size: int, together: list[DeviceGroup] | None) -> None:
        """A group that holds nothing yet. ``together``: all ranks', where this process has all."""
        self.rank, self.world_size, self._together = rank, world_size, together
        self.workspace: torch.Tensor | None = None
        self.links: p2p.PeerReport | None = None
        self._device: Device | None = None
        self._slab = self._status = 0
        self._slabs: list[int] = [0] * world_size  # of every rank, as mapped here
        self._imports: list[int] = []
        self._attached = self._leaving = self.closed = False

    def _build(
        self,
        device,
        platform: Platform | None,
        *,
        one_shot_bytes: int = DEFAULT_ONE_SHOT_BYTES,
        two_shot_bytes: int = DEFAULT_TWO_SHOT_BYTES,
        selection: Selection | None = None,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        share_device: bool = False,
        fallback=None,
        verify: bool = True,
    ) -> Steps[None]:
        self.fallback = fallback

        def prepare() -> dict:
            chosen = selection or seed(max(2, self.world_size))
            if chosen.island_size and not has_islands(self.world_size, chosen.island_size):
                _fail(
                    "selection",
                    f"islands that part {self.world_size} ranks evenly",
                    f"islands of {chosen.island_size}",
                )
            bounded = selection is not None or fallback is not None
            self.limit = chosen.entries[-1].max_bytes if bounded else _UNLIMITED
            self.settings = Settings(
                one_shot_bytes,
                two_shot_bytes,
                chosen.as_dict(),
                timeout_ms,
                share_device,
                None if fallback is None else str(fallback.name()),
                verify,
            )
            return self._allocate(device, platform)

        try:
            told = yield from stage("DeviceGroup", prepare)
            self.devices = [DeviceName(**t["device"]) for t in told]
            _agree(told, share_device, fallback is not None)
            if self.world_size == 1:
                self.workspace = torch.empty(0, dtype=torch.uint8, device=self.device)
                return
            if len({t["machine"] for t in told}) > 1:
                self.limit = -1
                yield from self._release()
                return
            yield from stage("DeviceGroup", lambda: self._open(told))
            if verify:
                yield from self._verify()
            yield from stage("DeviceGroup", self._attach)
        except Exception:
            yield from self._release()
            raise

    def _allocate(self, device, platform: Platform | None) -> dict:
        self.platform = platform or Platform.cuda()
        self._device = self.platform.driver().open(device)
        self.device = self.platform.torch_device(self._device.name)
        s = self.settings
        told = {"device": vars(self._device.name), "machine": _machine(), "handle": ""}
        told["settings"] = {"version": __version__, **vars(s)}
        if self.world_size == 1:
            return told
        self._slab_bytes = self.platform.library.spec_kernels_pcie_slab_bytes(
            self.world_size, s.one_shot_bytes, s.two_shot_bytes, s.selection["island_size"]
        )
        blocks = -(-self._slab_bytes // _EXPORT_ALIGNMENT)
        self._slab = self._device.allocate(blocks * _EXPORT_ALIGNMENT)
        self._status, self._status_device = self._device.allocate_host(STATUS_BYTES)
        ctypes.memset(self._status, 0xFF, STATUS_BYTES)
        self._clear()
        told["settings"]["slab_bytes"] = self._slab_bytes
        if self._together is None:
            told["handle"] = self._device.export(self._slab).hex()
        return told

    def _clear(self) -> None:
        """Every word at rest, before a peer may write."""
        self._device.fill(self._slab, 0xFF, self._slab_bytes)
        self._device.synchronize()

    def _open(self, told: list[dict]) -> None:
        self._slabs[self.rank] = self._slab
        if self._together is not None:
            self._slabs = [group._slab for group in self._together]
            return
        driver, own = self._device.driver, self._device.name
        visible = {d.uuid: d for d in driver.devices}
        for rank, peer in enumerate(self.devices):
            if rank == self.rank:
                continue
            # A device that this process does not see can be opened all the same.
            here = visible.get(peer.uuid)
            try:
                if here and here != own and not driver.can_access_peer(own, here):
                    raise RuntimeError("the driver says that this device cannot reach that one")
                address = self._device.open_memory(bytes.fromhex(told[rank]["handle"]))
            except RuntimeError as error:
                raise RuntimeError(
                    f"memory of rank {rank} ({peer.uuid}, {peer.pci}) from {own}: {error}"
                ) from None
            self._imports.append(address)
            self._slabs[rank] = address

    def _verify(self) -> Steps[None]:
        share = self._slab_bytes // self.world_size // 256 * 256
        self.links = yield from p2p.verify(
            self.platform.library, self._device, self.rank, self._slabs, share
        )
        if not self.links.sound:
            raise RuntimeError(f"DeviceGroup: {self.links}")
        yield from stage("DeviceGroup", self._clear)

    def _attach(self) -> None:
        s = self.settings
        attach = Attach(
            version=VERSION,
            rank=self.rank,
            world_size=self.world_size,
            island_size=s.selection["island_size"],
            one_shot_bytes=s.one_shot_bytes,
            two_shot_bytes=s.two_shot_bytes,
            status_host=self._status,
            status_device=self._status_device,
            num_entries=len(s.selection["entries"]),
        )
        attach.slabs[: self.world_size] = self._slabs
        for i, (max_bytes, algorithm, num_blocks) in enumerate(s.selection["entries"]):
            attach.table[i] = Entry(max_bytes, ALGORITHMS[algorithm], num_blocks)
        self._ask("attach", ctypes.byref(attach))
        self._attached = True
        self.workspace = self.platform.tensor(self._slab, self._slab_bytes, self.device)

    def _ask(self, what: str, *arguments) -> None:
        text = getattr(self.platform.library, f"spec_kernels_pcie_{what}")(*arguments)
        if text is not None:
            raise RuntimeError(text.decode())

    # ------------------------------------------------------------------------------------- calls

    def takes(self, x: torch.Tensor) -> bool:
        """Whether ``x`` stands on this rank's device."""
        return x.device == self.device

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor | None = None, algorithm: int | str = AUTO
    ) -> torch.Tensor:
        """Sum over ranks into ``out`` (``x`` itself for in place; a new tensor when None).

        ``algorithm``: by name or number (``ops.pcie_allreduce.algorithms``); for ``"auto"`` the
        selection's, and beyond the selection ``fallback``.
        """
        op = "pcie_allreduce"
        algorithm = algorithm_id(op, algorithm)
        if out is None:
            out = torch.empty_like(x)
        if algorithm == AUTO and x.nbytes > self.limit:
            return self._fallback_all_reduce(op, x, out)
        self._call(op, x, out, behind=(algorithm,))
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

        Arguments as for ``spec_kernels.pcie_allreduce_norm``, ``algorithm`` as for ``all_reduce``.
        """
        op = "pcie_allreduce_norm"
        algorithm = algorithm_id(op, algorithm)
        if out is None:
            out = torch.empty_like(x)
        if algorithm == AUTO and x.nbytes > self.limit:
            # Not in `out`: what else is wrong with the arguments shows only afterwards.
            total = self._fallback_all_reduce(op, x, torch.empty_like(x))
            hidden_capture = self.platform.ops.hidden_capture.default
            try:
                hidden_capture(total, residual, weight, eps, out, capture, slot)
            except RuntimeError as error:
                raise translated(error) from None
            return out
        self._call(op, x, residual, weight, eps, out, capture, slot, behind=(algorithm,))
        return out

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's ``x``: ``[world_size, *x.shape]``, any dtype."""
        if out is None:
            out = x.new_empty((self.world_size, *x.shape))
        if self.limit < 0:
            check_all_gather("pcie_all_gather", x, out, self.world_size)
            distributed.all_gather_into_tensor(out.view(-1, *x.shape[1:]), x, group=self.fallback)
            return out
        self._call("pcie_all_gather", x, out)
        return out

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites ``x`` with rank ``src``'s, any dtype; returns ``x``."""
        if self.limit < 0:
            check_broadcast("pcie_broadcast", x, src, self.world_size)
            distributed.broadcast(x, group=self.fallback, group_src=src)
            return x
        self._call("pcie_broadcast", x, src)
        return x

    def barrier(self) -> None:
        """Work behind it on every rank's stream begins after work before it on all of them."""
        if self.limit < 0:
            distributed.barrier(group=self.fallback)
            return
        self._call("pcie_barrier")

    def _call(self, op: str, *arguments, behind: tuple[int, ...] = ()) -> None:
        if self.limit < 0:
            raise ValueError(
                f"{op}: algorithm: expected auto, for ranks on several machines, got {behind[0]}"
            )
        if self.workspace is None:
            raise RuntimeError("DeviceGroup: expected an open one, got one that was closed")
        function = getattr(self.platform.ops, op).default
        group = (self.workspace, self.rank, self.world_size, self.settings.timeout_ms)
        try:
            function(*arguments, *group, *behind)
        except RuntimeError as error:
            raise translated(error) from None

    def _fallback_all_reduce(self, op: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.fallback is None:
            raise ValueError(
                f"{op}: input: expected at most {self.limit} bytes, as the group's selection ends, "
                f"or a group with fallback= (NCCL) to take more, got {x.nbytes} bytes"
            )
        check_allreduce(op, x, out)
        if out is not x:
            out.copy_(x)
        distributed.all_reduce(out, group=self.fallback)
        return out

    def use_stream(self, stream) -> None:
        """Binds the group to ``stream`` (a torch.cuda.Stream, or its handle as an integer).

        Whoever calls it must see to it that no call of the group is still running elsewhere.
        """
        self._ask("use_stream", self._slab, getattr(stream, "cuda_stream", stream))

    def check(self) -> None:
        """Raises if a kernel of this rank has given up: names rank, peer, epoch and phase.

        Reads a word of host memory and waits for nothing; a kernel that is still running may fail
        yet.
        """
        if self._attached:
            text = self.platform.library.spec_kernels_pcie_check(self._slab, b"DeviceGroup.check")
            if text is not None:
                raise RuntimeError(text.decode())

    # ------------------------------------------------------------------------------------- leaving

    def close(self) -> None:
        """Leaves the group, together with all ranks. May be called twice.

        Waits for this rank's kernels, and for the peers: a slab is freed when nobody has it open.
        If they do not come (within the communicator's timeout), it stays allocated until this
        process ends, and this raises. Ranks of a local group are closed one after another.
        """
        self.closed = True
        if self._leaving:
            return
        if self._together is None:
            run_alone(self._release(), self._meet)
            return
        self._end()
        if all(group._leaving for group in self._together):
            for group in self._together:
                group._free()

    def abort(self) -> None:
        """Ends every rank's present and later calls, as if this rank had waited too long.

        From the host, past kernels that still wait: they look at their slab's abort word.
        """
        if self._attached:
            self._device.store_words({slab + ABORT_OFFSET: self.rank for slab in self._slabs})

    def leave(self) -> None:
        """Aborts and leaves alone: peers are not waited for, and the slab stays allocated."""
        self.closed = True
        if not self._leaving:
            problems: list[str] = []
            _attempt(problems, self.abort)
            problems += self._end()
            if problems:
                raise RuntimeError("DeviceGroup: leaving: " + "; ".join(problems))

    def _release(self) -> Steps[None]:
        problems = self._end()
        # Freed under a peer, memory is anyone's: without everybody's word it stays allocated.
        yield None
        problems += self._free()
        if problems:
            raise RuntimeError("DeviceGroup: closing: " + "; ".join(problems))

    def _end(self) -> list[str]:
        """Ends the use of the peers' slabs; returns what went wrong."""
        self._leaving, self.workspace, problems = True, None, []
        if self._device is not None:
            _attempt(problems, self._device.synchronize)
        if self._attached:
            self._attached = False
            _attempt(problems, self._ask, "detach", self._slab)
        while self._imports:
            _attempt(problems, self._device.close_memory, self._imports.pop())
        return problems

    def _free(self) -> list[str]:
        problems: list[str] = []
        if self._status:
            _attempt(problems, self._device.free_host, self._status)
        if self._slab:
            _attempt(problems, self._device.free, self._slab)
        if self._device is not None:
            _attempt(problems, self._device.close)
        self._status = self._slab = 0
        self._device = None
        return problems

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.close()
        else:
            self.leave()


def _attempt(problems: list[str], function: Callable[..., None], *arguments) -> None:
    """What cannot be given back must not keep the rest."""
    try:
        function(*arguments)
    except RuntimeError as error:
        problems.append(str(error))


def _agree(told: list[dict], share_device: bool, has_fallback: bool) -> None:
    """RuntimeError unless the ranks fit together: the same verdict on all, from the same facts."""
    zero = told[0]["settings"]
    differences = [
        f"{key}: rank 0 has {zero[key]}, rank {rank} has {t['settings'][key]}"
        for rank, t in enumerate(told)
        for key in zero
        if t["settings"][key] != zero[key]
    ]
    if differences:
        raise RuntimeError(
            "DeviceGroup: ranks disagree on their settings: " + "; ".join(differences)
        )
    machines = {t["machine"] for t in told}
    if len(machines) > 1 and not has_fallback:
        raise RuntimeError(
            "DeviceGroup: expected ranks on one machine, or fallback= (NCCL) to serve several, got "
            f"{len(machines)} machines"
        )
    owners: dict[tuple[str, str], int] = {}
    for rank, t in enumerate(told):
        uuid, pci = t["device"]["uuid"], t["device"]["pci"]
        other = owners.setdefault((t["machine"], uuid), rank)
        if other != rank and not share_device:
            raise RuntimeError(
                f"DeviceGroup: ranks {other} and {rank} both have {uuid} ({pci}): expected a "
                "device each, or share_device=True for a test of correctness"
            )
