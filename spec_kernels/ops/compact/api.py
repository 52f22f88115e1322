"""Moves what belongs to the accepted path to the front: K/V of every layer, and per-node rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_kernels.ops.common import INTEGERS, check_tensor, fail, run
from spec_kernels.ops.compact.reference import compact_reference

_OP = "compact"


def compact(
    accept_index: torch.Tensor,
    num_accepted: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    caches: Sequence[torch.Tensor] = (),
    rows: Sequence[torch.Tensor] = (),
    *,
    backend: str | None = None,
) -> None:
    """For each request and ``i <= num_accepted``, moves row ``accept_index[i]`` to row ``i``, in
    place.

    In a cache the rows are those at logical positions ``context_len + accept_index[i]`` and
    ``context_len + i``; position p stands in slot ``p % page`` of page
    ``block_tables[b, p // page]``. Bytes are moved, whatever they mean. Nodes increase along a
    path, so every move goes forward or stays, and ascending order is safe under overlap. Rows that
    stay are not touched.

    Args:
        accept_index: ``[B, D + 1]`` strictly increasing nodes, as ``tree_verify`` returns them;
            entries past ``num_accepted`` are not read.
        num_accepted: ``[B]``, 0 to D.
        context_lens: ``[B]`` committed length before this cycle; negative = padded request: nothing
            of it is read or moved.
        block_tables: ``[B, M]`` physical pages. Only entries of rows that move are read.
        caches: tensors ``[P, page, ...]`` of any dtype and any page size >= 1; dimensions 0 and 1
            may be strided, the rest is contiguous. Requests share no page that moves.
        rows: tensors ``[B, N, ...]`` (tokens, hidden states), same rules.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above; or, on CPU and before anything
            is moved, a path that does not increase, a node or position outside its tensor, or a
            page outside its cache.
    """
    check_tensor(_OP, "accept_index", accept_index, (None, None), INTEGERS)
    requests, device = accept_index.shape[:1], accept_index.device
    check_tensor(_OP, "num_accepted", num_accepted, requests, INTEGERS, device)
    check_tensor(_OP, "context_lens", context_lens, requests, INTEGERS, device)
    check_moved(_OP, len(accept_index), device, block_tables, caches, rows)
    args = (accept_index, num_accepted, context_lens, block_tables, list(caches), list(rows))
    run(_OP, backend, device, args, compact_reference)


def check_moved(op, batch, device, block_tables, caches, rows) -> None:
    """What moves and the table that says where; for every op that ends in this move."""
    check_tensor(op, "block_tables", block_tables, (batch, None), INTEGERS, device)
    for i, t in enumerate(caches):
        _check_rows(op, f"caches[{i}]", t, device)
        if t.shape[1] < 1:
            fail(op, f"caches[{i}]", "a page size of at least 1", list(t.shape))
    for i, t in enumerate(rows):
        _check_rows(op, f"rows[{i}]", t, device)
        if t.shape[0] != batch:
            fail(op, f"rows[{i}]", f"{batch} requests", list(t.shape))


def _check_rows(op: str, name: str, t: torch.Tensor, device: torch.device) -> None:
    if not isinstance(t, torch.Tensor):
        fail(op, name, "a tensor", type(t).__name__)
    if t.dim() < 2:
        fail(op, name, "at least 2 dimensions", list(t.shape))
    if t.device != device:
        fail(op, name, f"device {device}", t.device)
    if not t.is_contiguous():
        expected = 1
        for size, stride in zip(reversed(t.shape[2:]), reversed(t.stride()[2:]), strict=True):
            if size > 1 and stride != expected:
                fail(op, name, "contiguous rows", f"strides {list(t.stride())}")
            expected *= size
