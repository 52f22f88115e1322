"""Reading results of a device without holding it up: copies that are waited for later."""

from __future__ import annotations

import torch
from torch import Tensor


class Pending:
    """A copy that is under way."""

    def __init__(self, host: Tensor, event: torch.cuda.Event | None):
        self._host, self._event = host, event
        self._is_read = False

    def wait(self) -> Tensor:
        """The copy on the host, whole; valid until the next copy is sent."""
        self._is_read = True
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def make_way(self) -> None:
        """Leaves its buffer to another copy, for which it must wait unless it was read."""
        if not self._is_read:
            self._host = self.wait().clone()
            self._event, self._is_read = None, False


class Readback:
    """Copies of one static buffer to the host, ``depth`` of which may be outstanding without a
    wait.

    On CUDA the copies go to pinned memory in stream order and nothing waits; elsewhere they are
    plain copies.
    """

    def __init__(self, buffer: Tensor, depth: int):
        self.buffer = buffer
        is_cuda = buffer.is_cuda
        self._ring = [
            torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=is_cuda)
            for _ in range(depth)
        ]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(depth)]
        self._pending: list[Pending | None] = [None] * depth
        self._turn = 0

    def send(self) -> Pending:
        turn = self._turn
        self._turn = (turn + 1) % len(self._ring)
        if self._pending[turn] is not None:
            self._pending[turn].make_way()
        host, event = self._ring[turn], self._events[turn]
        host.copy_(self.buffer, non_blocking=True)
        if event is not None:
            # By default it would be recorded on a stream of the thread's current device.
            event.record(torch.cuda.current_stream(self.buffer.device))
        self._pending[turn] = Pending(host, event)
        return self._pending[turn]
