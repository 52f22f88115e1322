"""The walk on what the caller brings: given choices, or given probabilities and coins."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.ops.common import INTEGERS, check_last_dim, check_tensor, fail, run
from spec_kernels.ops.tree_build import MAX_NODES
from spec_kernels.ops.tree_verify.api import MAX_VOCAB
from spec_kernels.ops.tree_verify.coins_reference import (
    tree_verify_choices_reference,
    tree_verify_coins_reference,
)

_CHOICES = "tree_verify_choices"
_COINS = "tree_verify_coins"

_FLOAT32 = (torch.float32,)


@dataclass
class FlatVerified:
    """What one cycle settled, in flat form: a node is named by its slot, its place in ``[M]``.

    Only what the walk reaches is written; every other element keeps what it held.

    Attributes:
        predictions: ``[M]``; at the slot of each node on the accepted path, the token after it.
        accept_index: ``[B, D + 1]``, slots of the nodes on the accepted path, the root first.
        num_accepted: ``[B]`` drafts accepted; written for every request.
        status: ``[B]`` bits of ``VerifyStatus``, 0 = sound; written for every request.
    """

    predictions: torch.Tensor
    accept_index: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor

    @classmethod
    def allocate(
        cls,
        batch: int,
        num_slots: int,
        max_accepted: int,
        device: torch.device | str | None = None,
    ) -> FlatVerified:
        """Storage in which -1 stands where nothing will be written."""
        if max_accepted < 0:
            fail(_CHOICES, "max_accepted", "at least 0", max_accepted)
        options = {"dtype": torch.int32, "device": device}
        return cls(
            predictions=torch.full((num_slots,), -1, **options),
            accept_index=torch.full((batch, max_accepted + 1), -1, **options),
            num_accepted=torch.empty((batch,), **options),
            status=torch.empty((batch,), **options),
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of the ops' out-arguments."""
        return self.predictions, self.accept_index, self.num_accepted, self.status


def _check_tree(op, tokens, first_child, next_sibling, slots, out) -> None:
    check_tensor(op, "tokens", tokens, (None, None), INTEGERS)
    nodes, device = tokens.shape, tokens.device
    if not 1 <= nodes[1] <= MAX_NODES:
        fail(op, "tokens", f"1 to {MAX_NODES} nodes", list(nodes))
    check_tensor(op, "first_child", first_child, nodes, INTEGERS, device)
    check_tensor(op, "next_sibling", next_sibling, nodes, INTEGERS, device)
    check_tensor(op, "slots", slots, nodes, INTEGERS, device)
    check_tensor(op, "out.predictions", out.predictions, (None,), INTEGERS, device)
    check_tensor(op, "out.accept_index", out.accept_index, (nodes[0], None), INTEGERS, device)
    if out.accept_index.shape[1] < 1:
        fail(op, "out.accept_index", "at least one column", list(out.accept_index.shape))
    if out.accept_index.dtype == torch.int32 and out.predictions.shape[0] > 1 << 31:
        fail(op, "out.accept_index", "int64 for so many slots", out.accept_index.dtype)
    check_tensor(op, "out.num_accepted", out.num_accepted, nodes[:1], INTEGERS, device)
    check_tensor(op, "out.status", out.status, nodes[:1], INTEGERS, device)


