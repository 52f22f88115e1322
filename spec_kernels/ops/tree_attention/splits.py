"""How a prefix is split among workers: a public rule, so that backends and tests agree on it.

It depends on the request's own length alone, never on the batch, the other rows, the device or the
capacity, so a row's bits cannot depend on those either. Its twin is in ``csrc/tree_attention``.
"""

from __future__ import annotations

KEY_BLOCK = 64
# Splits of KEY_BLOCK keys at most; of twice the keys, twice as many, and so on to MAX_SPLITS. Short
# contexts fill the device, and a partial result costs ever less beside the keys of its split.
FIRST_SPLITS = 32
MAX_SPLITS = 128


def attention_split_size(context_len: int) -> int:
    """Keys in a split: the least ``KEY_BLOCK * 2**k`` so that ``FIRST_SPLITS * 2**k`` splits, but
    at most ``MAX_SPLITS``, hold the prefix.

    Splits begin at multiples of their size, so while the size stays the same a longer context only
    appends to them. The size is 64 up to 2,048 keys, 128 to 8,192, 256 to 32,768, and from there on
    doubles with the context.
    """
    if context_len < 0:
        raise ValueError(f"context_len: expected >= 0, got {context_len}")
    size, most = KEY_BLOCK, FIRST_SPLITS
    while size * most < context_len:
        size, most = 2 * size, min(2 * most, MAX_SPLITS)
    return size


def attention_splits(context_len: int) -> int:
    """Number of splits of a prefix of ``context_len`` keys: at least 1, at most ``MAX_SPLITS``."""
    size = attention_split_size(context_len)
    return max(1, -(-context_len // size))
