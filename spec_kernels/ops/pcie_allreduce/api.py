"""Sum, gather, broadcast and barrier over the ranks of one machine.

Every rank of the group must make the same calls in the same order, with the same shapes and dtypes.
A rank that calls something else, dies, leaves or is late makes all ranks raise; the group is then
of no further use, and every later call raises the first error again.
``spec_kernels.comm.Communicator`` owns the workspace and is the usual way in.
"""

from __future__ import annotations

import torch

from spec_kernels.ops.common import run
from spec_kernels.ops.hidden_capture.checks import new_out
from spec_kernels.ops.pcie_allreduce.algorithms import AUTO, algorithm_id
from spec_kernels.ops.pcie_allreduce.checks import (
    check_algorithm,
    check_all_gather,
    check_allreduce,
    check_allreduce_norm,
    check_broadcast,
    check_data,
    check_group,
)
from spec_kernels.ops.pcie_allreduce.reference import (
    pcie_all_gather_reference,
    pcie_allreduce_norm_reference,
    pcie_allreduce_reference,
    pcie_barrier_reference,
    pcie_broadcast_reference,
)

DEFAULT_TIMEOUT_MS = 30_000


def pcie_allreduce(
    input: torch.Tensor,
    workspace: torch.Tensor,
    rank: int,
    world_size: int,
    *,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    algorithm: int | str = AUTO,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Sum over ranks, the same bits on every rank.

    fp32 accumulation in the order ``((r0+r1)+(r2+r3))+((r4+r5)+(r6+r7))``, absent ranks skipped,
    one rounding. -0, infinities and NaN pass through as in IEEE arithmetic (a NaN's payload is not
    specified).

    Args:
        input: contiguous float32, bfloat16 or float16, any shape, any alignment, 0 elements
            allowed.
        workspace: uint8, the group's segment; the op checks its header and size.
        rank: this rank, ``0 <= rank < world_size``.
        world_size: 1 to 8; 1 is a copy.
        timeout_ms: how long to wait for peers.
        algorithm: a name or number of ``algorithms.py``, the same on every rank. All but the lossy
            ones give the same bits; on CPU these are one algorithm.
        out: like ``input``; may be ``input`` itself, no other overlap. Allocated when None.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: an argument is not as above.
        RuntimeError: ranks disagree, or one is late, dead or gone; names it, with epoch and phase.
    """
    op = "pcie_allreduce"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_data(op, "input", input)
    if out is None:
        out = torch.empty_like(input)
    check_allreduce(op, input, out)
    algorithm = algorithm_id(op, algorithm)
    check_algorithm(op, algorithm, input, world_size)
    args = (input, out, workspace, rank, world_size, timeout_ms, algorithm)
    run(op, backend, input.device, args, pcie_allreduce_reference)
    return out


def pcie_allreduce_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    workspace: torch.Tensor,
    rank: int,
    world_size: int,
    *,
    capture: torch.Tensor | None = None,
    slot: int = 0,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    algorithm: int | str = AUTO,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``hidden_capture`` of the sum over ranks: all-reduce, residual add, RMSNorm and capture.

    On every backend the bits of ``pcie_allreduce`` followed by ``hidden_capture``: the sum is
    rounded to its dtype, added to the residual, rounded again, captured and normalised. So what is
    captured is the complete sum. A row's bits depend on that row alone.

    Args:
        input: contiguous ``[T, H]`` float32 or bfloat16, this rank's part of the block output.
        residual, weight, eps, capture, slot, out: as for ``hidden_capture``, the same on every
            rank; ``out`` may be ``input``.
        workspace, rank, world_size, timeout_ms, algorithm: as for ``pcie_allreduce``.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: an argument is not as above. No rank's data were touched.
        RuntimeError: as for ``pcie_allreduce``; rows may have been updated by then.
    """
    op = "pcie_allreduce_norm"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_allreduce_norm(op, input, residual, weight, out, capture, slot)
    algorithm = algorithm_id(op, algorithm)
    check_algorithm(op, algorithm, input, world_size)
    if out is None:
        out = new_out(residual)
    group = (workspace, rank, world_size, timeout_ms, algorithm)
    args = (input, residual, weight, eps, out, capture, slot, *group)
    run(op, backend, input.device, args, pcie_allreduce_norm_reference)
    return out


def pcie_all_gather(
    input: torch.Tensor,
    workspace: torch.Tensor,
    rank: int,
    world_size: int,
    *,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Every rank's ``input``: returns ``[world_size, *input.shape]``. Any dtype, bytes unchanged.

    Arguments and errors as for ``pcie_allreduce``, except that ``out`` may not overlap ``input``.
    """
    op = "pcie_all_gather"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_data(op, "input", input)
    if out is None:
        out = input.new_empty((world_size, *input.shape))
    check_all_gather(op, input, out, world_size)
    args = (input, out, workspace, rank, world_size, timeout_ms)
    run(op, backend, input.device, args, pcie_all_gather_reference)
    return out


def pcie_broadcast(
    tensor: torch.Tensor,
    src: int,
    workspace: torch.Tensor,
    rank: int,
    world_size: int,
    *,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    backend: str | None = None,
) -> torch.Tensor:
    """Overwrites ``tensor`` (contiguous, any dtype) with rank ``src``'s and returns it.

    Errors as for ``pcie_allreduce``.
    """
    op = "pcie_broadcast"
    check_group(op, workspace, rank, world_size, timeout_ms)
    check_broadcast(op, tensor, src, world_size)
    args = (tensor, src, workspace, rank, world_size, timeout_ms)
    run(op, backend, tensor.device, args, pcie_broadcast_reference)
    return tensor


def pcie_barrier(
    workspace: torch.Tensor,
    rank: int,
    world_size: int,
    *,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    backend: str | None = None,
) -> None:
    """Returns when every rank has called it. Errors as above."""
    op = "pcie_barrier"
    check_group(op, workspace, rank, world_size, timeout_ms)
    args = (workspace, rank, world_size, timeout_ms)
    run(op, backend, workspace.device, args, pcie_barrier_reference)
