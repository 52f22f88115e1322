"""Readable PyTorch for ``tree_verify``: the oracle, and the fallback on every device.

It reads the links back to the host, which no compiled kernel does.
"""

from __future__ import annotations

import enum
import math

import torch

from spec_kernels._library import register_reference
from spec_kernels.ops.common import fail

_OP = "tree_verify"


class VerifyStatus(enum.IntFlag):
    """Bits of ``Verified.status``; 0 is sound. ``csrc/tree_verify/tree_verify.h`` has the twins."""

    # A visited row had no token to choose (all NaN, -inf or masked): id 0 stands in, the walk ends.
    NO_TOKEN = 1
    # A link on the walk points outside the tree, or a child does not come after its parent.
    BAD_LINK = 2
    # A list of siblings has more entries than the tree has nodes.
    SIBLING_CYCLE = 4
    # A sampling parameter is out of range. Raised as ValueError where values are read on the host.
    BAD_PARAMETER = 8


class Purpose(enum.IntEnum):
    """Third word of the counter: coins drawn for different ends at one position are independent."""

    SAMPLE = 0  # the target's own choice
    ACCEPT = 1  # reserved: acceptance of a draft by p / q
    RESIDUAL = 2  # reserved: the choice after all siblings were rejected
    DRAFT = 3  # reserved: drawing the drafts themselves


WEIGHT_BITS = 40
COIN_BITS = 24


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            right >> 32 ^ c1 ^ k0,
            right & 0xFFFFFFFF,
            left >> 32 ^ c3 ^ k1,
            left & 0xFFFFFFFF,
        )
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def coin(seed: int, position: int, purpose: Purpose = Purpose.SAMPLE) -> int:
    """24 random bits: the coin of ``position`` is this over 2^24, in [0, 1)."""
    low, high = 0xFFFFFFFF, 32
    words = philox4x32(
        (position & low, position >> high & low, purpose, 0), (seed & low, seed >> high & low)
    )
    return words[0] >> 32 - COIN_BITS


