"""What a drafter proposes next: its likeliest tokens, or draws from its distribution."""

from __future__ import annotations

import torch

from spec_kernels.ops.common import (
    FLOATS,
    INTEGERS,
    check_last_dim,
    check_no_overlap,
    check_tensor,
    fail,
    run,
)
from spec_kernels.ops.draft_sample.reference import draft_sample_reference
from spec_kernels.ops.tree_build import MAX_NODES
from spec_kernels.ops.tree_verify.api import MAX_VOCAB

_OP = "draft_sample"
_INT64 = (torch.int64,)
_FLOAT32 = (torch.float32,)


def draft_sample(
    logits: torch.Tensor,
    target_ids: torch.Tensor | None,
    context_lens: torch.Tensor,
    depth: int,
    num_drafts: int | None = None,
    *,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    confidence: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``W`` drafts that follow each of ``P`` live rows of one level; ``(tokens, confidence)``.

    A request of temperature 0, and every request when ``temperature`` or ``probs`` is None, gets
    the likeliest: the greatest logits, best first, ties to the lower draft id; NaN counts as -inf.
    The others get ``W`` draws one after the other without replacement from
    q = softmax(logits / temperature), and q itself in ``probs``: what ``tree_verify`` is to be told
    as ``draft_probs``.

    Draws. q is in fp32, by the exponential and the integer sums of ``tree_verify``, and its weights
    are multiples of 2^-40, as there: every backend has the same q and draws the same tokens. Draw j
    is the first draft id whose cumulative weight exceeds coin * (what is left), exactly, so a
    token's probability is right to 2^-32 and a token of weight 0 is never drawn while another is
    left; when nothing is left, it is the last draft id. The coin is 32 bits of Philox4x32-10 with
    the seed as key and (position, ``Purpose.DRAFT``, j) as counter. The drafts stand at position
    ``context_len + depth``. All rows of a request share the coins of their level: at most one of
    them is on the path, and which one was settled at earlier positions.

    Confidence says how likely the drafter holds each draft, for choosing how much to verify. Of the
    likeliest it is the softmax probability at temperature 1. Of draw 0 it is the greatest of q, and
    of draw j the greatest of q among what draws 0 to j - 1 left: a function of the distribution and
    of the draws before, never of the draw itself, because a choice to verify that looked at the
    draw would no longer leave the text distributed as the target's. For the same reason a choice
    about draw j may look at the confidence of its own and of earlier draws and levels only. The
    logarithm of a likeliest draft's confidence is a log-probability right to about 1e-6 down to -30
    below the greatest, where it stays (a logit of -inf has confidence 0): enough for the cumulative
    scores of ``tree_build``.

    Args:
        logits: ``[B, P, Vd]`` float32 or bfloat16, the drafter's after each live row; Vd up to
            2^22. Rows may be strided.
        target_ids: ``[Vd]`` int64, distinct: the target's id of each draft id; None = the same.
        context_lens: ``[B]``: where the root stands; negative = padded request: tokens and
            confidence 0, ``probs`` untouched, nothing of it is read.
        depth: of the drafts, at least 1; the root has depth 0.
        num_drafts: W, 1 to 1024 and at most Vd; needed when ``tokens`` is None.
        temperature: ``[B]`` float32, finite, >= 0.
        seeds: ``[B]`` int64; required with ``temperature`` and ``probs``.
        tokens: ``[B, P, W]`` int64, any strides; allocated when None.
        confidence: ``[B, P, W]`` float32, any strides; allocated when None.
        probs: ``[B, P, Vt]`` float32 or None; rows may be strided. Of requests that draw, q at the
            target ids; what no draft id stands for keeps its value. Other requests: untouched.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or (on CPU) a temperature is
            out of range or, when a request draws, a target id outside ``[0, Vt)``. On other
            devices, where looking would wait, such a request counts as padded and such an id is
            left out of ``probs``.
    """
    check_tensor(_OP, "logits", logits, (None, None, None), FLOATS)
    check_last_dim(_OP, "logits", logits)
    batch, num_rows, vocab = logits.shape
    device = logits.device
    if not 1 <= vocab <= MAX_VOCAB:
        fail(_OP, "logits", f"1 to {MAX_VOCAB} tokens", vocab)
    if target_ids is not None:
        check_tensor(_OP, "target_ids", target_ids, (vocab,), _INT64, device)
    check_tensor(_OP, "context_lens", context_lens, (batch,), INTEGERS, device)
    if depth < 1:
        fail(_OP, "depth", "at least 1", depth)
    if depth >= 2**63:
        fail(_OP, "depth", "an integer of 64 bits", depth)
    if temperature is not None:
        check_tensor(_OP, "temperature", temperature, (batch,), _FLOAT32, device)
    if seeds is not None:
        check_tensor(_OP, "seeds", seeds, (batch,), _INT64, device)
    elif temperature is not None and probs is not None:
        fail(_OP, "seeds", "one seed for each request when drafts are drawn", None)
    if tokens is None:
        if num_drafts is None:
            fail(_OP, "num_drafts", "a number of drafts, or tokens", None)
        _check_num_drafts("num_drafts", num_drafts, vocab)
        tokens = torch.empty((batch, num_rows, num_drafts), dtype=torch.int64, device=device)
    else:
        check_tensor(_OP, "tokens", tokens, (batch, num_rows, num_drafts), _INT64, device)
        _check_num_drafts("tokens", tokens.shape[2], vocab)
        check_no_overlap(_OP, "tokens", tokens)
    if confidence is None:
        confidence = torch.empty(tokens.shape, dtype=torch.float32, device=device)
    else:
        check_tensor(_OP, "confidence", confidence, tuple(tokens.shape), _FLOAT32, device)
        check_no_overlap(_OP, "confidence", confidence)
    if probs is not None:
        check_tensor(_OP, "probs", probs, (batch, num_rows, None), _FLOAT32, device)
        check_last_dim(_OP, "probs", probs)
        check_no_overlap(_OP, "probs", probs)
        if target_ids is None and probs.shape[2] < vocab:
            fail(_OP, "probs", f"at least {vocab} columns", probs.shape[2])
    args = (logits, target_ids, context_lens, depth, temperature, seeds, tokens, confidence, probs)
    run(_OP, backend, device, args, draft_sample_reference)
    return tokens, confidence


def _check_num_drafts(name: str, num_drafts: int, vocab: int) -> None:
    most = min(vocab, MAX_NODES)
    if not 1 <= num_drafts <= most:
        fail(_OP, name, f"1 to {most} drafts a row", num_drafts)
