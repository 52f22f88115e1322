"""The walk down a draft tree along the target's choices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from spec_kernels.ops.common import FLOATS, INTEGERS, check_last_dim, check_tensor, fail, run
from spec_kernels.ops.tree_build import MAX_NODES
from spec_kernels.ops.tree_verify.reference import tree_verify_reference

_OP = "tree_verify"

# Sums of this many integer weights stay within 64 bits.
MAX_VOCAB = 1 << 22

_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
_FLOAT32 = (torch.float32,)


@dataclass
class Verified:
    """What one cycle settled, for D = ``max_accepted`` and padded with -1.

    Attributes:
        accept_index: ``[B, D + 1]`` nodes on the accepted path, strictly increasing; the first is
            the root, 0.
        num_accepted: ``[B]`` drafts accepted; the accept length is one more (0 too for a padded
            request, whose rows are all -1).
        tokens: ``[B, D + 1]`` tokens emitted: the accepted drafts, then the bonus token.
        status: ``[B]`` bits of ``VerifyStatus``; 0 = sound.
    """

    accept_index: torch.Tensor
    num_accepted: torch.Tensor
    tokens: torch.Tensor
    status: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of the ops' schemas."""
        return self.accept_index, self.num_accepted, self.tokens, self.status

    @classmethod
    def allocate(
        cls, batch: int, max_accepted: int, device: torch.device | str | None = None
    ) -> Verified:
        """Uninitialised storage for ``tree_verify(..., out=)``."""
        if max_accepted < 0:
            fail(_OP, "max_accepted", "at least 0", max_accepted)
        path = (batch, max_accepted + 1)
        return cls(
            accept_index=torch.empty(path, dtype=torch.int32, device=device),
            num_accepted=torch.empty((batch,), dtype=torch.int32, device=device),
            tokens=torch.empty(path, dtype=torch.int64, device=device),
            status=torch.empty((batch,), dtype=torch.int32, device=device),
        )


def tree_verify(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    context_lens: torch.Tensor,
    max_accepted: int | None = None,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    typical: tuple[float, float] | None = None,
    out: Verified | None = None,
    backend: str | None = None,
) -> Verified:
    """Walks from the root, accepting drafts while the target agrees, then emits a bonus token.

    Requests of temperature 0 are greedy. The others follow one of three forms:

    ============  ==========================  =================================================
    form          how the drafts were chosen  what is exact
    ============  ==========================  =================================================
    target-only   anyhow, without looking at  the text is, token for token, that of plain
    (default)     the coins; say the top k    decoding, so distributed as the target's
    draft_probs   the children of a node one  the text is distributed as the target's; drafts
                  after the other from q,     drawn anew give another text for the same seed
                  without replacement
    typical       anyhow                      nothing: lossy, by the rule of Medusa
    ============  ==========================  =================================================

    Target-only: while a child carries the token that the target itself chooses, it is accepted;
    else that token is the bonus. The choice at a node is a function of its logits, the request's
    parameters and seed, and the absolute position of the token, ``context_len + depth + 1`` (the
    root stands at ``context_len``). So plain decoding, any tree, any batch order and any backend
    choose the same token, and a larger tree never accepts less. Point-mass drafts are accepted with
    probability p(draft).

    draft_probs: recursive rejection (arXiv 2402.14160; with one child it is the rule for chains of
    arXiv 2211.17192). Children are tried in list order; child x is accepted with probability
    min(1, p(x) / q(x)), and where it is rejected p <- norm(max(p - q, 0)) and q <- norm(q without
    x). If none is accepted the bonus is drawn from the p that is left: from the whole p, and then
    with the coin of plain decoding, if nothing was rejected. A child of q = 0, or equal to a
    sibling before it, is passed over; after 64 rejections at a node no more children are tried.
    Both leave the distribution exact. q need not sum to 1. Rows of q are read only at visited nodes
    that have children.

    typical (Medusa, arXiv 2401.10774): a child is accepted if
    p(x) > min(epsilon, delta exp(-H(p))), of several the likeliest (the paper takes the longest
    path of all; here only rows on one path are read); the bonus is the target's own choice. The
    paper uses delta = sqrt(epsilon).

    The choice. Values are logits + bias in fp32; NaN, and ids that are not allowed, count as -inf.
    Temperature 0: the greatest, ties to the lower id. Otherwise weights exp((value - greatest) /
    temperature) in fp32 (+inf shares the weight evenly), truncated to multiples of 2^-40 so that
    sums are exact in any order; then top-k (ties to the lower id), top-p on what is left (the
    smallest best-first set whose mass reaches top_p), min-p (at least min_p times the greatest
    probability). The token is the first id whose cumulative probability exceeds the coin, 24 bits
    of Philox4x32-10 with the seed as key and (position, purpose, ordinal) as counter. A token of
    probability zero is never chosen or accepted.

    What the coins' resolution costs: the probability of a token, or of accepting a draft (rounded
    up), is right to 2^-24 at each coin. Truncated weights add less than 2^-40 V to the total
    variation of a token, and each rejection as much again and 2^-30.

    Links are data too: an entry outside the tree, a child that does not come after its parent, or a
    list that runs in a circle ends the search there, with a bit in ``status``. Siblings should
    carry distinct tokens; of equal ones the first in the list is taken.

    Args:
        logits: ``[B, N, V]`` float32 or bfloat16, row i = after node i; N up to 1024, V up to 2^22.
            Rows may be strided. Only rows on the accepted path are read.
        tokens, first_child, next_sibling: ``[B, N]``, as in ``DraftTree``.
        context_lens: ``[B]`` committed length; negative = padded request: nothing of it is read.
        max_accepted: D, the room for accepted drafts (default N - 1). A walk that reaches it stops.
        temperature: ``[B]`` float32, finite, >= 0; 0 (or None) = greedy.
        top_k: ``[B]`` integers; <= 0 or >= V = off.
        top_p: ``[B]`` float32 >= 0; >= 1 = off; 0 keeps the best token.
        min_p: ``[B]`` float32 <= 1; <= 0 = off.
        seeds: ``[B]`` int64; required with ``temperature``.
        logit_bias: ``[B, V]`` or ``[V]`` float32.
        allowed: ``[B, N, ceil(V / 32)]`` int32 bitmask by node, least significant bit first; bits
            past V are not read.
        draft_probs: ``[B, N, V]`` float32 or bfloat16, row i = q of the children of node i, each
            entry in [0, 1] (what rounding put above 1 counts as 1). Rows may be strided. An entry
            outside [0, 2) counts as 0 and sets a bit in ``status``.
        typical: (epsilon, delta), epsilon in (0, 1], delta > 0; not together with ``draft_probs``.
        out: storage to write into; every element is overwritten. Integer tensors of either width.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or a parameter out of range
            (on CPU; a CUDA kernel sets a status bit).
    """
    args, out = verify_arguments(
        _OP,
        logits,
        tokens,
        first_child,
        next_sibling,
        context_lens,
        max_accepted,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        logit_bias=logit_bias,
        allowed=allowed,
        draft_probs=draft_probs,
        typical=typical,
        out=out,
    )
    run(_OP, backend, logits.device, (*args, *out.tensors()), tree_verify_reference)
    return out


