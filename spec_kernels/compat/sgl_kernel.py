"""The speculative ops of SGLang's ``sgl_kernel``: same names, argument orders, dtypes and mutation.

An engine switches by importing them from here. Each function is checks and a mapping onto our ops;
its docstring names the file in the repository sgl-project/sglang whose behaviour it has.
B requests, N nodes a tree, root included; tokens and links are int64, results int32, as there.

What differs, by intent:

- N up to 1024, packed masks included; a missing or malformed parent leaves its node out of the
  tree, and no input reads or writes beyond its own request.
- A token of probability zero is never accepted nor emitted (SGLang: since pull request 35798).
- ``draft_probs`` is read but not used as scratch: it is left as it was found.
- Bad arguments raise ``ArgumentError``, both a ``RuntimeError`` (SGLang's) and a ``ValueError``.

CPU and CUDA tensors. Faults that only values show (links, a row without any probability) raise or
warn on the CPU, after everything sound was written; CUDA values are read back for it only under
``SPEC_KERNELS_CHECK=1``.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import torch

from spec_kernels.ops import (
    DraftTree,
    FlatVerified,
    VerifyStatus,
    link_tree,
    tree_verify_choices,
    tree_verify_coins,
)
from spec_kernels.ops.common import asked_to_check, check_contiguous, check_tensor, fail
from spec_kernels.ops.tree_build import MAX_NODES

__all__ = [
    "ArgumentError",
    "build_tree_kernel_efficient",
    "build_tree_kernel_efficient_cpu",
    "reconstruct_indices_from_tree_mask",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
    "verify_tree_greedy_cpu",
]

_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
_FLOAT32 = (torch.float32,)
# A mask byte for byte; engines keep their preallocated masks as uint8.
_BOOLS = (torch.bool, torch.uint8)
_PACKED = (torch.uint8, torch.uint16, torch.uint32, torch.int16, torch.int32)
_SPELLINGS = {
    f"retrieve_{name}": f"retrive_{name}" for name in ("index", "next_token", "next_sibling")
}


class ArgumentError(RuntimeError, ValueError):
    """A bad argument: ``RuntimeError`` to callers of SGLang's ops, ``ValueError`` to ours."""


def _public(function):
    """Takes ``retrieve_*`` for ``retrive_*``, and raises what callers of the original expect."""

    @functools.wraps(function)
    def face(*args, **kwargs):
        for ours, theirs in _SPELLINGS.items():
            if ours in kwargs:
                if theirs in kwargs:
                    raise TypeError(f"{function.__name__}() got both {ours!r} and {theirs!r}")
                kwargs[theirs] = kwargs.pop(ours)
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise ArgumentError(str(error)) from None

    return face


def _readable(t: torch.Tensor) -> bool:
    """Whether values may be read on the host: for CUDA tensors that would wait for the device."""
    if torch.compiler.is_compiling():
        return False
    return t.device.type == "cpu" or (t.device.type == "cuda" and asked_to_check(t.device))


def _faulty(status: torch.Tensor) -> list[int]:
    """Requests whose status says that something was wrong, where that may be read."""
    return status.nonzero().flatten().tolist() if _readable(status) else []


def _check_links(op, nodes, device, retrive_index, retrive_next_token, retrive_next_sibling):
    for name, t in (
        ("retrive_index", retrive_index),
        ("retrive_next_token", retrive_next_token),
        ("retrive_next_sibling", retrive_next_sibling),
    ):
        check_tensor(op, name, t, nodes, _INT64, device)


def _check_flat(op, name, t, dtypes, device, at_least: int) -> None:
    """A contiguous tensor of any shape with room for ``at_least`` elements."""
    check_tensor(op, name, t, t.shape if isinstance(t, torch.Tensor) else (), dtypes, device)
    check_contiguous(op, name, t)
    if t.numel() < at_least:
        fail(op, name, f"at least {at_least} elements", t.numel())


def _check_tree_outputs(op, lens, num_nodes, positions, index, next_token, next_sibling) -> None:
    check_tensor(op, "verified_seq_len", lens, (None,), _INT64)
    if not 1 <= num_nodes <= MAX_NODES:
        fail(op, "draft_token_num", f"1 to {MAX_NODES}", num_nodes)
    batch, device = lens.shape[0], lens.device
    _check_links(op, (batch, num_nodes), device, index, next_token, next_sibling)
    check_contiguous(op, "retrive_next_token", next_token)
    check_contiguous(op, "retrive_next_sibling", next_sibling)
    _check_flat(op, "positions", positions, _INT64, device, batch * num_nodes)


