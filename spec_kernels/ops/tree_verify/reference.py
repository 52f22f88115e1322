"""Readable PyTorch for ``tree_verify``: the oracle, and the fallback on every device.

It reads the links back to the host, which no compiled kernel does.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

from spec_kernels._library import register_reference
from spec_kernels.ops.common import fail

_OP = "tree_verify"


class VerifyStatus(enum.IntFlag):
    """Bits of ``Verified.status``; 0 is sound. ``csrc/tree_verify/tree_verify.h`` has the twins."""

    # A visited row had no token to choose (all NaN, -inf or masked): id 0 stands in, the walk ends.
    NO_TOKEN = 1
    # A link on the walk points outside the tree or to a node without a slot, or a child does not
    # come after its parent.
    BAD_LINK = 2
    # A list of siblings has more entries than the tree has nodes.
    SIBLING_CYCLE = 4
    # A sampling parameter is out of range. Raised as ValueError where values are read on the host.
    BAD_PARAMETER = 8
    # A visited row of draft_probs has an entry outside [0, 2), or NaN: it counts as 0.
    BAD_DRAFT = 16


class Purpose(enum.IntEnum):
    """Third word of the counter: coins drawn for different ends at one position are independent."""

    SAMPLE = 0  # the target's own choice
    ACCEPT = 1  # acceptance of a draft by p / q; the ordinal is its place among its siblings
    RESIDUAL = 2  # the choice after a rejection
    DRAFT = 3  # drawing the drafts themselves; the ordinal counts the children of one node


WEIGHT_BITS = 40
COIN_BITS = 24
# Children of one node that can be rejected; those that follow are not tried.
MAX_REJECTIONS = 64


def philox4x32(counter, key: tuple[int, int]) -> tuple:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    The four words of the counter, and of the result, are integers or int64 tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            right >> 32 & 0xFFFFFFFF ^ c1 ^ k0,
            right & 0xFFFFFFFF,
            left >> 32 & 0xFFFFFFFF ^ c3 ^ k1,
            left & 0xFFFFFFFF,
        )
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def coin(seed: int, position: int, purpose: Purpose = Purpose.SAMPLE, ordinal: int = 0) -> int:
    """24 random bits: the coin of ``position`` is this over 2^24, in [0, 1)."""
    low, high = 0xFFFFFFFF, 32
    words = philox4x32(
        (position & low, position >> high & low, purpose, ordinal), (seed & low, seed >> high & low)
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


def to_fixed(x: torch.Tensor) -> torch.Tensor:
    """Multiples of 2^-40, truncated, as int64."""
    return (x.double() * 2.0**WEIGHT_BITS).to(torch.int64)


def log_weights(values, temperature):
    """Logarithm of the probability relative to the greatest, fp32; -inf stays below -30.

    Of a row ``[V]`` and a number, or of rows ``[..., V]`` and a tensor that broadcasts to them.
    """
    top = values.amax(-1, keepdim=True)
    difference = torch.where(values == top, 0.0, values - top)  # inf - inf counts as 0
    # Kept normal and finite, so that 0 * inverse is 0 whatever the mode for subnormals.
    fp32 = torch.finfo(torch.float32)
    inverse = (1.0 / torch.as_tensor(temperature, dtype=torch.float32, device=values.device)).clamp(
        fp32.tiny, fp32.max
    )
    return difference * inverse


def token_weights(values, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Integer weights int64 ``[V]`` of the target's distribution: p(id) = weight(id) / sum.

    The greatest value has weight 2^40 before truncation to an integer. Sums of integers have no
    order, so every backend and every thread count agrees on each bit.
    """
    relative = exp_weights(log_weights(values, temperature))
    weights = to_fixed(relative)
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


# ---- Drafts drawn from q: recursive rejection over the children of one node, in integers.


