"""Readable PyTorch for ``draft_sample``: the oracle, and the fallback on every device.

Weights, coins and the integers that are summed are ``tree_verify``'s, so every backend has the same
bits. Nothing waits for a device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spec_kernels._library import register_reference
from spec_kernels.ops.common import asked_to_check, fail
from spec_kernels.ops.tree_verify.reference import (
    WEIGHT_BITS,
    Purpose,
    exp_weights,
    log_weights,
    philox4x32,
    to_fixed,
)

_OP = "draft_sample"


def draft_coins(seeds: Tensor, positions: Tensor, num_draws: int) -> Tensor:
    """``[..., draws]`` int64, 32 random bits each: one coin for each draw of a token's drafts.

    ``seeds`` and ``positions``, int64, have one shape.
    """
    low = 0xFFFFFFFF
    seed, position = seeds.unsqueeze(-1), positions.unsqueeze(-1)
    ordinal = torch.arange(num_draws, device=seeds.device)
    counter = (position & low, position >> 32 & low, int(Purpose.DRAFT), ordinal)
    return philox4x32(counter, (seed & low, seed >> 32 & low))[0]


def draw(weights: Tensor, coins: Tensor) -> Tensor:
    """Draws from each row one after the other without replacement.

    Args:
        weights: ``[..., V]`` int64 >= 0, of sums below 2^47.
        coins: ``[..., draws]`` of 32 bits.

    Returns:
        ``[..., draws]``: the first index whose cumulative weight exceeds coin * sum, exactly, so
        never one of weight 0; the last index when nothing is left.
    """
    drawn = []
    for coin in coins.split(1, -1):
        if drawn:
            weights = weights.scatter(-1, drawn[-1], 0)
        cumulative = weights.cumsum(-1)
        total = cumulative[..., -1:]
        # floor(coin * total / 2^32) by halves of the coin, to stay within 64 bits.
        below = (total * (coin >> 16) + (total * (coin & 0xFFFF) >> 16)) >> 16
        found = torch.searchsorted(cumulative, below, right=True)
        drawn.append(found.clamp(max=weights.shape[-1] - 1))
    return torch.cat(drawn, -1)


def _relative(values: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """e^((value - greatest) / temperature) in fp32, 0 at -inf, and what brings its sum to 1."""
    weights = torch.where(values == -math.inf, 0.0, exp_weights(log_weights(values, temperature)))
    total = to_fixed(weights).sum(-1, keepdim=True).clamp(min=1)
    return weights, (2.0**WEIGHT_BITS / total.double()).float()


def drafter_probs(values: Tensor, temperature: float | Tensor) -> Tensor:
    """q = softmax(values / temperature), fp32; 0 where it is below 2^-40 of the greatest."""
    weights, inverse = _relative(values, temperature)
    return torch.where(weights < 2.0**-WEIGHT_BITS, 0.0, weights) * inverse


def greatest_left(q: Tensor, drawn: Tensor) -> Tensor:
    """``[..., draws]``: the greatest of q before each draw."""
    greatest = []
    for i in range(drawn.shape[-1]):
        greatest.append(q.amax(-1, keepdim=True))
        q = q.scatter(-1, drawn[..., i : i + 1], 0.0)
    return torch.cat(greatest, -1)


def _is_temperature(temperature: Tensor) -> Tensor:
    return (temperature >= 0) & (temperature < math.inf)


def _check_values(context_lens, temperature, target_ids, probs) -> None:
    if temperature is None:
        return
    present = context_lens >= 0
    for b in (present & ~_is_temperature(temperature)).nonzero().flatten().tolist():
        fail(_OP, f"temperature[{b}]", "a finite number >= 0", float(temperature[b]))
    if probs is None or not bool((present & (temperature > 0)).any()):
        return
    if target_ids is not None:
        num_ids = probs.shape[2]
        for i in ((target_ids < 0) | (target_ids >= num_ids)).nonzero().flatten().tolist():
            fail(_OP, f"target_ids[{i}]", f"0 <= id < {num_ids}", int(target_ids[i]))


def draft_sample_reference(
    logits,
    target_ids,
    context_lens,
    depth,
    temperature,
    seeds,
    tokens,
    confidence,
    probs,
) -> None:
    if tokens.numel() == 0:  # nobody looks, so nothing is looked at
        return
    if logits.device.type == "cpu" or asked_to_check(logits.device):
        _check_values(context_lens, temperature, target_ids, probs)
    num_drafts, device = tokens.shape[2], logits.device
    values = torch.where(logits.isnan(), -math.inf, logits.float())
    ids = torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :num_drafts]
    weights, inverse = _relative(values, 1.0)
    likely = (weights * inverse).gather(-1, ids)
    present = (context_lens >= 0).view(-1, 1, 1)
    if target_ids is None:
        target_ids = torch.arange(logits.shape[2], device=device)
    if temperature is not None:
        warmth = temperature.view(-1, 1, 1)
        present = present & _is_temperature(warmth)
    if temperature is not None and probs is not None:
        draws = warmth > 0
        q = drafter_probs(values, torch.where(present & draws, warmth, 1.0))
        coins = draft_coins(seeds, context_lens.long() + depth, num_drafts)
        coins = coins.unsqueeze(1).expand(tokens.shape)
        drawn = draw(to_fixed(q), coins)
        ids = torch.where(draws, drawn, ids)
        likely = torch.where(draws, greatest_left(q, drawn), likely)
        # One more column takes what a device finds out of range.
        num_ids = probs.shape[2]
        inside = (target_ids >= 0) & (target_ids < num_ids)
        columns = torch.where(inside, target_ids, num_ids).expand(q.shape)
        wide = torch.nn.functional.pad(probs, (0, 1)).scatter(-1, columns, q)
        probs.copy_(torch.where(present & draws, wide[..., :num_ids], probs))
    tokens.copy_(torch.where(present, target_ids.take(ids), 0))
    confidence.copy_(torch.where(present, likely, 0.0))


register_reference(_OP, draft_sample_reference)
