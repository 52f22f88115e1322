"""What the drafter proposes: a chain, a tree of fixed shape, or the best part of a growing tree.

All keep the drafter's K/V of drafted rows at logical positions past the committed ones, one slot a
row, and each row attends its own ancestors' slots (words as in ``tree_attention``), never whatever
stands before it. Shapes are static; the tokens are all that depends on data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spec_kernels.decode.sampling import integers
from spec_kernels.decode.state import BatchState
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.layers import Step
from spec_kernels.ops.tree_build import (
    DraftTree,
    link_tree,
    num_words,
    tree_build,
    tree_from_paths,
)

_ops = torch.ops.spec_kernels

KINDS = ("chain", "static", "dynamic")
MAX_STEPS = 64
# Words of a row of the drafter's attention: 32 * 32 slots.
_MAX_DRAFT_ROWS = 1024


def _own_bits(first_slot: int, count: int, words: int) -> Tensor:
    """``[1, count, words]`` int32: row j has the one bit of slot ``first_slot + j``."""
    bits = torch.zeros(count, words, dtype=torch.int64, device="cpu")
    slots = torch.arange(first_slot, first_slot + count, device="cpu")
    bits[slots - first_slot, slots // 32] = 1 << (slots % 32)
    # int32 words are bit patterns: bit 31 is the sign.
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).unsqueeze(0)


class _Rows:
    """Where all drafted rows of a cycle stand, level by level."""

    def __init__(self, drafter: Drafter, state: BatchState, level_sizes: list[int]):
        self.drafter, self.cache, self.level_sizes = drafter, state.cache, level_sizes
        device, batch = drafter.device, len(state.limits)
        self.num_rows = sum(level_sizes)
        slots = torch.arange(self.num_rows, device=device).expand(batch, -1)
        self.slots = slots.split(level_sizes, 1) if level_sizes else ()
        depth = [d for d, size in enumerate(level_sizes) for _ in range(size)]
        self.depth_ids = torch.tensor(depth, dtype=torch.int64, device=device)

    def split(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(positions, slots, rotations) of every level, ``[B, size of the level, ...]``."""
        if not self.level_sizes:
            return []
        positions = self.cache.context_lens.unsqueeze(1) + self.depth_ids
        rotations = self.drafter.rotary.rotation(positions)
        parts = (t.split(self.level_sizes, 1) for t in (positions, rotations))
        return [(p, s, r) for (p, r), s in zip(zip(*parts, strict=True), self.slots, strict=True)]


