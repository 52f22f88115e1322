"""Readable PyTorch for ``compact``: the oracle, and the fallback on every device.

It reads the indices back to the host, which no compiled kernel does.
"""

from __future__ import annotations

from itertools import pairwise

from spec_kernels._library import register_reference
from spec_kernels.ops.common import fail

_OP = "compact"


def _moves(op, accept_index, num_accepted, context_lens):
    """``(request, committed length, [(from, to), ...])`` for each request that moves anything."""
    columns = (accept_index.tolist(), num_accepted.tolist(), context_lens.tolist())
    for b, (path, count, length) in enumerate(zip(*columns, strict=True)):
        if length < 0:
            continue
        if not 0 <= count < len(path):
            fail(op, f"num_accepted[{b}]", f"0 to {len(path) - 1}", count)
        path = path[: count + 1]
        if path[0] < 0 or any(a >= z for a, z in pairwise(path)):
            fail(op, f"accept_index[{b}]", "strictly increasing nodes", path)
        moves = [(node, i) for i, node in enumerate(path) if node != i]
        if moves:
            yield b, length, moves


def _place(op, name, cache, table, position):
    """``(page, slot)`` of a logical position; every one is checked before anything is moved."""
    num_pages, page_size = cache.shape[:2]
    if position >= len(table) * page_size:
        fail(op, name, f"positions below {len(table) * page_size} (block_tables)", position)
    page = table[position // page_size]
    if not 0 <= page < num_pages:
        fail(op, "block_tables", f"pages 0 to {num_pages - 1} of {name}", page)
    return page, position % page_size


def compact_reference(
    accept_index, num_accepted, context_lens, block_tables, caches, rows, op=_OP
) -> None:
    requests = list(_moves(op, accept_index, num_accepted, context_lens))
    tables = block_tables.tolist()
    copies = []
    for b, length, moves in requests:
        for i, t in enumerate(rows):
            if moves[-1][0] >= t.shape[1]:
                expected = f"nodes below {t.shape[1]} (rows[{i}])"
                fail(op, f"accept_index[{b}]", expected, moves[-1][0])
            copies += [(t, (b, source), (b, target)) for source, target in moves]
        for i, cache in enumerate(caches):
            for move in moves:
                source, target = (
                    _place(op, f"caches[{i}]", cache, tables[b], length + node) for node in move
                )
                copies.append((cache, source, target))
    # Ascending within a request, and every target lies at or before its source: overlap-safe.
    for t, source, target in copies:
        t[target].copy_(t[source])


register_reference("compact", compact_reference)
