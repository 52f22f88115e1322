"""Data-parallel training on the cores of one machine: one single-threaded process a core.

Threads of one process meet at the end of every operation, so one that the scheduler holds back
stops them all thousands of times a step. Processes meet once a step.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Workers:
    """This process's place among ``size``; rank 0 writes logs and checkpoints."""

    rank: int = 0
    size: int = 1

    def part(self, batch: Tensor) -> Tensor:
        """This worker's rows of a batch whose rows divide evenly."""
        if batch.shape[0] % self.size:
            raise ValueError(
                f"workers: batch: expected a multiple of {self.size} rows, got {batch.shape[0]}"
            )
        return batch.chunk(self.size)[self.rank]

    def sum_(self, tensors: list[Tensor]) -> None:
        """Replaces each tensor by its sum over the workers, in one exchange (float32)."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten().float() for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


SINGLE = Workers()


def _enter(rank: int, size: int, meeting: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        function(Workers(rank, size), *args)
    finally:
        dist.destroy_process_group()


def launch(num_workers: int, function: Callable, *args) -> None:
    """Calls ``function(workers, *args)`` in each of ``num_workers`` processes; 1 = in this one.

    A worker that fails ends the others, and its error is raised here.
    """
    if num_workers == 1:
        function(SINGLE, *args)
        return
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(
            _enter,
            (num_workers, str(Path(directory) / "meeting"), function, args),
            nprocs=num_workers,
        )
