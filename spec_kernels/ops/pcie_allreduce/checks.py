"""Argument checks of the collectives, for callers that do not go through the compiled op."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import check_contiguous, fail
from spec_kernels.ops.hidden_capture.checks import check_hidden_capture
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, NAMES

MAX_RANKS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One byte an element on the wire, and a scale for each group of consecutive elements of a row.
CODED = frozenset((ALGORITHMS["two_shot_fp8"], ALGORITHMS["two_shot_int8"]))
SCALE_GROUP = 128


def check_group(op: str, workspace, rank: int, world_size: int, timeout_ms: int) -> None:
    if not 1 <= world_size <= MAX_RANKS:
        fail(op, "world_size", f"1 to {MAX_RANKS} ranks", world_size)
    if not 0 <= rank < world_size:
        fail(op, "rank", f"0 <= rank < {world_size}", rank)
    if not 0 < timeout_ms < 1 << 31:
        fail(op, "timeout_ms", "a positive number of milliseconds", timeout_ms)
    if not isinstance(workspace, torch.Tensor) or workspace.dtype != torch.uint8:
        fail(
            op, "workspace", "a uint8 tensor", getattr(workspace, "dtype", type(workspace).__name__)
        )


def check_data(op: str, name: str, t) -> None:
    if not isinstance(t, torch.Tensor):
        fail(op, name, "a tensor", type(t).__name__)
    check_contiguous(op, name, t)


def check_out(op: str, input: torch.Tensor, out: torch.Tensor, shape: tuple[int, ...]) -> None:
    check_data(op, "out", out)
    if out.dtype != input.dtype:
        fail(op, "out", input.dtype, out.dtype)
    if tuple(out.shape) != tuple(shape):
        fail(op, "out", f"shape {list(shape)}", list(out.shape))
    if out.device != input.device:
        fail(op, "out", f"device {input.device}", out.device)


def check_allreduce(op: str, input, out) -> None:
    check_data(op, "input", input)
    if input.dtype not in DTYPES:
        fail(op, "input", "float32, bfloat16 or float16", input.dtype)
    check_out(op, input, out, input.shape)


def check_algorithm(op: str, algorithm: int, input: torch.Tensor, world_size: int) -> None:
    """The lossy ones ask something of the data or the ranks; see ``reference.lossy_sum``."""
    if algorithm not in NAMES:
        fail(op, "algorithm", f"one of {', '.join(ALGORITHMS)}", algorithm)
    if algorithm == ALGORITHMS["hierarchical_bf16"] and world_size > 1:
        island_size(op, world_size)
    if algorithm in CODED and (input.shape[-1] if input.dim() else 1) % SCALE_GROUP:
        fail(
            op,
            "input",
            f"a last dimension that is a multiple of {SCALE_GROUP} for {NAMES[algorithm]}",
            list(input.shape),
        )


def island_size(op: str, world_size: int) -> int:
    """Ranks of an island where nothing was measured: the largest equal halves, thirds, quarters."""
    sizes = {4: 2, 6: 2, 8: 4}
    if world_size not in sizes:
        fail(op, "algorithm", "4, 6 or 8 ranks for hierarchical_bf16", world_size)
    return sizes[world_size]


def check_allreduce_norm(op: str, input, residual, weight, out, capture, slot: int) -> None:
    check_data(op, "input", input)
    check_hidden_capture(op, residual, weight, out, capture, slot, input=input)


def check_all_gather(op: str, input, out, world_size: int) -> None:
    check_data(op, "input", input)
    check_out(op, input, out, (world_size, *input.shape))


def check_broadcast(op: str, tensor, src: int, world_size: int) -> None:
    check_data(op, "tensor", tensor)
    if not 0 <= src < world_size:
        fail(op, "src", f"0 <= src < {world_size}", src)