def _link(parents, retrive_index, retrive_next_token, retrive_next_sibling) -> DraftTree:
    """The tree of these parents, its links written into the caller's tensors."""
    batch, num_nodes = parents.shape
    device = parents.device
    tree = dataclasses.replace(
        DraftTree.allocate(batch, num_nodes, device),
        first_child=retrive_next_token,
        next_sibling=retrive_next_sibling,
    )
    link_tree(
        torch.zeros((), dtype=torch.int64, device=device).expand(batch, num_nodes),
        parents,
        out=tree,
    )
    flat = torch.arange(batch * num_nodes, device=device)
    retrive_index.copy_(flat.view(batch, num_nodes))
    return tree


def _sees(tree: DraftTree) -> torch.Tensor:
    """``[B, N, N]`` bool: which nodes each node sees."""
    node = torch.arange(tree.num_nodes, device=tree.ancestors.device)
    words = tree.ancestors[:, :, node // 32]
    return words >> (node % 32).to(torch.int32) & 1 == 1


@_public
def build_tree_kernel_efficient(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Links the selected candidates of a draft pool into a tree, and writes its mask
    (sgl-kernel/csrc/speculative/eagle_utils.cu).

    The pool holds ``topk`` children of the root, then for each later step ``topk`` children of each
    of that step's ``topk`` parents. Pool slot s is a child of entry ``s // topk`` of
    ``parent_list``: entry 0 is the root, the others hold the parent's own pool slot.

    ``link_tree`` does the work: children are listed in ascending order. A parent that was not
    selected, or does not stand before its child (a selection that is not ascending), leaves the
    node out of the tree, with a warning: it sees the root and itself, at the root's position + 1.

    Args:
        parent_list: ``[B, topk * (depth - 1) + 1]`` int64; without columns where depth is 1.
        selected_index: ``[B, N - 1]`` int64 pool slots, ascending; node i is the (i - 1)-th.
        verified_seq_len: ``[B]`` int64 tokens before the tree's root.
        tree_mask: mutated; contiguous, any shape, at least as large as its mode wants.
            Mode 0: bool or uint8, for each request in turn ``[N, verified_seq_len + N]``; the
            prefix columns keep what they held. Mode 1: bool or uint8, ``[B, N, N]``.
            Mode 2: integers taken as bytes, little-endian, least significant bit = root: ``[B, N]``
            rows of 1 byte (N <= 8), 2 bytes (N <= 16) or ``ceil(N / 32)`` words of 4 bytes.
        positions: mutated; ``[B * N]`` int64, verified_seq_len + depth of the node.
        retrive_index: mutated; ``[B, N]`` int64, ``b * N + i``.
        retrive_next_token, retrive_next_sibling: mutated, whatever they held; contiguous ``[B, N]``
            int64: first child and next sibling, -1 = none.
        topk, depth: shape of the pool: candidates of a node, and draft steps.
        draft_token_num: N.
        tree_mask_mode: 0, 1 or 2.
    """
    op, num_nodes = "build_tree_kernel_efficient", draft_token_num
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    _check_tree_outputs(op, verified_seq_len, num_nodes, positions, *links)
    batch, device = verified_seq_len.shape[0], verified_seq_len.device
    if topk < 1 or depth < 1:
        fail(op, "topk, depth", "at least 1", (topk, depth))
    if depth == 1 and isinstance(parent_list, torch.Tensor) and parent_list.numel() == 0:
        parent_list = verified_seq_len[:, None]  # engines give none: entry 0 is never looked up
    entries = topk * (depth - 1) + 1
    check_tensor(op, "parent_list", parent_list, (batch, entries), _INT64, device)
    check_tensor(op, "selected_index", selected_index, (batch, num_nodes - 1), _INT64, device)
    write_mask = _mask_writer(op, tree_mask, tree_mask_mode, verified_seq_len, num_nodes)

    # One more entry stands for what points outside the list: a slot that is never selected.
    padded = torch.nn.functional.pad(parent_list, (0, 1), value=-1)
    entry = selected_index.div(topk, rounding_mode="floor")
    outside = (entry < 0) | (entry >= entries)
    parent_slot = padded.gather(1, torch.where(outside, entries, entry))
    ascending, order = selected_index.sort(dim=1, stable=True)
    place = torch.searchsorted(ascending, parent_slot).clamp_(max=max(num_nodes - 2, 0))
    selected = (ascending.gather(1, place) == parent_slot) & (parent_slot >= 0)
    parents = torch.where(selected, order.gather(1, place) + 1, -1)
    parents = torch.nn.functional.pad(torch.where(entry == 0, 0, parents), (1, 0), value=-1)

    tree = _link(parents, *links)
    own = positions.view(-1)[: batch * num_nodes].view(batch, num_nodes)
    own.copy_(verified_seq_len[:, None] + tree.depths)
    write_mask(tree)
    if faulty := _faulty(tree.status):
        warnings.warn(
            f"spec_kernels::{op}: requests {faulty}: nodes without their parent are left out",
            RuntimeWarning,
            stacklevel=3,
        )


def _mask_writer(op, tree_mask, mode, lens, num_nodes):
    """Checks the mask's dtype and size; returns what writes a tree into it."""
    batch, device = lens.shape[0], lens.device
    if mode == 0:
        room = tree_mask.numel() if isinstance(tree_mask, torch.Tensor) else 0
        known = lens.clamp(0, room)  # a longer prefix does not fit either, and could overflow
        cells = num_nodes * (known + num_nodes)
        least = batch * num_nodes**2
        if _readable(lens):
            if batch and int(lens.min()) < 0:
                fail(op, "verified_seq_len", "lengths >= 0", int(lens.min()))
            least = int(cells.sum())
        _check_flat(op, "tree_mask", tree_mask, _BOOLS, device, least)

        def write(tree):
            if batch == 0:
                return
            flat, sees = tree_mask.view(-1), _sees(tree).to(tree_mask.dtype)
            node = torch.arange(num_nodes, device=device)
            end = cells.cumsum(0)
            row = (end - cells + known)[:, None] + (known + num_nodes)[:, None] * node
            # Where lengths cannot be looked at, a request that does not fit writes cell 0 as it is
            # to be, which the first request alone may write too.
            fits = (lens >= 0) & (end <= room)
            first = torch.where(fits[0] & (lens[0] == 0), sees[0, 0, 0], flat[0])
            fits = fits[:, None, None]
            flat[torch.where(fits, row[:, :, None] + node, 0)] = torch.where(fits, sees, first)

    elif mode == 1:
        shape = (batch, num_nodes, num_nodes)
        _check_flat(op, "tree_mask", tree_mask, _BOOLS, device, batch * num_nodes**2)

        def write(tree):
            tree_mask.view(-1)[: batch * num_nodes**2].view(shape).copy_(_sees(tree))

    elif mode == 2:
        width = 1 if num_nodes <= 8 else 2 if num_nodes <= 16 else 4 * ((num_nodes + 31) // 32)
        _check_flat(op, "tree_mask", tree_mask, _PACKED, device, 0)
        size = batch * num_nodes * width
        held = tree_mask.numel() * tree_mask.element_size()
        if held < size:
            fail(op, "tree_mask", f"at least {size} bytes", held)

        def write(tree):
            rows = tree_mask.view(-1).view(torch.uint8)[:size].view(batch, num_nodes, width)
            rows.copy_(tree.ancestors.view(torch.uint8)[..., :width])

    else:
        fail(op, "tree_mask_mode", "0, 1 or 2", mode)
    return write


build_tree_kernel_efficient_cpu = build_tree_kernel_efficient


@_public
def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees that are given by their masks, as an n-gram drafter gives them
    (sgl-kernel/csrc/speculative/ngram_utils.cu).

    A node's parent is the last node before it that it sees; its position counts all that it sees
    before it. In a tree's mask each row is its parent's row and the node itself.

    Args:
        tree_mask: ``[B * N * N]`` bool or uint8, contiguous, any shape; cells above the diagonal
            are not read.
        verified_seq_len: ``[B]`` int64.
        positions, retrive_index, retrive_next_token, retrive_next_sibling: mutated, as in
            ``build_tree_kernel_efficient``. A node that sees nothing before it has no parent.
        batch_size, draft_token_num: B, N.
    """
    op, num_nodes = "reconstruct_indices_from_tree_mask", draft_token_num
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    _check_tree_outputs(op, verified_seq_len, num_nodes, positions, *links)
    batch, device = verified_seq_len.shape[0], verified_seq_len.device
    if batch_size != batch:
        fail(op, "batch_size", f"{batch}, as verified_seq_len has", batch_size)
    cells = batch * num_nodes**2
    _check_flat(op, "tree_mask", tree_mask, _BOOLS, device, cells)

    sees = tree_mask.view(-1)[:cells].view(batch, num_nodes, num_nodes).bool().tril(-1)
    node = torch.arange(num_nodes, device=device)
    _link(torch.where(sees, node, -1).amax(-1), *links)
    own = positions.view(-1)[: batch * num_nodes].view(batch, num_nodes)
    own.copy_(verified_seq_len[:, None] + sees.sum(-1))


def _check_verify(op, predicts, accept_index, accept_token_num, candidates, *links) -> FlatVerified:
    check_tensor(op, "candidates", candidates, (None, None), _INT64)
    nodes, device = candidates.shape, candidates.device
    check_tensor(op, "predicts", predicts, (None,), _INT32, device)
    check_tensor(op, "accept_index", accept_index, (nodes[0], None), _INT32, device)
    check_tensor(op, "accept_token_num", accept_token_num, nodes[:1], _INT32, device)
    _check_links(op, nodes, device, *links)
    status = torch.empty(nodes[:1], dtype=torch.int32, device=device)
    return FlatVerified(predicts, accept_index, accept_token_num, status)


def _check_status(op, status) -> None:
    if faulty := _faulty(status):
        bits = [" ".join(v.name for v in VerifyStatus if int(status[b]) & v) for b in faulty]
        fail(op, f"requests {faulty}", "sound trees, and a token to choose in every row", bits)


@_public
def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walks each tree along the target's predictions (sgl-kernel/csrc/speculative/eagle_utils.cu).

    ``tree_verify_choices`` with ``retrive_index`` for slots. Elements that the walk does not reach
    keep what they held.

    Args:
        predicts: mutated; ``[M]`` int32. At the flat index of each node on the accepted path, the
            token after it: that of the next accepted node, at last the bonus token.
        accept_index: mutated; ``[B, D + 1]`` int32 flat indices of the accepted path, the root
            first. The walk stops after D drafts.
        accept_token_num: mutated; ``[B]`` int32 drafts accepted (the bonus token is not counted).
        candidates: ``[B, N]`` int64 draft tokens; the root's is not read.
        retrive_index: ``[B, N]`` int64 flat indices below M, and below B * N.
        retrive_next_token, retrive_next_sibling: ``[B, N]`` int64, first child and next sibling.
        target_predict: ``[B, N]`` int64, the target's token after each node, by flat index.
    """
    op = "verify_tree_greedy"
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    out = _check_verify(op, predicts, accept_index, accept_token_num, candidates, *links)
    check_tensor(op, "target_predict", target_predict, candidates.shape, _INT64, candidates.device)
    choices = target_predict.reshape(-1)
    num_slots = min(predicts.shape[0], choices.shape[0])
    out.predictions = predicts[:num_slots]
    index, *rest = links
    tree_verify_choices(candidates, *rest, index, choices[:num_slots], out)
    _check_status(op, out.status)


verify_tree_greedy_cpu = verify_tree_greedy


@_public
def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Samples along each tree from the target's probabilities
    (sgl-kernel/csrc/speculative/speculative_sampling.cuh).

    ``tree_verify_coins`` with ``retrive_index`` for slots, whose docstring has the rule: the coin
    of a node decides among its children, by strict comparison with the sum of their probabilities;
    the final coin draws the last token from ``max(target_probs - draft_probs, 0)`` without the
    rejected children, or from ``target_probs`` alone where the path is full. Lossless with both
    thresholds 1, ``draft_probs`` zero and distinct children.

    Args:
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
            retrive_next_sibling: as in ``verify_tree_greedy``; the first three are mutated.
        uniform_samples: ``[B, N]`` float32 coins in [0, 1).
        uniform_samples_for_final_sampling: ``[B]`` float32 coins in [0, 1).
        target_probs: ``[B, N, V]`` float32, row i = after node i, each summing to 1.
        draft_probs: ``[B, N, V]`` float32; callers give zeros. Not mutated.
        threshold_single: accepts any draft of at least this probability; within [0, 1].
        threshold_acc: divides the sum of probabilities; within [0, 1], at least 1e-9.
        deterministic: every call is.
    """
    op = "tree_speculative_sampling_target_only"
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    out = _check_verify(op, predicts, accept_index, accept_token_num, candidates, *links)
    nodes, device = candidates.shape, candidates.device
    final = uniform_samples_for_final_sampling
    check_tensor(op, "uniform_samples", uniform_samples, nodes, _FLOAT32, device)
    check_tensor(op, "uniform_samples_for_final_sampling", final, nodes[:1], _FLOAT32, device)
    check_tensor(op, "target_probs", target_probs, (*nodes, None), _FLOAT32, device)
    check_tensor(op, "draft_probs", draft_probs, target_probs.shape, _FLOAT32, device)
    index, *rest = links
    tree_verify_coins(
        candidates,
        *rest,
        index,
        target_probs,
        uniform_samples,
        final,
        out,
        draft_probs=draft_probs,
        threshold_single=threshold_single,
        threshold_acc=threshold_acc,
    )
    _check_status(op, out.status)


def _limits(op, name, limit, probs, dtype) -> torch.Tensor:
    """One limit for each row, ``[R, 1]``, of a number or of a tensor ``[R]``."""
    check_tensor(op, "probs", probs, (None, None), (torch.float32, torch.bfloat16, torch.float16))
    if probs.shape[1] < 1:
        fail(op, "probs", "at least one column", list(probs.shape))
    if not isinstance(limit, torch.Tensor):
        whole = isinstance(limit, int | torch.SymInt) and not isinstance(limit, bool)
        if whole and not -(1 << 63) <= limit < 1 << 63:
            fail(op, name, "a number of 64 bits", limit)
        if dtype == torch.int64 and not whole:
            fail(op, name, "a whole number or a tensor of them", limit)
        if not whole and not (isinstance(limit, float | torch.SymFloat) and limit == limit):
            fail(op, name, "a number or a tensor of them", limit)
        return torch.full((probs.shape[0], 1), limit, dtype=dtype, device=probs.device)
    kinds = {torch.int64: (torch.int32, torch.int64), torch.float32: (torch.float32,)}[dtype]
    check_tensor(op, name, limit, probs.shape[:1], kinds, probs.device)
    return limit.to(dtype)[:, None]


def _renormalised(kept: torch.Tensor) -> torch.Tensor:
    """Rows that sum to 1; a row of zeros stays zero. Sums in float64 do not depend on their order
    to the last bit of float32."""
    return (kept.double() / kept.double().sum(-1, keepdim=True).clamp(min=1e-8)).float()


@_public
def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """The ``top_k`` greatest of each row, renormalised; the others 0
    (sgl-kernel/python/sgl_kernel/sampling.py; the kernel is FlashInfer's).

    All that equal the k-th are kept, as there. A row whose k is at least V is returned as it is.

    Args:
        probs: ``[R, V]`` float32, bfloat16 or float16.
        top_k: a number, or ``[R]`` int32 or int64; at least 1.

    Returns:
        ``[R, V]`` float32.
    """
    op = "top_k_renorm_prob"
    k = _limits(op, "top_k", top_k, probs, torch.int64)
    vocab = probs.shape[1]
    most = vocab
    if _readable(k) and k.numel():
        if int(k.min()) < 1:
            fail(op, "top_k", "at least 1", int(k.min()))
        most = min(int(k.max()), vocab)
    probs = probs.float()
    least = probs.topk(most).values.gather(1, k.clamp(1, most) - 1)
    kept = torch.where(probs >= least, probs, 0.0)
    return torch.where(k < vocab, _renormalised(kept), probs)


top_k_renorm_probs = top_k_renorm_prob


@_public
def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """The smallest best-first set of each row whose mass reaches ``top_p``, renormalised; the
    others 0 (sgl-kernel/python/sgl_kernel/sampling.py; the kernel is FlashInfer's).

    All that equal the last one kept are kept, as there. The row's mass is what it sums to: where
    it stays below ``top_p``, or that is 1 or more, everything is kept.

    Args:
        probs: ``[R, V]`` float32, bfloat16 or float16.
        top_p: a number, or ``[R]`` float32.

    Returns:
        ``[R, V]`` float32.
    """
    op = "top_p_renorm_prob"
    p = _limits(op, "top_p", top_p, probs, torch.float32)
    probs = probs.float()
    best_first = probs.sort(-1, descending=True).values
    short = best_first.double().cumsum(-1) < p.double()
    num_kept = short.sum(-1, keepdim=True) + 1  # up to the one by which top_p is reached
    least = best_first.gather(1, num_kept.clamp(max=probs.shape[1]) - 1)
    everything = (p >= 1.0) | (num_kept > probs.shape[1])
    return _renormalised(torch.where(everything | (probs >= least), probs, 0.0))


top_p_renorm_probs = top_p_renorm_prob
