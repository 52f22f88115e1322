"""Reading results of a device without holding it up: copies that are waited for later."""

from __future__ import annotations

import torch
from torch import Tensor


class Pending:
    """A copy that is under way."""

    def __init__(self, host: Tensor, event: torch.cuda.Event | None):
        self._host, self._event = host, event

    def wait(self) -> Tensor:
        """The copy on the host, whole; valid until its buffer's turn comes again."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Readback:
    """Copies of one static buffer to the host, ``depth`` of which may be outstanding.

    On CUDA the copies go to pinned memory in stream order and nothing waits; elsewhere they are
    plain copies.
    """

    def __init__(self, buffer: Tensor, depth: int):
        self.buffer = buffer
        is_cuda = buffer.is_cuda
        self._ring = [
            torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=is_cuda) for _ in range(depth)
        ]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(depth)]
        self._turn = 0

    def send(self) -> Pending:
        host, event = self._ring[self._turn], self._events[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        host.copy_(self.buffer, non_blocking=True)
        if event is not None:
            event.record()
        return Pending(host, event)
