"""The collectives in readable PyTorch: the oracle for the sum, and a transport through gloo.

A workspace is only bytes to an op; here its address names the group that ``Communicator``
registered for it.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from spec_kernels._library import register_reference
from spec_kernels.ops.common import fail
from spec_kernels.ops.pcie_allreduce.checks import (
    check_all_gather,
    check_allreduce,
    check_broadcast,
    check_exact,
    check_group,
)

OPS = ("pcie_allreduce", "pcie_all_gather", "pcie_broadcast", "pcie_barrier")
_DTYPES = tuple(
    sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=lambda d: str(d))
)
# Address of a workspace -> its group, in this process.
GROUPS: dict[int, GlooGroup] = {}


def ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """``((p0+p1)+(p2+p3))+((p4+p5)+(p6+p7))`` in fp32, rounded once to the parts' dtype.

    An absent operand is skipped: three parts give ``(p0+p1)+p2``, five ``((p0+p1)+(p2+p3))+p4``,
    six ``(…)+(p4+p5)``, seven ``(…)+((p4+p5)+p6)``.
    """

    def tree(level: list[torch.Tensor]) -> torch.Tensor:
        if len(level) == 1:
            return level[0]
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        return tree([p[0] + p[1] if len(p) == 2 else p[0] for p in pairs])

    return tree([p.float() for p in parts]).to(parts[0].dtype)


class GlooGroup:
    """Ranks that meet through gloo, with the checks of the shared segment: calls must agree,
    failures stay.

    Every exchange first gathers one fixed block (what this rank calls, and its data where they
    fit), so that ranks whose calls differ all raise instead of waiting for one another.
    """

    _HEAD = 6  # op, numel, bytes an item, dtype, source, length of the reason for an abort
    _INLINE = 16 << 10

    def __init__(self, store, rank: int, world_size: int, timeout_ms: int):
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

        self.rank = rank
        self.world_size = world_size
        self._gather_options, self._broadcast_options = AllgatherOptions, BroadcastOptions
        self._group = dist.ProcessGroupGloo(
            store, rank, world_size, timedelta(milliseconds=timeout_ms)
        )
        self._error: str | None = None
        self._epoch = 0

    def close(self) -> None:
        self._group = None
        if self._error is None:
            self._error = "the communicator is closed"

    def abort(self, reason: str) -> None:
        """Tells the peers at their next (or present) exchange; they raise with ``reason``."""
        if self._error is not None:
            return
        self._error = f"aborted by rank {self.rank}: {reason}"
        text = reason.encode()[: self._INLINE]
        head = torch.tensor([-1, 0, 0, 0, 0, len(text)])
        block = torch.zeros(8 * self._HEAD + self._INLINE, dtype=torch.uint8)
        block[: 8 * self._HEAD] = head.view(torch.uint8)
        block[8 * self._HEAD :][: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        try:
            self._gather(block, 1000)
        except RuntimeError:
            pass  # peers that no longer listen need no telling

    def exchange(
        self, op: str, data: torch.Tensor | None, timeout_ms: int, src: int = -1
    ) -> list[torch.Tensor]:
        """Every rank's ``data``, flat and on the CPU; with ``src``, that rank's alone."""
        if self._error is not None:
            raise RuntimeError(f"{op}: rank {self.rank} of {self.world_size}: {self._error}")
        try:
            return self._exchange(op, data, timeout_ms, src)
        except RuntimeError as error:
            if self._error is None:
                self._error = f"gloo: {error} (epoch {self._epoch}, timeout {timeout_ms} ms)"
            raise RuntimeError(
                f"{op}: rank {self.rank} of {self.world_size}: {self._error}"
            ) from None
        finally:
            self._epoch += 1

    def _exchange(self, op, data, timeout_ms, src):
        if data is None:
            data = torch.empty(0, dtype=torch.uint8)
        flat = data.detach().cpu().reshape(-1)
        raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        size = flat.element_size()
        head = torch.tensor([OPS.index(op), flat.numel(), size, _DTYPES.index(flat.dtype), src, 0])
        block = torch.zeros(8 * self._HEAD + self._INLINE, dtype=torch.uint8)
        block[: 8 * self._HEAD] = head.view(torch.uint8)
        fits = raw.numel() <= self._INLINE
        if fits:
            block[8 * self._HEAD :][: raw.numel()] = raw
        blocks = self._gather(block, timeout_ms)
        self._check_calls(blocks)
        if fits:
            parts = [b[8 * self._HEAD :][: raw.numel()] for b in blocks]
            parts = parts if src < 0 else [parts[src]]
        elif src < 0:
            parts = self._gather(raw, timeout_ms)
        else:
            options = self._broadcast_options()
            options.rootRank = src
            options.timeout = timedelta(milliseconds=timeout_ms)
            parts = [raw.clone()]
            self._group.broadcast(parts, options).wait()
        return [p.contiguous().clone().view(flat.dtype) for p in parts]

    def _gather(self, block: torch.Tensor, timeout_ms: int) -> list[torch.Tensor]:
        options = self._gather_options()
        options.timeout = timedelta(milliseconds=timeout_ms)
        parts = [torch.empty_like(block) for _ in range(self.world_size)]
        self._group.allgather([parts], [block], options).wait()
        return parts

    def _check_calls(self, blocks: list[torch.Tensor]) -> None:
        heads = [b[: 8 * self._HEAD].clone().view(torch.int64).tolist() for b in blocks]
        for rank, head in enumerate(heads):
            if head[0] == -1:
                text = bytes(blocks[rank][8 * self._HEAD :][: head[5]].tolist()).decode()
                self._error = f"aborted by rank {rank}: {text}"
                raise RuntimeError(self._error)
        for rank, head in enumerate(heads):
            if head != heads[self.rank]:
                self._error = (
                    f"ranks disagree: rank {self.rank} calls {_describe(heads[self.rank])}, "
                    f"rank {rank} calls {_describe(head)} (epoch {self._epoch}, phase arrive)"
                )
                raise RuntimeError(self._error)


def _describe(head: list[int]) -> str:
    op, numel, _, dtype, src, _ = head
    if OPS[op] == "pcie_barrier":
        return OPS[op]
    text = f"{OPS[op]} of {numel} {str(_DTYPES[dtype]).removeprefix('torch.')}"
    return text if OPS[op] != "pcie_broadcast" else f"{text} from rank {src}"


def _group(op: str, workspace: torch.Tensor, rank: int, world_size: int) -> GlooGroup:
    group = GROUPS.get(workspace.data_ptr())
    if group is None or (group.rank, group.world_size) != (rank, world_size):
        fail(
            op,
            "workspace",
            f"one bound through gloo as rank {rank} of {world_size} in this process",
            "another",
        )
    return group


def pcie_allreduce_reference(
    input, out, workspace, rank, world_size, timeout_ms, algorithm
) -> None:
    op = "pcie_allreduce"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_allreduce(op, input, out)
    check_exact(op, algorithm)
    if world_size == 1:
        out.copy_(input)
        return
    parts = _group(op, workspace, rank, world_size).exchange(op, input, timeout_ms)
    out.copy_(ordered_sum(parts).view(input.shape))


def pcie_all_gather_reference(input, out, workspace, rank, world_size, timeout_ms) -> None:
    op = "pcie_all_gather"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_all_gather(op, input, out, world_size)
    if world_size == 1:
        out[0].copy_(input)
        return
    parts = _group(op, workspace, rank, world_size).exchange(op, input, timeout_ms)
    for row, part in zip(out, parts, strict=True):
        row.copy_(part.view(input.shape))


def pcie_broadcast_reference(tensor, src, workspace, rank, world_size, timeout_ms) -> None:
    op = "pcie_broadcast"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_broadcast(op, tensor, src, world_size)
    if world_size == 1:
        return
    (part,) = _group(op, workspace, rank, world_size).exchange(op, tensor, timeout_ms, src)
    if rank != src:
        tensor.copy_(part.view(tensor.shape))


def pcie_barrier_reference(workspace, rank, world_size, timeout_ms) -> None:
    op = "pcie_barrier"
    check_group(op, workspace, rank, world_size, timeout_ms)
    if world_size > 1:
        _group(op, workspace, rank, world_size).exchange(op, None, timeout_ms)


register_reference("pcie_allreduce", pcie_allreduce_reference)
register_reference("pcie_all_gather", pcie_all_gather_reference)
register_reference("pcie_broadcast", pcie_broadcast_reference)
register_reference("pcie_barrier", pcie_barrier_reference)
