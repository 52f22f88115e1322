"""Readable PyTorch for ``tree_verify_choices`` and ``tree_verify_coins``: the oracle, and the
fallback on every device.

It reads the links back to the host, which no compiled kernel does.
"""

from __future__ import annotations

import torch

from spec_kernels._library import register_reference
from spec_kernels.ops.tree_verify.reference import (
    COIN_BITS,
    WEIGHT_BITS,
    VerifyStatus,
    children_of,
    sample,
)

MAX_COIN = 1.0 - 2.0**-COIN_BITS
MIN_THRESHOLD = 1e-9


def clamped_coin(coin: torch.Tensor) -> torch.Tensor:
    """Coins within [0, 1): what is above counts as the greatest below 1; NaN counts as 0."""
    return torch.where(coin > 0.0, coin, 0.0).clamp(max=MAX_COIN)


def residual_weights(residual: torch.Tensor) -> torch.Tensor:
    """Integer weights int64 ``[V]`` of a row that need not sum to 1.

    Truncated multiples of 2^-39 of the power of two at or below the greatest: scaling is exact, and
    sums of integers have no order, so every backend agrees on each bit.
    """
    exponent = max(1, int(residual.max().view(torch.int32)) >> 23) - 127
    return (residual.double() * 2.0 ** (WEIGHT_BITS - 1 - exponent)).to(torch.int64)


def _positive(row: torch.Tensor) -> torch.Tensor:
    """What is not above 0, NaN included, counts as 0; infinity as the greatest float."""
    return torch.where(row > 0.0, row, 0.0).clamp(max=torch.finfo(torch.float32).max)


def accept_child(coin, probabilities, single, accumulated):
    """Which of the children is accepted: the place in ``probabilities``, or None.

    The first whose sum of probabilities so far, over ``accumulated``, exceeds the coin, or whose
    own reaches ``single``; never one of probability 0. All in fp32, children in list order.
    """
    total = torch.zeros((), dtype=torch.float32, device="cpu")
    for i, p in enumerate(probabilities):
        total = total + p
        if p > 0.0 and (coin < total / accumulated or p >= single):
            return i
    return None


def sample_residual(target, draft, rejected, coin) -> int | None:
    """A token of max(target - draft, 0) without the rejected ones; None if there is none at all.

    Where nothing is left, which only rounding brings about, the target's own row is sampled.
    """
    residual = _positive(target if draft is None else target - draft)
    residual[rejected] = 0.0
    if not residual.any():
        residual = _positive(target)
    if not residual.any():
        return None
    return sample(residual_weights(residual), int(coin * 2.0**COIN_BITS))


def _walk(tokens, first_child, next_sibling, slots, outs, step) -> None:
    """Walks every request; a node whose slot lies outside ``predictions`` is no node.

    ``step(b, node, slot, carried, ended, full)`` gives the token after ``node``, which child is
    accepted (its place in the list, or None) and status bits. ``carried`` are the children's
    tokens, ``ended`` says how their list ended; where the path is ``full`` it was not looked at.
    """
    predictions, accept_index, num_accepted, status = outs
    num_slots, room = predictions.shape[0], accept_index.shape[1]
    rows = zip(*(t.tolist() for t in (tokens, first_child, next_sibling, slots)), strict=True)
    for b, (request_tokens, first, following, slot_of) in enumerate(rows):
        num_accepted[b] = 0
        status[b] = 0
        if slot_of[0] < 0:
            continue
        if slot_of[0] >= num_slots:
            status[b] = int(VerifyStatus.BAD_LINK)
            continue
        node, depth, bits = 0, 0, VerifyStatus(0)
        while node is not None:
            slot = slot_of[node]
            accept_index[b, depth] = slot
            children, ended = None, VerifyStatus(0)
            if depth + 1 < room:
                children, ended = children_of(node, first, following)
                inside = [0 <= slot_of[child] < num_slots for child in children]
                if not all(inside):
                    children, ended = children[: inside.index(False)], VerifyStatus.BAD_LINK
            carried = [request_tokens[child] for child in children or ()]
            token, place, found = step(b, node, slot, carried, ended, children is None)
            predictions[slot] = token
            bits |= found
            node = None if place is None else children[place]
            depth += node is not None
        num_accepted[b] = depth
        status[b] = int(bits)


def tree_verify_choices_reference(
    tokens,
    first_child,
    next_sibling,
    slots,
    choices,
    predictions,
    accept_index,
    num_accepted,
    status,
) -> None:
    limit = torch.iinfo(predictions.dtype).max

    def step(b, node, slot, carried, ended, full):
        token = int(choices[slot])
        if not 0 <= token <= limit:
            return 0, None, VerifyStatus.NO_TOKEN
        if token in carried:
            return token, carried.index(token), VerifyStatus(0)
        return token, None, ended

    outs = predictions, accept_index, num_accepted, status
    _walk(tokens, first_child, next_sibling, slots, outs, step)


def tree_verify_coins_reference(
    tokens,
    first_child,
    next_sibling,
    slots,
    target_probs,
    draft_probs,
    coins,
    final_coins,
    threshold_single,
    threshold_acc,
    predictions,
    accept_index,
    num_accepted,
    status,
) -> None:
    vocab = target_probs.shape[2]
    single = torch.tensor(threshold_single, dtype=torch.float32, device="cpu")
    accumulated = torch.tensor(max(threshold_acc, MIN_THRESHOLD), dtype=torch.float32, device="cpu")

    def step(b, node, slot, carried, ended, full):
        target = target_probs[b, node]
        known = [0 <= token < vocab for token in carried]
        probabilities = [
            _positive(target[token]).cpu() if k else torch.zeros((), device="cpu")
            for token, k in zip(carried, known, strict=True)
        ]
        coin = clamped_coin(coins[b, node]).cpu()
        place = accept_child(coin, probabilities, single, accumulated)
        if place is not None:
            return carried[place], place, VerifyStatus(0)
        draft = None if draft_probs is None or full else draft_probs[b, node]
        rejected = [token for token, k in zip(carried, known, strict=True) if k]
        token = sample_residual(target, draft, rejected, clamped_coin(final_coins[b]))
        if token is None:
            return 0, None, VerifyStatus.NO_TOKEN | ended
        return token, None, ended

    outs = predictions, accept_index, num_accepted, status
    _walk(tokens, first_child, next_sibling, slots, outs, step)


register_reference("tree_verify_choices", tree_verify_choices_reference)
register_reference("tree_verify_coins", tree_verify_coins_reference)
