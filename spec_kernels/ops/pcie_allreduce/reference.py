"""The collectives in readable PyTorch: the oracle for the sum, and a transport through gloo.

A workspace is only bytes to an op; here its address names the group that ``Communicator``
registered for it.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from spec_kernels._library import register_reference
from spec_kernels.ops.common import fail
from spec_kernels.ops.hidden_capture.reference import hidden_capture_reference
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, LOSSY
from spec_kernels.ops.pcie_allreduce.checks import (
    SCALE_GROUP,
    check_algorithm,
    check_all_gather,
    check_allreduce,
    check_allreduce_norm,
    check_broadcast,
    check_group,
    island_size,
)

OPS = ("pcie_allreduce", "pcie_allreduce_norm", "pcie_all_gather", "pcie_broadcast", "pcie_barrier")
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
    return _tree([p.float() for p in parts]).to(parts[0].dtype)


def _tree(level: list[torch.Tensor]) -> torch.Tensor:
    if len(level) == 1:
        return level[0]
    pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
    return _tree([p[0] + p[1] if len(p) == 2 else p[0] for p in pairs])


def lossy_sum(parts: list[torch.Tensor], algorithm: int, island: int | None = None) -> torch.Tensor:
    """The sum as algorithms 5 to 7 define it: fp32 in the canonical order, rounded on the way too.

    ``hierarchical_bf16``: the partial sum of each island (``island`` consecutive ranks) is rounded
    to bfloat16, which is what travels between islands.

    ``two_shot_fp8``, ``two_shot_int8``: every rank's part is sent, as ``coded`` says, to the rank
    that adds it up, and the sum is sent back in the same way. A rank's own part is no exception,
    so that all ranks get the same bits.
    """
    if len(parts) == 1:
        return parts[0].clone()
    dtype = parts[0].dtype
    parts = [p.float() for p in parts]
    if algorithm == ALGORITHMS["hierarchical_bf16"]:
        island = island or island_size("pcie_allreduce", len(parts))
        islands = [parts[i : i + island] for i in range(0, len(parts), island)]
        return _tree([_tree(i).bfloat16().float() for i in islands]).to(dtype)
    total = _tree([coded(p, algorithm) for p in parts])
    return coded(total, algorithm).to(dtype)


def coded(x: torch.Tensor, algorithm: int) -> torch.Tensor:
    """What the receiver reads of float32 ``x``, whose last dimension is a multiple of 128.

    Each 128 consecutive elements share ``scale`` = greatest magnitude / M (float32), with M = 448
    for float8_e4m3fn and 127 for int8. An element travels as ``x / scale`` (x where the scale is
    0), clamped to [-M, M] and rounded to nearest even; it arrives times ``scale``. A group with an
    infinity or a NaN arrives as NaN.
    """
    groups = x.unflatten(-1, (-1, SCALE_GROUP))
    int8 = algorithm == ALGORITHMS["two_shot_int8"]
    most = 127.0 if int8 else 448.0
    amax = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(amax.isfinite(), amax / most, torch.nan)
    scaled = (groups / torch.where(scale == 0, 1.0, scale)).clamp(-most, most)
    # An integer has no negative zero.
    code = scaled.round() + 0.0 if int8 else scaled.to(torch.float8_e4m3fn).float()
    return (code * scale).view(x.shape)


class GlooGroup:
    """Ranks that meet through gloo, with the checks of the shared segment: calls must agree,
    failures stay.

    Every exchange first gathers one fixed block (what this rank calls, and its data where they
    fit), so that ranks whose calls differ all raise instead of waiting for one another.
    """

    # Op, numel, bytes an item, dtype, source, length of the reason for an abort, algorithm, row.
    _HEAD = 8
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
        head = torch.tensor([-1, 0, 0, 0, 0, len(text), 0, 0], device="cpu")
        block = torch.zeros(8 * self._HEAD + self._INLINE, dtype=torch.uint8, device="cpu")
        block[: 8 * self._HEAD] = head.view(torch.uint8)
        block[8 * self._HEAD :][: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        try:
            self._gather(block, 1000)
        except RuntimeError:
            pass  # peers that no longer listen need no telling

    def exchange(
        self,
        op: str,
        data: torch.Tensor | None,
        timeout_ms: int,
        *,
        src: int = -1,
        algorithm: int = 0,
        row: int = 0,
    ) -> list[torch.Tensor]:
        """Every rank's ``data``, flat and on the CPU; with ``src``, that rank's alone."""
        if self._error is not None:
            raise RuntimeError(f"{op}: rank {self.rank} of {self.world_size}: {self._error}")
        try:
            return self._exchange(op, data, timeout_ms, src, algorithm, row)
        except RuntimeError as error:
            if self._error is None:
                self._error = f"gloo: {error} (epoch {self._epoch}, timeout {timeout_ms} ms)"
            raise RuntimeError(
                f"{op}: rank {self.rank} of {self.world_size}: {self._error}"
            ) from None
        finally:
            self._epoch += 1

    def _exchange(self, op, data, timeout_ms, src, algorithm, row):
        if data is None:
            data = torch.empty(0, dtype=torch.uint8, device="cpu")
        flat = data.detach().cpu().reshape(-1)
        raw = (
            flat.view(torch.uint8)
            if flat.numel()
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        size = flat.element_size()
        dtype = _DTYPES.index(flat.dtype)
        head = torch.tensor(
            [OPS.index(op), flat.numel(), size, dtype, src, 0, algorithm, row], device="cpu"
        )
        block = torch.zeros(8 * self._HEAD + self._INLINE, dtype=torch.uint8, device="cpu")
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
    op, numel, _, dtype, src, _, algorithm, row = head
    if OPS[op] == "pcie_barrier":
        return OPS[op]
    text = f"{OPS[op]} of {numel} {str(_DTYPES[dtype]).removeprefix('torch.')}"
    text += f" in rows of {row}" if row else ""
    text += f" from rank {src}" if OPS[op] == "pcie_broadcast" else ""
    return text + (f" by algorithm {algorithm}" if algorithm else "")


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


def _summed(op, input, workspace, rank, world_size, timeout_ms, algorithm, row=0) -> torch.Tensor:
    group = _group(op, workspace, rank, world_size)
    parts = group.exchange(op, input, timeout_ms, algorithm=algorithm, row=row)
    if algorithm in LOSSY:
        total = lossy_sum([p.view(input.shape) for p in parts], algorithm)
    else:
        total = ordered_sum(parts)
    return total.view(input.shape)


def pcie_allreduce_reference(
    input, out, workspace, rank, world_size, timeout_ms, algorithm
) -> None:
    op = "pcie_allreduce"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_allreduce(op, input, out)
    check_algorithm(op, algorithm, input, world_size)
    if world_size == 1:
        out.copy_(input)
        return
    out.copy_(_summed(op, input, workspace, rank, world_size, timeout_ms, algorithm))


def pcie_allreduce_norm_reference(
    input,
    residual,
    weight,
    eps,
    out,
    capture,
    slot,
    workspace,
    rank,
    world_size,
    timeout_ms,
    algorithm,
) -> None:
    op = "pcie_allreduce_norm"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_allreduce_norm(op, input, residual, weight, out, capture, slot)
    check_algorithm(op, algorithm, input, world_size)
    total = input
    if world_size > 1:
        row = input.shape[1]
        total = _summed(op, input, workspace, rank, world_size, timeout_ms, algorithm, row)
    total = total.to(residual.device)
    hidden_capture_reference(total, residual, weight, eps, out, capture, slot)


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
    (part,) = _group(op, workspace, rank, world_size).exchange(op, tensor, timeout_ms, src=src)
    if rank != src:
        tensor.copy_(part.view(tensor.shape))


def pcie_barrier_reference(workspace, rank, world_size, timeout_ms) -> None:
    op = "pcie_barrier"
    check_group(op, workspace, rank, world_size, timeout_ms)
    if world_size > 1:
        _group(op, workspace, rank, world_size).exchange(op, None, timeout_ms)


register_reference("pcie_allreduce", pcie_allreduce_reference)
register_reference("pcie_allreduce_norm", pcie_allreduce_norm_reference)
register_reference("pcie_all_gather", pcie_all_gather_reference)
register_reference("pcie_broadcast", pcie_broadcast_reference)
register_reference("pcie_barrier", pcie_barrier_reference)