class StaticDraft:
    """A tree whose shape is known beforehand: node i takes candidate ``ranks[i]`` of its parent.

    Args:
        parents: parent of each node, -1 for node 0; level by level, as ``tree_from_paths`` gives.
        ranks: which of its parent's candidates, best first, a node takes.
        draws: whether the candidates of requests that sample are drawn from the drafter's
            distribution q at their temperature, one after the other without replacement, instead
            of being its likeliest; ``tree_verify`` is then to be told q. Siblings must be the
            first draws, in order: a choice among draws would be no draw from q.
    """

    def __init__(
        self,
        drafter: Drafter | AbsentDrafter,
        state: BatchState,
        parents: list[int],
        ranks: list[int],
        draws: bool = False,
    ):
        self.drafter, self.state = drafter, state
        device, batch = drafter.device, len(state.limits)
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
        if depths != sorted(depths):
            raise ValueError("drafting: parents: expected the nodes level by level")
        if draws:
            _check_first_draws(parents, ranks)
        self.num_nodes, self.max_depth = len(parents), max(depths)
        levels = [[n for n, d in enumerate(depths) if d == k] for k in range(self.max_depth + 1)]
        has_child = set(parents)
        live = [[n for n in level if n in has_child] for level in levels]
        self._make_tree(batch, parents, device, draws)
        self.levels = []
        if not drafter.is_here:
            return
        # live[0] is the root, whose row was run when the cycle before extended the drafter.
        self.rows = _Rows(drafter, state, [len(level) for level in live[1 : self.max_depth]])
        words = max(1, num_words(self.rows.num_rows))
        seen = {0: torch.zeros(words, dtype=torch.int32, device="cpu")}
        slot = 0
        for depth in range(1, self.max_depth + 1):
            above, nodes = live[depth - 1], levels[depth]
            below = live[depth] if depth < self.max_depth else []
            bits = _own_bits(slot, len(below), words)[0]
            for row, node in enumerate(below):
                seen[node] = seen[parents[node]] | bits[row]
            slot += len(below)
            visible = torch.stack([seen[n] for n in below]) if below else None
            self.levels.append(self._level(depth, above, nodes, below, parents, ranks, visible))

    def _make_tree(self, batch: int, parents: list[int], device, draws: bool) -> None:
        """One block, so that it is sent as one message: tokens, confidences, then q."""
        size, vocab = batch * self.num_nodes, self.state.vocab_size
        num_floats = size + (size * vocab if draws else 0)
        block = torch.zeros(size + (num_floats + 1) // 2, dtype=torch.int64, device=device)
        self.message = block
        shape = (batch, self.num_nodes)
        tree = DraftTree.allocate(batch, self.num_nodes, device)
        tree.tokens = block[:size].view(shape)
        parents = torch.tensor(parents, dtype=torch.int64, device=device)
        self.tree = link_tree(torch.zeros_like(tree.tokens), parents, out=tree)
        self.root = self.tree.tokens[:, 0]
        floats = block[size:].view(torch.float32)[:num_floats]
        self.confidence = floats[:size].view(shape)
        self.confidence[:, 0] = 1.0
        self.draft_probs = floats[size:].view(*shape, vocab) if draws else None

    def _level(self, depth, above, nodes, below, parents, ranks, visible) -> _Level:
        device, batch = self.drafter.device, len(self.state.limits)
        row_of = {node: row for row, node in enumerate(above)}
        width = 1 + max(ranks[n] for n in nodes)
        picks = [row_of[parents[n]] * width + ranks[n] for n in nodes]
        shape, span = (len(above), width), slice(nodes[0], nodes[-1] + 1)
        node_tokens, node_confidence = self.tree.tokens[:, span], self.confidence[:, span]
        if picks == list(range(len(above) * width)):
            # The candidates are the nodes: they are written where they stand.
            picks = None
            tokens, confidence = (t.unflatten(1, shape) for t in (node_tokens, node_confidence))
        else:
            picks = torch.tensor(picks, device=device)
            tokens = torch.zeros(batch, *shape, dtype=torch.int64, device=device)
            confidence = torch.zeros(batch, *shape, dtype=torch.float32, device=device)
        probs, probs_rows = None, None
        if self.draft_probs is not None:
            probs, probs_rows = _rows_of(self.draft_probs, above)
        return _Level(
            depth=depth,
            num_live=len(above),
            tokens=tokens,
            confidence=confidence,
            probs=probs,
            probs_rows=probs_rows,
            picks=picks,
            node_tokens=node_tokens,
            node_confidence=node_confidence,
            live=_unless_identity([nodes.index(n) for n in below], len(nodes), device),
            parent_rows=_unless_identity(
                [b * len(above) + row_of[parents[n]] for b in range(batch) for n in below],
                batch * len(above),
                device,
            ),
            ancestors=(
                None if visible is None else visible.to(device).expand(batch, -1, -1).contiguous()
            ),
        )

    def draft(self) -> None:
        """Runs the drafter down the levels and writes the drafts' tokens; uses up the start."""
        drafter, cache, start = self.drafter, self.state.cache, self.state.start
        batch = start.root_tokens.shape[0]
        logits, feature = start.logits, start.features
        rows = self.rows.split()
        for level in self.levels:
            self._choose(level, logits.view(batch, level.num_live, -1))
            if level.ancestors is None:
                return
            tokens = level.node_tokens
            if level.live is not None:
                tokens = tokens.index_select(1, level.live)
            if level.parent_rows is not None:
                feature = feature.index_select(0, level.parent_rows)
            positions, slots, rotation = rows[level.depth - 1]
            step = Step(
                tokens,
                positions,
                level.ancestors,
                slots,
                cache.block_tables,
                cache.context_lens,
                rotation,
            )
            feature, normed = drafter.forward(step, feature, cache.draft)
            logits = drafter.logits(normed)

    def _choose(self, level: _Level, logits: Tensor) -> None:
        sampling = self.state.sampling
        _ops.draft_sample.default(
            logits,
            self.drafter.target_ids,
            self.state.cache.context_lens,
            level.depth,
            sampling.temperature,
            sampling.seeds,
            level.tokens,
            level.confidence,
            level.probs,
        )
        if level.probs_rows is not None:
            self.draft_probs.index_copy_(1, level.probs_rows, level.probs)
        if level.picks is not None:
            level.node_tokens.copy_(level.tokens.flatten(1).index_select(1, level.picks))
            chosen = level.confidence.flatten(1).index_select(1, level.picks)
            level.node_confidence.copy_(chosen)

    def build(self, confidence: Tensor) -> DraftTree:
        """The tree to verify, whose links never change.

        ``confidence [B, N]`` receives how sure the drafter was of each node given its parent.
        """
        self.root.copy_(self.state.start.root_tokens)
        confidence.copy_(self.confidence)
        return self.tree


@dataclasses.dataclass
class _Level:
    """One level of a static tree; index tensors are None where they would change nothing.

    Of ``tokens`` and ``confidence [B, live rows above, candidates]``, and ``probs [B, live rows
    above, V]``, ``picks`` chooses the level's nodes, whose part of the tree is ``node_tokens`` and
    ``node_confidence [B, nodes]``; ``probs_rows`` are the rows of all q to which ``probs`` is
    copied, where it is no view of them; ``live`` chooses those that have children among the nodes;
    ``parent_rows`` are the live nodes' parents among the batch's rows above.
    """

    depth: int
    num_live: int
    tokens: Tensor
    confidence: Tensor
    probs: Tensor | None
    probs_rows: Tensor | None
    picks: Tensor | None
    node_tokens: Tensor
    node_confidence: Tensor
    live: Tensor | None
    parent_rows: Tensor | None
    ancestors: Tensor | None


def _rows_of(probs: Tensor, nodes: list[int]) -> tuple[Tensor, Tensor | None]:
    """Rows ``nodes`` of ``probs [B, N, V]`` as a view or, where they are unevenly spaced, as a
    tensor of its own and where its rows are to be copied."""
    gaps = {b - a for a, b in zip(nodes, nodes[1:], strict=False)} or {1}
    if len(gaps) == 1:
        return probs[:, nodes[0] : nodes[-1] + 1 : gaps.pop()], None
    own = torch.zeros_like(probs[:, : len(nodes)])
    return own, torch.tensor(nodes, device=probs.device)


def _check_first_draws(parents: list[int], ranks: list[int]) -> None:
    num_children = [0] * len(parents)
    for parent, rank in list(zip(parents, ranks, strict=True))[1:]:
        if rank != num_children[parent]:
            raise ValueError(
                "drafting: ranks: expected the children of each node to be its first draws, in "
                f"order, got rank {rank} after {num_children[parent]} children"
            )
        num_children[parent] += 1


def _unless_identity(index: list[int], size: int, device) -> Tensor | None:
    if index == list(range(size)):
        return None
    return torch.tensor(index, dtype=torch.int64, device=device)


class DynamicDraft:
    """EAGLE-2 (arXiv 2406.16858): k live nodes a level, k children each, the best N - 1 kept.

    Scores are cumulative log-probabilities in float32; of a level's k * k candidates the best k
    stay live, ties to the lower index; ``tree_build`` then keeps the best of the whole pool.

    Args:
        best_first: whether nodes come by score, so that the first of them are the best tree of so
            many, instead of level by level.
    """

    # The rerank chooses drafts by their scores, so they are no draws from q.
    draft_probs = None

    def __init__(
        self,
        drafter: Drafter | AbsentDrafter,
        state: BatchState,
        steps: int,
        topk: int,
        num_nodes: int,
        best_first: bool = False,
    ):
        self.drafter, self.state, self.topk = drafter, state, topk
        self.num_nodes, self.max_depth = num_nodes, min(steps, num_nodes - 1)
        device, batch = drafter.device, len(state.limits)
        self.num_live_levels = steps - 1
        # One block, so that it is sent as one message.
        pool = pool_size(steps, topk)
        self.message = torch.zeros(3, batch, pool, dtype=torch.int64, device=device)
        self.candidates, self.parent_slots = self.message[0], self.message[1].fill_(-1)
        scores = self.message[2].view(torch.float32)
        self.scores = scores.view(-1)[: batch * pool].view(batch, pool)
        self.tree = DraftTree.allocate(batch, num_nodes, device)
        self.slot_ids = None
        if best_first:
            self.slot_ids = torch.arange(pool, device=device).expand(batch, -1)
        if not drafter.is_here:
            return
        self.rows = _Rows(drafter, state, [topk] * self.num_live_levels)
        words = max(1, num_words(self.rows.num_rows))
        self.own_bits = [
            _own_bits(level * topk, topk, words).to(device) for level in range(self.num_live_levels)
        ]
        self.first_live = torch.arange(topk, device=device).expand(batch, -1)
        self.row_base = torch.arange(batch, device=device).unsqueeze(1) * topk

    def draft(self) -> None:
        """Fills the pool, level by level."""
        drafter, cache, start, k = self.drafter, self.state.cache, self.state.start, self.topk
        batch = start.root_tokens.shape[0]
        scores, tokens = self._best(start.logits, 1)
        self._put(0, scores, tokens, None)
        feature = start.features.repeat_interleave(k, 0)
        live, ancestors = (
            self.first_live,
            self.own_bits[0].expand(batch, -1, -1) if self.own_bits else None,
        )
        rows = self.rows.split()
        for level in range(self.num_live_levels):
            positions, slots, rotation = rows[level]
            step = Step(
                tokens.contiguous(),
                positions,
                ancestors.contiguous(),
                slots,
                cache.block_tables,
                cache.context_lens,
                rotation,
            )
            feature, normed = drafter.forward(step, feature, cache.draft)
            gains, children = self._best(drafter.logits(normed), k)
            total = (gains.view(batch, k, k) + scores.unsqueeze(2)).view(batch, k * k)
            base = k + level * k * k
            self._put(base, total, children, live.repeat_interleave(k, 1))
            if level + 1 == self.num_live_levels:
                return
            ranked, order = total.sort(dim=1, descending=True, stable=True)
            scores, order = ranked[:, :k], order[:, :k]
            tokens, live = children.gather(1, order), base + order
            parent = order // k
            feature = feature.index_select(0, (self.row_base + parent).view(-1))
            above = ancestors.gather(1, parent.unsqueeze(2).expand(-1, -1, ancestors.shape[2]))
            ancestors = above | self.own_bits[level + 1]

    def _best(self, logits: Tensor, num_live: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids ``[B, num_live * k]`` of the k best successors of each
        live row, whose ``logits [B * num_live, Vd]`` are given."""
        shape = (len(self.state.limits), num_live, self.topk)
        tokens = logits.new_empty(shape, dtype=torch.int64)
        confidence = logits.new_empty(shape, dtype=torch.float32)
        _ops.draft_sample.default(
            logits.view(*shape[:2], -1),
            self.drafter.target_ids,
            self.state.cache.context_lens,
            1,
            None,
            None,
            tokens,
            confidence,
            None,
        )
        return confidence.flatten(1).log(), tokens.flatten(1)

    def _put(self, base: int, scores: Tensor, tokens: Tensor, parents: Tensor | None) -> None:
        columns = slice(base, base + scores.shape[1])
        self.scores[:, columns] = scores
        self.candidates[:, columns] = tokens
        if parents is not None:
            self.parent_slots[:, columns] = parents

    def build(self, confidence: Tensor) -> DraftTree:
        """The best N - 1 candidates of the pool, linked under the root.

        ``confidence [B, N]`` receives how sure the drafter was of each node and its ancestors.
        """
        root, tree = self.state.start.root_tokens, self.tree
        scores, candidates, parents = self.scores, self.candidates, self.parent_slots
        if self.slot_ids is not None:
            # Nodes keep the order of the pool. No child scores more than its parent, and ties stay
            # as they were, so that parents still come first.
            scores, order = scores.sort(dim=1, descending=True, stable=True)
            place = torch.empty_like(order).scatter_(1, order, self.slot_ids)
            candidates, parents = candidates.gather(1, order), parents.gather(1, order)
            parents = torch.where(parents < 0, parents, place.gather(1, parents.clamp(min=0)))
        tree_build(scores, candidates, parents, root, out=tree)
        torch.exp(scores.gather(1, tree.pool_index.clamp(min=0).long()), out=confidence)
        return tree


def pool_size(steps: int, topk: int) -> int:
    """Candidates that ``steps`` levels of a dynamic tree put forward."""
    return topk + (steps - 1) * topk * topk


def static_paths(steps: int, topk: int, num_nodes: int) -> list[tuple[int, ...]]:
    """The ``num_nodes - 1`` likeliest paths if candidate r is right with probability 0.6 * 0.4^r.

    A rule for a shape when nothing was measured; any prefix-closed set of paths serves.
    """
    # 0.6^length * 0.4^(sum of ranks): in logs, -0.51 a level and -0.92 a rank.
    frontier, chosen = [(0.51 + 0.92 * r, (r,)) for r in range(topk)], []
    while frontier and len(chosen) < num_nodes - 1:
        frontier.sort()
        cost, path = frontier.pop(0)
        chosen.append(path)
        if len(path) < steps:
            frontier += [(cost + 0.51 + 0.92 * r, (*path, r)) for r in range(topk)]
    return chosen


def _shape_of(paths: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """(steps, topk, num_nodes) of a static tree of these paths; ValueError if they are none."""
    if not paths:
        raise ValueError("drafting: paths: expected at least one, got none")
    parents, ranks = tree_from_paths(paths)
    return max(len(path) for path in paths), 1 + max(ranks), len(parents)


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """Which drafts are made.

    Args:
        kind: ``"chain"``, ``"static"`` or ``"dynamic"`` tree.
        steps: deepest draft, at least 1.
        topk: children a node; 1 for a chain.
        num_nodes: nodes to verify, root included; None = all that a chain or pool has, at most 16.
        sampled: whether requests that sample have their drafts drawn from the drafter's
            distribution, not for dynamic trees. Their text is then distributed as plain decoding's
            but not the same; without, it is the same token for token.
        paths: shape of a static tree, as ``of_paths`` sets it; None = ``static_paths``.
    """

    kind: str = "chain"
    steps: int = 3
    topk: int = 1
    num_nodes: int | None = None
    sampled: bool = False
    paths: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"drafting: kind: expected one of {KINDS}, got {self.kind!r}")
        integers("drafting: draft-steps, topk", (self.steps, self.topk))
        if self.sampled and self.kind == "dynamic":
            raise ValueError(
                "drafting: draft-sampling: expected a chain or a static tree, whose drafts are not "
                "chosen by their scores, got a dynamic tree"
            )
        if self.paths is not None:
            # Caches are sized by these numbers, and drafted by the paths.
            shape = _shape_of(self.paths)
            given = (self.kind, self.steps, self.topk, self.num_nodes)
            if given != ("static", *shape):
                raise ValueError(
                    "drafting: paths: expected a static tree whose (steps, topk, num_nodes) are "
                    f"the paths' {shape}, got {given}"
                )
        if self.steps < 1:
            raise ValueError(f"drafting: draft-steps: expected at least 1, got {self.steps}")
        if self.steps > MAX_STEPS:
            raise ValueError(
                f"drafting: draft-steps: expected at most {MAX_STEPS}, got {self.steps}"
            )
        if self.topk < 1 or (self.kind == "chain" and self.topk != 1):
            wanted = "1 for a chain" if self.kind == "chain" else "at least 1"
            raise ValueError(f"drafting: topk: expected {wanted}, got {self.topk}")
        if self.kind == "chain":
            most = self.steps + 1
            if self.num_nodes not in (None, most):
                raise ValueError(
                    f"drafting: num-nodes: expected {most} for a chain of {self.steps}, got "
                    f"{self.num_nodes}"
                )
        else:
            most = min(1024, 1 + self._most_candidates())
            if self.num_nodes is not None and not 2 <= self.num_nodes <= most:
                raise ValueError(
                    f"drafting: num-nodes: expected 2 to {most} for {self.steps} steps of top-"
                    f"{self.topk}, got {self.num_nodes}"
                )
        object.__setattr__(
            self, "num_nodes", self.num_nodes or (most if self.kind == "chain" else min(16, most))
        )

        if self.num_draft_rows > _MAX_DRAFT_ROWS:
            raise ValueError(
                f"drafting: topk: expected (draft-steps - 1) * topk <= {_MAX_DRAFT_ROWS}, got "
                f"{self.num_draft_rows}"
            )

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[int]], sampled: bool = False) -> DraftPlan:
        """A static tree of the given shape, such as ``planning.tree_shape`` finds.

        Args:
            paths: of its nodes, each the ranks from the root on, as for ``tree_from_paths``.

        ValueError if there are none, or they are none of a tree.
        """
        paths = tuple(tuple(path) for path in paths)
        return cls("static", *_shape_of(paths), sampled, paths)

    def _most_candidates(self) -> int:
        if self.kind == "dynamic":
            return pool_size(self.steps, self.topk)
        return sum(self.topk**depth for depth in range(1, self.steps + 1))

    def check(self, drafter: Drafter | AbsentDrafter) -> None:
        """ValueError if the draft vocabulary is smaller than ``topk``."""
        if self.topk > drafter.config.draft_vocab_size:
            raise ValueError(
                f"drafting: topk: expected at most the draft vocabulary of "
                f"{drafter.config.draft_vocab_size}, got {self.topk}"
            )

    def make(
        self,
        drafter: Drafter | AbsentDrafter,
        state: BatchState,
        draws: bool = False,
        num_nodes: int | None = None,
        best_first: bool = False,
    ) -> StaticDraft | DynamicDraft:
        """The drafts of ``state``'s requests.

        Args:
            draws: whether a plan that samples does so.
            num_nodes: fewer than the plan's, its first ones, of a dynamic tree its best; 1 = the
                root alone, without drafts.
            best_first: of a dynamic tree, see ``DynamicDraft``.
        """
        num_nodes = num_nodes or self.num_nodes
        if self.kind == "dynamic" and num_nodes > 1:
            return DynamicDraft(drafter, state, self.steps, self.topk, num_nodes, best_first)
        if self.kind == "static":
            paths = self.paths or static_paths(self.steps, self.topk, self.num_nodes)
            parents, ranks = (of[:num_nodes] for of in tree_from_paths(paths))
        else:
            parents, ranks = list(range(-1, num_nodes - 1)), [0] * num_nodes
        return StaticDraft(drafter, state, parents, ranks, draws and self.sampled and num_nodes > 1)

    @property
    def num_draft_rows(self) -> int:
        """An upper bound on the drafter's K/V rows in flight, for sizing caches beforehand."""
        if self.kind == "dynamic":
            return (self.steps - 1) * self.topk
        return self.num_nodes