def tree_verify_choices(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    slots: torch.Tensor,
    choices: torch.Tensor,
    out: FlatVerified,
    *,
    backend: str | None = None,
) -> FlatVerified:
    """``tree_verify`` for a target that has chosen already: ``choices`` holds the token after each
    node, and the walk follows the first child that carries it.

    A node is named by its slot in the flat arrays ``[M]`` (``b * N + i`` in the simplest layout).
    Links are data, as in ``tree_verify``: a bad one ends the search with a bit in ``status``; so
    does a slot outside ``[0, M)``, whose node is taken for absent. On the walk, a choice that is
    negative or does not fit ``out.predictions`` is no token: id 0 stands in and the walk ends.

    Args:
        tokens, first_child, next_sibling: ``[B, N]``, as in ``DraftTree``; N up to 1024.
        slots: ``[B, N]``, distinct; negative at the root = padded request.
        choices: ``[M]``, read at the slots of the accepted path only.
        out: where to write. A walk stops where ``accept_index`` has no more room.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    _check_tree(_CHOICES, tokens, first_child, next_sibling, slots, out)
    check_tensor(_CHOICES, "choices", choices, out.predictions.shape, INTEGERS, tokens.device)
    args = (tokens, first_child, next_sibling, slots, choices, *out.tensors())
    run(_CHOICES, backend, tokens.device, args, tree_verify_choices_reference)
    return out


def tree_verify_coins(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    slots: torch.Tensor,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    out: FlatVerified,
    *,
    draft_probs: torch.Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    backend: str | None = None,
) -> FlatVerified:
    """Target-only sampling along a tree, with the caller's probabilities and the caller's coins.

    The coin of a node decides among its children, in list order: accepted is the first by which the
    sum of their probabilities, over ``threshold_acc``, exceeds the coin, or whose own probability
    is at least ``threshold_single``; never one of probability zero. If none is, the final coin of
    the request draws the last token from what is left: the target's row without the rejected
    children, less ``draft_probs`` where it is positive. With both thresholds 1, children that carry
    distinct tokens and independent uniform coins, the text is distributed as the target's, to the
    coins' resolution of 2^-24; lower thresholds accept more and are lossy.

    A walk that fills ``out.accept_index`` draws its last token from the plain row. Should rounding
    leave nothing of a row it is drawn from the plain row too. Probabilities that are NaN or
    negative count as 0; a row without any positive one sets a bit in ``status``, and id 0 stands
    in. Probabilities are summed in fp32, in list order; the last token is drawn by integer weights,
    whose sums have no order: all backends agree.

    Args:
        tokens, first_child, next_sibling, slots, out, backend: as in ``tree_verify_choices``. A
            token outside ``[0, V)`` has probability 0.
        target_probs: ``[B, N, V]`` float32, row i = after node i; V up to 2^22. Rows may be
            strided. Only rows on the accepted path are read.
        coins: ``[B, N]`` float32 in [0, 1); greater ones count as 1 - 2^-24, NaN as 0.
        final_coins: ``[B]`` float32, likewise.
        draft_probs: ``[B, N, V]`` float32, not written; None = zeros.
        threshold_single, threshold_acc: within [0, 1]; ``threshold_acc`` counts as at least 1e-9.

    Raises:
        ValueError: a shape, dtype, device, stride or threshold is not as above.
    """
    _check_tree(_COINS, tokens, first_child, next_sibling, slots, out)
    nodes, device = tuple(tokens.shape), tokens.device
    check_tensor(_COINS, "target_probs", target_probs, (*nodes, None), _FLOAT32, device)
    check_last_dim(_COINS, "target_probs", target_probs)
    if not 1 <= target_probs.shape[2] <= MAX_VOCAB:
        fail(_COINS, "target_probs", f"1 to {MAX_VOCAB} tokens", list(target_probs.shape))
    check_tensor(_COINS, "coins", coins, nodes, _FLOAT32, device)
    check_tensor(_COINS, "final_coins", final_coins, nodes[:1], _FLOAT32, device)
    if draft_probs is not None:
        check_tensor(_COINS, "draft_probs", draft_probs, target_probs.shape, _FLOAT32, device)
        check_last_dim(_COINS, "draft_probs", draft_probs)
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if not 0.0 <= value <= 1.0:
            fail(_COINS, name, "0 to 1", value)
    args = (
        tokens,
        first_child,
        next_sibling,
        slots,
        target_probs,
        draft_probs,
        coins,
        final_coins,
        float(threshold_single),
        float(threshold_acc),
        *out.tensors(),
    )
    run(_COINS, backend, device, args, tree_verify_coins_reference)
    return out
