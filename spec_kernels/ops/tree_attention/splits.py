"""How a prefix is split among workers: a public rule, so that backends and tests agree on it.

It depends on the request's own length alone, never on the batch, the other rows, the device or the
capacity, so a row's bits cannot depend on those either. Its twin is in ``csrc/tree_attention``.
"""

from __future__ import annotations

KEY_BLOCK = 64
MAX_SPLITS = 128


def attention_split_size(context_len: int) -> int:
    """Keys in a split: the least ``KEY_BLOCK * 2**k`` so that ``MAX_SPLITS`` hold the prefix.

    Splits begin at multiples of their size, so while the size stays the same a longer context only
    appends to them. The size changes at ``context_len = KEY_BLOCK * MAX_SPLITS * 2**k + 1``.
    """
    if context_len < 0:
        raise ValueError(f"context_len: expected >= 0, got {context_len}")
    size = KEY_BLOCK
    while size * MAX_SPLITS < context_len:
        size *= 2
    return size


def attention_splits(context_len: int) -> int:
    """Number of splits of a prefix of ``context_len`` keys: at least 1, at most ``MAX_SPLITS``."""
    size = attention_split_size(context_len)
    return max(1, -(-context_len // size))
