"""Which positions of a context a rank holds when ranks share it: one rule for every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

MAX_SHARDS = 1024
MAX_RUN = 1 << 31

Position = TypeVar("Position", int, torch.Tensor)  # an integer, or an integer tensor of any shape


@dataclass(frozen=True)
class ContextShard:
    """One of ``num_shards`` parts of a context that is dealt out in runs of ``run`` positions.

    Position ``p`` of the prefix belongs to shard ``(p // run) % num_shards`` and stands there at
    local position ``p // (run * num_shards) * run + p % run``, so every shard's cache is gapless.
    A draft tree stands whole on shard 0, row ``j`` at ``local_length(context_len) + j``; attention
    sinks count there alone too. Everything is arithmetic on positions: nothing is looked up.
    """

    index: int = 0
    num_shards: int = 1
    run: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_shards <= MAX_SHARDS:
            raise ValueError(f"num_shards: expected 1 to {MAX_SHARDS}, got {self.num_shards}")
        if not 0 <= self.index < self.num_shards:
            raise ValueError(f"index: expected 0 <= index < {self.num_shards}, got {self.index}")
        if not 1 <= self.run <= MAX_RUN:
            raise ValueError(f"run: expected 1 to {MAX_RUN}, got {self.run}")

    def local_length(self, context_len: Position) -> Position:
        """How many of the positions below ``context_len >= 0`` this shard holds."""
        period = self.run * self.num_shards
        rest = context_len % period - self.index * self.run
        if isinstance(rest, torch.Tensor):
            rest = rest.clamp(0, self.run)
        else:
            rest = min(max(rest, 0), self.run)
        return context_len // period * self.run + rest

    def holds(self, position: Position) -> bool | torch.Tensor:
        """Whether this shard holds prefix ``position``."""
        return position // self.run % self.num_shards == self.index

    def local_position(self, position: Position) -> Position:
        """Where prefix ``position`` stands in the cache of the shard that holds it."""
        return position // (self.run * self.num_shards) * self.run + position % self.run

    def global_position(self, local: Position) -> Position:
        """The prefix position that stands at ``local`` in this shard's cache."""
        run = local // self.run * self.num_shards + self.index
        return run * self.run + local % self.run

    def local_positions(self, context_len: int) -> list[int]:
        """The positions below ``context_len`` that this shard holds, in the order it holds them."""
        return [self.global_position(i) for i in range(self.local_length(context_len))]


WHOLE = ContextShard()