def draft_weights(row: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Integer weights int64 ``[V]`` of q, and whether every entry was sound.

    Truncated multiples of 2^-40; what is above 1 (by rounding) counts as 1, what is outside [0, 2)
    as 0. They need not sum to 1.
    """
    q = row.float()
    sound = (q >= 0) & (q < 2)
    return to_fixed(torch.where(sound, q, 0.0).clamp(max=1.0)), bool(sound.all())


def accepting_coins(p: int, p_total: int, q: int, q_total: int) -> int:
    """How many of the 2^24 coins, the lowest ones, accept a draft: min(1, p / q) rounded up.

    So its probability is right to 2^-24, 0 stays 0, and q <= p accepts for certain. Needs q > 0.
    """
    return min(1 << COIN_BITS, -(-(p * q_total << COIN_BITS) // (q * p_total)))


def _ratio(p_total: int, q_total: int) -> tuple[int, int]:
    """``p_total / q_total`` as mantissa * 2^-shift of 32 bits: never above, short by < 2^-30 of it.

    Never above, so the amounts subtracted sum to at most ``p_total``: a rejection, which is
    possible only where p(x) < q(x), leaves a residual > 0.
    """
    p_zeros, q_zeros = 64 - p_total.bit_length(), 64 - q_total.bit_length()
    mantissa = (p_total << p_zeros) // ((q_total << q_zeros >> 32) + 1)
    half = mantissa >> 32 != 0
    return mantissa >> half, 32 + p_zeros - q_zeros - half


def residual(p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of p and q after ``token`` was drawn from q and rejected.

    p <- max(p - q, 0) with q brought to p's total, and q <- q without ``token``. Of p, ``token``
    is taken out too: nothing of it is left, since p(token) < q(token).
    """
    mantissa, shift = _ratio(int(p.sum()), int(q.sum()))
    amount = (q >> 16) * mantissa + ((q & 0xFFFF) * mantissa >> 16)  # 2^16 times too great, so far
    amount = amount >> min(shift - 16, 63) if shift >= 16 else amount << 16 - shift
    p = (p - amount).clamp(min=0)
    p[token] = 0
    q = q.clone()
    q[token] = 0
    return p, q


# ---- Typical acceptance.


def typical_limit(values, weights, temperature, epsilon, delta) -> float:
    """min(epsilon, delta e^-H) in units of ``weights``, H their entropy: a draft must exceed it."""
    x = log_weights(values, temperature).clamp(min=-30.0)
    surprise = torch.where(weights > 0, to_fixed(exp_weights(x) * -x), 0)
    total = int(weights.sum())
    mean = torch.tensor(
        float(int(surprise.sum())) / float(total), dtype=torch.float32, device="cpu"
    )
    relative = float(exp_weights(-mean))  # times 2^40 / total it is e^-H
    return min(epsilon * float(total), delta * 2.0**WEIGHT_BITS * relative)


# ---- The walk.


def children_of(node, first_child, next_sibling):
    """The children of ``node`` in list order, and why the list ended, if by a fault."""
    found, child = [], first_child[node]
    while child != -1:
        if not node < child < len(first_child):
            # A child after its parent keeps accept_index increasing, and any walk finite.
            return found, VerifyStatus.BAD_LINK
        found.append(child)
        if len(found) == len(first_child):
            return found, VerifyStatus.SIBLING_CYCLE
        child = next_sibling[child]
    return found, VerifyStatus(0)


@dataclass
class _Node:
    """What one request's walk meets at one node."""

    values: torch.Tensor
    parameters: dict
    seed: int
    position: int  # of the token to choose
    tokens: list
    children: list  # none where the room for accepted drafts ends
    list_status: VerifyStatus  # how the list of children ended

    def step(self, draft_probs, typical) -> tuple[int | None, int | None, VerifyStatus]:
        """(token, child that it accepts or None, status); the token is None if there is none."""
        top = self.values.max()
        if top == -math.inf:
            return None, None, VerifyStatus.NO_TOKEN
        if self.parameters["temperature"] == 0.0:
            return self._follow(int((self.values == top).nonzero()[0]))
        weights = token_weights(self.values, **self.parameters)
        if draft_probs is not None and self.children:
            return self._rejection(weights, draft_probs)
        if typical is not None and self.children:
            return self._typical(weights, *typical)
        return self._follow(self._sample(weights))

    def _sample(self, weights, purpose=Purpose.SAMPLE) -> int:
        return sample(weights, coin(self.seed, self.position, purpose))

    def _follow(self, token: int):
        """The target's own token, and the first child that carries it."""
        for child in self.children:
            if self.tokens[child] == token:
                return token, child, VerifyStatus(0)
        return token, None, self.list_status

    def _rejection(self, p, draft_probs):
        q, sound = draft_weights(draft_probs)
        status = VerifyStatus(0) if sound else VerifyStatus.BAD_DRAFT
        num_rejected = 0
        for ordinal, child in enumerate(self.children):
            x = self.tokens[child]
            if not 0 <= x < len(q) or q[x] == 0:
                continue  # no draw from q: passed over
            limit = accepting_coins(int(p[x]), int(p.sum()), int(q[x]), int(q.sum()))
            if coin(self.seed, self.position, Purpose.ACCEPT, ordinal) < limit:
                return x, child, status
            p, q = residual(p, q, x)
            num_rejected += 1
            if num_rejected == MAX_REJECTIONS:
                break
        else:
            status |= self.list_status
        # As long as nothing was rejected p is the target's own, and so is the choice.
        return self._sample(p, Purpose.RESIDUAL if num_rejected else Purpose.SAMPLE), None, status

    def _typical(self, weights, epsilon, delta):
        limit = typical_limit(self.values, weights, self.parameters["temperature"], epsilon, delta)
        best, found = 0, None
        for child in self.children:
            x = self.tokens[child]
            own = int(weights[x]) if 0 <= x < len(weights) else 0
            if own > best and own > limit:
                best, found = own, child
        token = self._sample(weights) if found is None else self.tokens[found]
        return token, found, self.list_status


def _check_parameters(op, temperature, top_p, min_p) -> None:
    if not 0.0 <= temperature < math.inf:
        fail(op, "temperature", "finite values >= 0", temperature)
    if not top_p >= 0.0:
        fail(op, "top_p", "values >= 0", top_p)
    if not min_p <= 1.0:
        fail(op, "min_p", "values <= 1", min_p)


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
    draft_probs,
    typical_epsilon,
    typical_delta,
    accept_index,
    num_accepted,
    out_tokens,
    status,
    op=_OP,
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
            _check_parameters(op, p["temperature"], p["top_p"], p["min_p"])
    seed_of = per_request(seeds, 0)
    links = first_child.tolist(), next_sibling.tolist()
    typical = (typical_epsilon, typical_delta) if typical_epsilon > 0.0 else None

    accept_index.fill_(-1)
    out_tokens.fill_(-1)
    num_accepted.zero_()
    status.zero_()
    for b, length in enumerate(lengths):
        if length < 0:
            continue
        request_tokens = tokens[b].tolist()
        path, emitted, bits = [0], [], VerifyStatus(0)
        while len(emitted) < len(path):
            node, depth = path[-1], len(path) - 1
            children, list_status = [], VerifyStatus(0)
            if len(path) < accept_index.shape[1]:
                children, list_status = children_of(node, *(rows[b] for rows in links))
            here = _Node(
                values_of(
                    logits[b, node],
                    None if logit_bias is None else logit_bias[b],
                    None if allowed is None else allowed[b, node],
                ),
                parameters[b],
                seed_of[b],
                length + depth + 1,
                request_tokens,
                children,
                list_status,
            )
            token, child, found = here.step(
                None if draft_probs is None else draft_probs[b, node], typical
            )
            bits |= found
            emitted.append(0 if token is None else token)
            if child is not None:
                path.append(child)
        accept_index[b, : len(path)] = torch.tensor(path, device=accept_index.device)
        out_tokens[b, : len(emitted)] = torch.tensor(emitted, device=out_tokens.device)
        num_accepted[b] = len(path) - 1
        status[b] = int(bits)


register_reference("tree_verify", tree_verify_reference)
