"""Argument checks of the collectives, for callers that do not go through the compiled op."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import check_contiguous, fail
from spec_kernels.ops.pcie_allreduce.algorithms import LOSSY, NAMES

MAX_RANKS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def check_exact(op: str, algorithm: int) -> None:
    if algorithm not in NAMES or algorithm in LOSSY:
        fail(op, "algorithm", "0 to 4 (lossy ones are not on this backend)", algorithm)


def check_all_gather(op: str, input, out, world_size: int) -> None:
    check_data(op, "input", input)
    check_out(op, input, out, (world_size, *input.shape))


def check_broadcast(op: str, tensor, src: int, world_size: int) -> None:
    check_data(op, "tensor", tensor)
    if not 0 <= src < world_size:
        fail(op, "src", f"0 <= src < {world_size}", src)
