"""The kernels of a real device as backends for CPU tensors, so that a suite needs no other tensors.

``load()`` makes ``backend="cuda_on_device"`` and ``"triton_on_device"`` known. A call takes every
storage that its arguments stand on to the device whole, between guards, and back whole: strides,
overlaps, poison and alignment arrive as the caller made them, and what a kernel wrote where it must
not shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from spec_kernels import _library
from spec_kernels.ops import common

KINDS = ("cuda", "triton")
GUARD = 256  # bytes on either side of a storage; keeps the alignment of what is between
GUARD_BYTE = 0xA5


def missing() -> str | None:
    """Why there is no device, if there is none."""
    if torch.cuda.is_available():
        return None
    return "torch finds no CUDA device" if torch.version.cuda else "torch was built without CUDA"


def backend_name(kind: str) -> str:
    return f"{kind}_on_device"


class Moved:
    """``args`` of an op, on ``device``."""

    def __init__(self, op: str, args: tuple, device: str):
        self.op, self.device = op, device
        self.buffers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.args = [self._move(value) for value in args]

    def _move(self, value):
        if isinstance(value, list | tuple):
            return [self._move(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self.buffers:
            home = torch.empty(0, dtype=torch.uint8).set_(storage)
            buffer = torch.full(
                (len(home) + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8, device=self.device
            )
            buffer[GUARD : GUARD + len(home)] = home
            self.buffers[key] = home, buffer
        moved = torch.empty(0, dtype=value.dtype, device=self.device)
        start = value.storage_offset() + GUARD // value.itemsize
        buffer = self.buffers[key][1]
        return moved.set_(buffer.untyped_storage(), start, value.shape, value.stride())

    def bring_back(self) -> None:
        """Inputs too: nobody was to write to them."""
        for home, buffer in self.buffers.values():
            back = buffer.cpu()
            inside = back[GUARD : GUARD + len(home)]
            outside = torch.cat((back[:GUARD], back[GUARD + len(home) :]))
            assert (outside == GUARD_BYTE).all(), f"{self.op} wrote outside its tensors"
            if not inside.equal(home):
                home.copy_(inside)


def register(backend: str, device: str, kernel: Callable[[str], Callable[..., None]]) -> None:
    """Makes ``backend`` run what ``kernel(op)`` returns, on ``device``."""
    namespace = f"{_library.NAMESPACE}_{backend}"
    library = _library.define_schemas(namespace)

    def call(op, *args):
        moved = Moved(op, args, device)
        try:
            kernel(op)(*moved.args)
        finally:
            moved.bring_back()

    for op in _library.SCHEMAS:
        library.impl(op, functools.partial(call, op), "CPU")
    common.EXTRA_BACKENDS[backend] = namespace
    _registered[backend] = library


_registered: dict[str, torch.library.Library] = {}


def _cuda(op: str) -> Callable[..., None]:
    # Without a kernel the dispatcher would run the reference, and a suite would test that.
    if not _library.has_kernel(op, "cuda"):
        reason = _library.LIBRARIES["cuda"].reason
        raise RuntimeError(f"{op}: no CUDA kernel (_C_cuda: {reason})")
    return getattr(torch.ops.spec_kernels, op).default


def _triton(op: str) -> Callable[..., None]:
    def run(*args):
        common.check_outputs_apart(op, args)  # as for ``backend="triton"``
        _library.triton_kernel(op)(*args)

    return run


def load() -> None:
    """Registers both backends, once a process."""
    for kind, kernel in zip(KINDS, (_cuda, _triton), strict=True):
        if backend_name(kind) not in _registered:
            register(backend_name(kind), "cuda", kernel)
