"""Draft trees: the best N nodes of a candidate pool, and trees whose shape is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from spec_kernels.ops.common import INTEGERS, check_contiguous, check_tensor, fail, run
from spec_kernels.ops.tree_build.reference import tree_build_reference

_OP = "tree_build"

MAX_NODES = 1024


def num_words(num_nodes: int) -> int:
    """32-bit words that hold one visibility bit for each of ``num_nodes`` nodes."""
    return (num_nodes + 31) // 32


@dataclass
class DraftTree:
    """A batch of draft trees of one static size; node 0 is the root, the last verified token.

    Parents precede their children, and children of one parent are listed in ascending order. A node
    is *present* iff its own bit in ``ancestors`` is set; an absent node has token 0, depth 0, no
    bits, and -1 everywhere else.

    Attributes:
        tokens: ``[B, N]`` int64.
        parents: ``[B, N]`` parent node; -1 = root, unlinked or absent.
        depths: ``[B, N]`` edges up to the root (1 for an unlinked node).
        ancestors: ``[B, N, ceil(N / 32)]`` int32 words, least significant bit = node 0: what a node
            sees, itself included.
        first_child, next_sibling: ``[B, N]`` links of the walk; -1 = none.
        pool_index: ``[B, N]`` where in the pool the node came from; -1 = root or absent.
        status: ``[B]`` bits of ``TreeStatus``; 0 = sound.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor
    pool_index: torch.Tensor
    status: torch.Tensor

    @classmethod
    def allocate(
        cls,
        batch: int,
        num_nodes: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.int32,
    ) -> DraftTree:
        """Uninitialised storage for ``tree_build(..., out=)``; ``dtype`` is that of the links."""
        if not 1 <= num_nodes <= MAX_NODES:
            fail(_OP, "num_nodes", f"1 <= num_nodes <= {MAX_NODES}", num_nodes)
        nodes = (batch, num_nodes)
        return cls(
            tokens=torch.empty(nodes, dtype=torch.int64, device=device),
            parents=torch.empty(nodes, dtype=dtype, device=device),
            depths=torch.empty(nodes, dtype=dtype, device=device),
            ancestors=torch.empty(
                (batch, num_nodes, num_words(num_nodes)), dtype=torch.int32, device=device
            ),
            first_child=torch.empty(nodes, dtype=dtype, device=device),
            next_sibling=torch.empty(nodes, dtype=dtype, device=device),
            pool_index=torch.empty(nodes, dtype=dtype, device=device),
            status=torch.empty((batch,), dtype=torch.int32, device=device),
        )

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of the op's out-arguments."""
        return (
            self.tokens,
            self.parents,
            self.depths,
            self.ancestors,
            self.first_child,
            self.next_sibling,
            self.pool_index,
            self.status,
        )

    def present(self) -> torch.Tensor:
        """``[B, N]`` bool: which nodes are there."""
        node = torch.arange(self.num_nodes, device=self.tokens.device)
        own = self.ancestors[:, node, node // 32]
        return (own >> (node % 32).to(torch.int32)) & 1 == 1


def tree_build(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    parent_slots: torch.Tensor,
    root_tokens: torch.Tensor,
    num_nodes: int | None = None,
    *,
    out: DraftTree | None = None,
    backend: str | None = None,
) -> DraftTree:
    """Keeps the best ``N - 1`` candidates of each request's pool and links them under the root.

    The rerank of EAGLE-2 (arXiv 2406.16858): highest score first, ties to the lower pool index. The
    kept candidates are laid out in ascending pool index, so a pool written level by level gives
    parents before children. When fewer are present than fit, the last nodes are absent.

    A malformed parent (slot below -1 or not below the candidate's own) or a missing one (absent, or
    not kept: possible only when a child outscores its parent) leaves the node unlinked: in no child
    list, ``parents`` -1, and only the root and itself visible; ``status`` says so. Its own children
    stay linked to it, out of reach of the walk. Nothing of other requests changes.

    Args:
        scores: ``[B, P]`` float32 cumulative log-probabilities; -inf or NaN = absent.
        candidates: ``[B, P]`` token ids; negative = absent.
        parent_slots: ``[B, P]`` pool index of each candidate's parent, -1 = the root.
        root_tokens: ``[B]``; negative = padded request, all of whose nodes come out absent.
        num_nodes: N, root included, ``1 <= N <= 1024``; needed when ``out`` is None.
        out: a tree to write into (contiguous tensors); every element of it is overwritten.
        backend: see ``spec_kernels.ops.common.BACKENDS``.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or (on CPU) an id does not fit
            the dtype of ``out.tokens``; on CUDA such a candidate (or, for a root, the request) is
            absent and ``status`` says so.
    """
    check_tensor(_OP, "scores", scores, (None, None), (torch.float32,))
    pool = scores.shape
    device = scores.device
    check_tensor(_OP, "candidates", candidates, pool, INTEGERS, device)
    check_tensor(_OP, "parent_slots", parent_slots, pool, INTEGERS, device)
    check_tensor(_OP, "root_tokens", root_tokens, pool[:1], INTEGERS, device)
    batch = pool[0]
    if out is None:
        if num_nodes is None:
            fail(_OP, "num_nodes", "a number of nodes, or out", None)
        out = DraftTree.allocate(batch, num_nodes, device)
    else:
        if num_nodes is None:
            num_nodes = out.tokens.shape[-1] if out.tokens.dim() else 0
        if not 1 <= num_nodes <= MAX_NODES:
            fail(_OP, "num_nodes", f"1 <= num_nodes <= {MAX_NODES}", num_nodes)
        nodes = (batch, num_nodes)
        for name in ("tokens", "parents", "depths", "first_child", "next_sibling", "pool_index"):
            _check_out(f"out.{name}", getattr(out, name), nodes, INTEGERS, device)
        words = (batch, num_nodes, num_words(num_nodes))
        _check_out("out.ancestors", out.ancestors, words, (torch.int32,), device)
        _check_out("out.status", out.status, (batch,), INTEGERS, device)
    args = (scores, candidates, parent_slots, root_tokens, *out.tensors())
    run(_OP, backend, device, args, tree_build_reference)
    return out


def _check_out(name, t, shape, dtypes, device) -> None:
    check_tensor(_OP, name, t, shape, dtypes, device)
    check_contiguous(_OP, name, t)


def link_tree(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    *,
    out: DraftTree | None = None,
    backend: str | None = None,
) -> DraftTree:
    """A tree of given shape: ``tree_build`` on a pool that is kept whole.

    Args:
        tokens: ``[B, N]``; column 0 is the root (negative = padded request). A negative token
            further on is an absent node; the nodes after it move up, and ``pool_index`` is their
            old place less one.
        parents: ``[B, N]`` or ``[N]``; ``parents[..., i]`` in ``[0, i)``, column 0 is not read.
            Anything else is a malformed parent, treated as in ``tree_build``.
        out, backend: as in ``tree_build``.
    """
    check_tensor(_OP, "tokens", tokens, (None, None), INTEGERS)
    batch, num_nodes = tokens.shape
    if not 1 <= num_nodes <= MAX_NODES:
        fail(_OP, "tokens", f"1 to {MAX_NODES} nodes", num_nodes)
    shape = (
        (num_nodes,) if isinstance(parents, torch.Tensor) and parents.dim() == 1 else tokens.shape
    )
    check_tensor(_OP, "parents", parents, shape, INTEGERS, tokens.device)
    scores = torch.zeros((), dtype=torch.float32, device=tokens.device).expand(batch, num_nodes - 1)
    slots = (parents[..., 1:] - 1).expand(batch, num_nodes - 1)
    return tree_build(
        scores, tokens[:, 1:], slots, tokens[:, 0], num_nodes, out=out, backend=backend
    )


def chain_tree(
    tokens: torch.Tensor, *, out: DraftTree | None = None, backend: str | None = None
) -> DraftTree:
    """The tree without branches: node i follows node i - 1. ``tokens [B, N]`` as in ``link_tree``.

    Also the shape of a prefill chunk; a short chunk is padded at its end with -1.
    """
    check_tensor(_OP, "tokens", tokens, (None, None), INTEGERS)
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
    return link_tree(tokens, parents, out=out, backend=backend)


def tree_from_paths(paths: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The nodes of a static tree given as paths of child ranks (Medusa, arXiv 2401.10774; EAGLE).

    ``(1, 0)`` is the best child of the root's second-best child; the root is implied. Returns
    ``parents`` (root first, -1, then level by level and by rank, as ``link_tree`` wants them) and
    ``ranks``: which of its parent's candidates, best first, a node takes (0 for the root).

    Raises:
        ValueError: an empty, repeated or negative path, one whose parent is not listed, or too
            many.
    """
    ordered = sorted((tuple(p) for p in paths), key=lambda p: (len(p), p))
    if len(ordered) >= MAX_NODES:
        fail(_OP, "paths", f"fewer than {MAX_NODES} paths", len(ordered))
    node_of = {(): 0}
    parents, ranks = [-1], [0]
    for path in ordered:
        if not path or path in node_of or path[-1] < 0 or path[:-1] not in node_of:
            fail(_OP, "paths", "distinct paths of ranks >= 0, each with its parent", path)
        parents.append(node_of[path[:-1]])
        ranks.append(path[-1])
        node_of[path] = len(node_of)
    return parents, ranks