def exp_weights(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 0 in fp32, to about 2 ulp, of separately rounded products and sums only.

    Without a fused multiply-add every backend computes the same bits. Below -30 it stays at e^-30,
    which rounds to no weight at all.
    """
    x = x.clamp(min=-30.0)
    n = (x * 1.44269504 + 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    r = x - n * 0.693359375
    r = r + n * 2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    p = (p * (r * r) + r) + 1.0
    return p * ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def values_of(row, bias, allowed):
    """What is chosen from, fp32 ``[V]``: logits + bias; NaN and what is not allowed at -inf."""
    values = row.float()
    if bias is not None:
        values = values + bias
    values = torch.where(values.isnan(), -math.inf, values)
    if allowed is not None:
        ids = torch.arange(row.shape[0], device=row.device)
        bit = allowed[ids // 32] >> (ids % 32).to(torch.int32) & 1
        values = torch.where(bit == 1, values, -math.inf)
    return values


def token_weights(values, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Integer weights int64 ``[V]`` of the target's distribution: p(id) = weight(id) / sum.

    The greatest value has weight 2^40 before truncation to an integer. Sums of integers have no
    order, so every backend and every thread count agrees on each bit.
    """
    top = values.max()
    difference = torch.where(values == top, 0.0, values - top)  # inf - inf counts as 0
    # Kept normal and finite, so that 0 * inverse is 0 whatever the mode for subnormals.
    fp32 = torch.finfo(torch.float32)
    inverse = (1.0 / torch.tensor(temperature, dtype=torch.float32)).clamp(fp32.tiny, fp32.max)
    relative = exp_weights(difference * inverse.to(values.device))
    weights = (relative.double() * 2.0**WEIGHT_BITS).to(torch.int64)
    order = torch.sort(values, descending=True, stable=True).indices  # ties to the lower id
    if 0 < top_k < len(values):
        weights[order[top_k:]] = 0
    if top_p < 1.0:
        best_first = weights[order]
        before = best_first.cumsum(0) - best_first
        enough = max(1, math.ceil(top_p * float(weights.sum().item())))
        weights[order[before >= enough]] = 0
    if min_p > 0.0:
        weights[relative < min_p] = 0
    return weights


def sample(weights: torch.Tensor, bits: int) -> int:
    """First id whose cumulative probability exceeds ``bits / 2^24``; never one of weight 0."""
    cumulative = weights.cumsum(0)
    below = (bits * int(cumulative[-1])) >> COIN_BITS
    return int(torch.searchsorted(cumulative, below, right=True))


def _choose(values, parameters, seed, position) -> int | None:
    """The target's token, or None if there is none to choose."""
    top = values.max()
    if top == -math.inf:
        return None
    if parameters["temperature"] == 0.0:
        return int((values == top).nonzero()[0])
    return sample(token_weights(values, **parameters), coin(seed, position))


def _find_child(node, token, tokens, first_child, next_sibling):
    """The first child of ``node`` that carries ``token`` (or None), and status bits."""
    child = first_child[node]
    for _ in range(len(tokens)):
        if child == -1:
            return None, VerifyStatus(0)
        if not node < child < len(tokens):
            # A child after its parent keeps accept_index increasing, and any walk finite.
            return None, VerifyStatus.BAD_LINK
        if tokens[child] == token:
            return child, VerifyStatus(0)
        child = next_sibling[child]
    return None, VerifyStatus.SIBLING_CYCLE


def _check_parameters(temperature, top_p, min_p) -> None:
    if not 0.0 <= temperature < math.inf:
        fail(_OP, "temperature", "finite values >= 0", temperature)
    if not top_p >= 0.0:
        fail(_OP, "top_p", "values >= 0", top_p)
    if not min_p <= 1.0:
        fail(_OP, "min_p", "values <= 1", min_p)


def tree_verify_reference(
    logits,
    tokens,
    first_child,
    next_sibling,
    context_lens,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    logit_bias,
    allowed,
    accept_index,
    num_accepted,
    out_tokens,
    status,
) -> None:
    batch = logits.shape[0]
    lengths = context_lens.tolist()

    def per_request(t, default):
        return [default] * batch if t is None else t.tolist()

    columns = {
        "temperature": per_request(temperature, 0.0),
        "top_k": per_request(top_k, 0),
        "top_p": per_request(top_p, 1.0),
        "min_p": per_request(min_p, 0.0),
    }
    parameters = [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ]
    for p, length in zip(parameters, lengths, strict=True):
        if length >= 0:
            _check_parameters(p["temperature"], p["top_p"], p["min_p"])
    seed_of = per_request(seeds, 0)
    links = tokens.tolist(), first_child.tolist(), next_sibling.tolist()

    accept_index.fill_(-1)
    out_tokens.fill_(-1)
    num_accepted.zero_()
    status.zero_()
    for b, length in enumerate(lengths):
        if length < 0:
            continue
        path, emitted, bits = [0], [], VerifyStatus(0)
        while True:
            node, depth = path[-1], len(path) - 1
            values = values_of(
                logits[b, node],
                None if logit_bias is None else logit_bias[b],
                None if allowed is None else allowed[b, node],
            )
            token = _choose(values, parameters[b], seed_of[b], length + depth + 1)
            emitted.append(0 if token is None else token)
            if token is None:
                bits |= VerifyStatus.NO_TOKEN
                break
            if len(path) == accept_index.shape[1]:
                break
            child, found = _find_child(node, token, *(rows[b] for rows in links))
            bits |= found
            if child is None:
                break
            path.append(child)
        accept_index[b, : len(path)] = torch.tensor(path, device=accept_index.device)
        out_tokens[b, : len(emitted)] = torch.tensor(emitted, device=out_tokens.device)
        num_accepted[b] = len(path) - 1
        status[b] = int(bits)


register_reference("tree_verify", tree_verify_reference)
