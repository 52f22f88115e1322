"""The walk and the move of what it accepted, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_kernels.ops.common import run
from spec_kernels.ops.compact.api import check_moved
from spec_kernels.ops.tree_verify.api import Verified, verify_arguments
from spec_kernels.ops.tree_verify.compact_reference import tree_verify_compact_reference

_OP = "tree_verify_compact"


def tree_verify_compact(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    caches: Sequence[torch.Tensor] = (),
    rows: Sequence[torch.Tensor] = (),
    max_accepted: int | None = None,
    *,
    out: Verified | None = None,
    backend: str | None = None,
    **rule,
) -> Verified:
    """``tree_verify``, then ``compact`` along the path it accepted, bit for bit.

    On CUDA the block that walked a request moves its rows in all layers: one launch for up to 80
    tensors that have bytes (61 caches of Kimi-K2.5 and 19 more); what is beyond is moved by the
    launches of ``compact``, 88 tensors each. A request that may not move (see below) moves in none
    of them.

    Args:
        logits, tokens, first_child, next_sibling, context_lens, max_accepted, out, backend: as in
            ``tree_verify``.
        rule: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``seeds``, ``logit_bias``,
            ``allowed``, ``draft_probs``, ``typical``, as in ``tree_verify``.
        block_tables, caches, rows: as in ``compact``. What moves overlaps nothing else that is
            given: to move the tree's own tokens call ``compact`` (``out.tokens`` holds the
            accepted ones).

    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or a parameter out of range,
            before anything is written. On CPU also a node or position outside its tensor or a page
            outside its cache: then ``out`` is written and nothing has moved. A CUDA kernel moves
            nothing of such a request and everything of the others.
    """
    args, out = verify_arguments(
        _OP, logits, tokens, first_child, next_sibling, context_lens, max_accepted, out=out, **rule
    )
    check_moved(_OP, logits.shape[0], logits.device, block_tables, caches, rows)
    args = (*args, block_tables, *out.tensors(), list(caches), list(rows))
    run(_OP, backend, logits.device, args, tree_verify_compact_reference)
    return out