def verify_arguments(
    op: str,
    logits,
    tokens,
    first_child,
    next_sibling,
    context_lens,
    max_accepted,
    *,
    temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    seeds=None,
    logit_bias=None,
    allowed=None,
    draft_probs=None,
    typical=None,
    out=None,
) -> tuple[tuple, Verified]:
    """What an op that begins with this walk reads, in the order of the schema, and its outputs.

    Checked; arguments as in ``tree_verify``.
    """
    check_tensor(op, "logits", logits, (None, None, None), FLOATS)
    check_last_dim(op, "logits", logits)
    batch, num_nodes, vocab = logits.shape
    if not 1 <= num_nodes <= MAX_NODES or not 1 <= vocab <= MAX_VOCAB:
        expected = f"1 to {MAX_NODES} nodes and 1 to {MAX_VOCAB} tokens"
        fail(op, "logits", expected, list(logits.shape))
    device = logits.device
    nodes, requests = (batch, num_nodes), (batch,)
    check_tensor(op, "tokens", tokens, nodes, INTEGERS, device)
    check_tensor(op, "first_child", first_child, nodes, INTEGERS, device)
    check_tensor(op, "next_sibling", next_sibling, nodes, INTEGERS, device)
    check_tensor(op, "context_lens", context_lens, requests, INTEGERS, device)
    if temperature is not None:
        check_tensor(op, "temperature", temperature, requests, _FLOAT32, device)
        if seeds is None:
            fail(op, "seeds", "one seed for each request when temperature is given", None)
    if top_k is not None:
        check_tensor(op, "top_k", top_k, requests, INTEGERS, device)
    if top_p is not None:
        check_tensor(op, "top_p", top_p, requests, _FLOAT32, device)
    if min_p is not None:
        check_tensor(op, "min_p", min_p, requests, _FLOAT32, device)
    if seeds is not None:
        check_tensor(op, "seeds", seeds, requests, _INT64, device)
    if logit_bias is not None:
        if isinstance(logit_bias, torch.Tensor) and logit_bias.dim() == 1:
            logit_bias = logit_bias.expand(batch, -1)
        check_tensor(op, "logit_bias", logit_bias, (batch, vocab), _FLOAT32, device)
        check_last_dim(op, "logit_bias", logit_bias)
    if allowed is not None:
        words = (batch, num_nodes, (vocab + 31) // 32)
        check_tensor(op, "allowed", allowed, words, _INT32, device)
        check_last_dim(op, "allowed", allowed)
    if draft_probs is not None:
        check_tensor(op, "draft_probs", draft_probs, (batch, num_nodes, vocab), FLOATS, device)
        check_last_dim(op, "draft_probs", draft_probs)
    epsilon, delta = _check_typical(op, typical, draft_probs)
    if out is None:
        out = Verified.allocate(
            batch, num_nodes - 1 if max_accepted is None else max_accepted, device
        )
    else:
        steps = None if max_accepted is None else max_accepted + 1
        check_tensor(op, "out.accept_index", out.accept_index, (batch, steps), INTEGERS, device)
        if out.accept_index.shape[1] < 1:
            fail(op, "out.accept_index", "at least one column", list(out.accept_index.shape))
        check_tensor(op, "out.num_accepted", out.num_accepted, requests, INTEGERS, device)
        check_tensor(op, "out.tokens", out.tokens, out.accept_index.shape, INTEGERS, device)
        check_tensor(op, "out.status", out.status, requests, INTEGERS, device)
    args = (
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
        epsilon,
        delta,
    )
    return args, out


def _check_typical(op: str, typical, draft_probs) -> tuple[float, float]:
    """(epsilon, delta) as the op takes them; zeros stand for off."""
    if typical is None:
        return 0.0, 0.0
    epsilon, delta = typical
    if not 0.0 < epsilon <= 1.0:
        fail(op, "typical_epsilon", "a number in (0, 1]", epsilon)
    if not 0.0 < delta < math.inf:
        fail(op, "typical_delta", "a finite number > 0", delta)
    if draft_probs is not None:
        fail(op, "draft_probs", "none beside typical acceptance", "a tensor")
    return float(epsilon), float(delta)
