"""Readable PyTorch for ``tree_build``: the oracle, and the fallback on every device."""

from __future__ import annotations

import enum
import math

import torch

from spec_kernels._library import register_reference
from spec_kernels.ops.common import fail


class TreeStatus(enum.IntFlag):
    """Bits of ``DraftTree.status``; 0 = sound. ``csrc/tree_build/tree_build.h`` has the twins."""

    # A parent slot below -1, or not below the candidate's own index.
    BAD_PARENT = 1
    # A parent that is absent from the pool, or that scored too low to be kept.
    MISSING_PARENT = 2
    # An id beyond the dtype of the tree's tokens, taken for absent. CUDA only: elsewhere an error.
    BAD_TOKEN = 4


def _build_one(scores, candidates, parent_slots, num_nodes):
    """Nodes of one request after the root, as rows (slot, parent node or -1), and its status."""
    present = [
        i
        for i, (s, c) in enumerate(zip(scores, candidates, strict=True))
        if c >= 0 and s > -math.inf
    ]  # a NaN compares false
    best = sorted(present, key=lambda i: (-scores[i], i))[: num_nodes - 1]
    node_of = {-1: 0}
    status = TreeStatus(0)
    nodes = []
    for node, slot in enumerate(sorted(best), start=1):
        parent = -1
        if not -1 <= parent_slots[slot] < slot:
            status |= TreeStatus.BAD_PARENT
        elif parent_slots[slot] not in node_of:
            status |= TreeStatus.MISSING_PARENT
        else:
            parent = node_of[parent_slots[slot]]
        node_of[slot] = node
        nodes.append((slot, parent))
    return nodes, status


def tree_build_reference(
    scores,
    candidates,
    parent_slots,
    root_tokens,
    tokens,
    parents,
    depths,
    ancestors,
    first_child,
    next_sibling,
    pool_index,
    status,
) -> None:
    num_nodes, num_words = ancestors.shape[1:]
    if tokens.dtype == torch.int32:
        for name, ids in (("candidates", candidates), ("root_tokens", root_tokens)):
            if bool((ids > torch.iinfo(torch.int32).max).any()):
                fail("tree_build", name, "ids that fit the int32 of tokens", int(ids.max()))
    for out, empty in (
        (tokens, 0),
        (parents, -1),
        (depths, 0),
        (ancestors, 0),
        (first_child, -1),
        (next_sibling, -1),
        (pool_index, -1),
        (status, 0),
    ):
        out.fill_(empty)
    inputs = (scores, candidates, parent_slots, root_tokens)
    pools = zip(*(t.tolist() for t in inputs), strict=True)
    for b, (request_scores, request_candidates, slots, root) in enumerate(pools):
        if root < 0:
            continue
        nodes, bits = _build_one(request_scores, request_candidates, slots, num_nodes)
        table = [(root, -1, 0, -1)]  # token, parent, depth, pool index
        visible = [1]
        first, following = [-1] * (len(nodes) + 1), [-1] * (len(nodes) + 1)
        last_child = {}
        for node, (slot, parent) in enumerate(nodes, start=1):
            above = max(parent, 0)  # an unlinked node still sees the root
            table.append((request_candidates[slot], parent, table[above][2] + 1, slot))
            visible.append(visible[above] | 1 << node)
            if parent < 0:
                continue
            if parent in last_child:
                following[last_child[parent]] = node
            else:
                first[parent] = node
            last_child[parent] = node
        columns = [*zip(*table, strict=True), first, following]
        outs = (tokens, parents, depths, pool_index, first_child, next_sibling)
        for out, column in zip(outs, columns, strict=True):
            out[b, : len(column)] = torch.tensor(column, device=out.device)
        packed = b"".join(v.to_bytes(4 * num_words, "little") for v in visible)
        words = torch.frombuffer(bytearray(packed), dtype=torch.int32)
        ancestors[b, : len(visible)] = words.view(-1, num_words).to(ancestors.device)
        status[b] = int(bits)


register_reference("tree_build", tree_build_reference)
