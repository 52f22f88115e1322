"""What the drafter proposes: a chain, a tree of fixed shape, or the best part of a growing tree.

All keep the drafter's K/V of drafted rows at logical positions past the committed ones, one slot a
row, and each row attends its own ancestors' slots (words as in ``tree_attention``), never whatever
stands before it. Shapes are static; the tokens are all that depends on data.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from spec_kernels.decode.kv_cache import KVCache
from spec_kernels.decode.sampling import SamplingTensors, draw
from spec_kernels.models.drafter import Drafter
from spec_kernels.models.layers import Step
from spec_kernels.ops.tree_build import (
    DraftTree,
    link_tree,
    num_words,
    tree_build,
    tree_from_paths,
)

KINDS = ("chain", "static", "dynamic")
MAX_STEPS = 64
# Words of a row of the drafter's attention: 32 * 32 slots.
_MAX_DRAFT_ROWS = 1024
_LEAST_WARMTH = 1e-30


@dataclasses.dataclass
class DraftStart:
    """Where drafting begins: the drafter's output at the last committed row of each request.

    Attributes:
        root_tokens: ``[B]`` int64, the last emitted token, which has no K/V yet.
        features: ``[B, H]``, the feature that the first drafted row takes.
        logits: ``[B, Vd]``, over draft ids, of the first draft.
    """

    root_tokens: Tensor
    features: Tensor
    logits: Tensor

    @classmethod
    def allocate(cls, drafter: Drafter | None, batch: int, device) -> DraftStart:
        hidden, vocab, dtype = 0, 0, torch.float32
        if drafter is not None:
            hidden, vocab = drafter.config.hidden_size, drafter.config.draft_vocab_size
            dtype = drafter.dtype
        return cls(
            root_tokens=torch.zeros(batch, dtype=torch.int64, device=device),
            features=torch.zeros(batch, hidden, dtype=dtype, device=device),
            logits=torch.zeros(batch, vocab, dtype=dtype, device=device),
        )


def _own_bits(first_slot: int, count: int, words: int) -> Tensor:
    """``[1, count, words]`` int32: row j has the one bit of slot ``first_slot + j``."""
    bits = torch.zeros(count, words, dtype=torch.int64)
    slots = torch.arange(first_slot, first_slot + count)
    bits[torch.arange(count), slots // 32] = 1 << (slots % 32)
    # int32 words are bit patterns: bit 31 is the sign.
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).unsqueeze(0)


class _Rows:
    """Where all drafted rows of a cycle stand, level by level."""

    def __init__(self, drafter: Drafter, cache: KVCache, level_sizes: list[int]):
        self.drafter, self.cache, self.level_sizes = drafter, cache, level_sizes
        device = cache.block_tables.device
        self.num_rows = sum(level_sizes)
        self.slot_ids = torch.arange(self.num_rows, device=device)
        depth = [d for d, size in enumerate(level_sizes) for _ in range(size)]
        self.depth_ids = torch.tensor(depth, dtype=torch.int64, device=device)

    def split(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(positions, slots, rotations) of every level, ``[B, size of the level, ...]``."""
        if not self.level_sizes:
            return []
        positions = self.cache.context_lens.unsqueeze(1) + self.depth_ids
        rotations = self.drafter.rotary.rotation(positions)
        slots = self.cache.slots(self.slot_ids)
        parts = (t.split(self.level_sizes, 1) for t in (positions, slots, rotations))
        return list(zip(*parts, strict=True))


class StaticDraft:
    """A tree whose shape is known beforehand: node i takes candidate ``ranks[i]`` of its parent.

    Args:
        parents: parent of each node, -1 for node 0; level by level, as ``tree_from_paths`` gives.
        ranks: which of its parent's candidates, best first, a node takes.
        sampling: given, the candidates of requests that sample are drawn from the drafter's
            distribution q at their temperature, one after the other without replacement, instead
            of being its likeliest; ``tree_verify`` is then to be told q. Siblings must be the
            first draws, in order: a choice among draws would be no draw from q.
    """

    def __init__(
        self,
        drafter: Drafter,
        cache: KVCache,
        batch: int,
        parents: list[int],
        ranks: list[int],
        sampling: SamplingTensors | None = None,
    ):
        self.drafter, self.cache, self.sampling = drafter, cache, sampling
        device = drafter.device
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
        if depths != sorted(depths):
            raise ValueError("drafting: parents: expected the nodes level by level")
        self.num_nodes, self.max_depth = len(parents), max(depths)
        levels = [[n for n, d in enumerate(depths) if d == k] for k in range(self.max_depth + 1)]
        has_child = set(parents)
        live = [[n for n in level if n in has_child] for level in levels]
        # live[0] is the root, whose row was run when the cycle before extended the drafter.
        self.rows = _Rows(drafter, cache, [len(level) for level in live[1 : self.max_depth]])
        self.num_draft_rows = self.rows.num_rows
        words = max(1, num_words(self.num_draft_rows))
        # One block, so that it is sent as one message: the drafts' tokens, then their q.
        num_tokens, num_probs = batch * self.num_nodes, 0
        if sampling is not None:
            _check_first_draws(parents, ranks)
            num_probs = num_tokens * drafter.config.vocab_size
        block = torch.zeros(num_tokens + (num_probs + 1) // 2, dtype=torch.int64, device=device)
        self._with_probs, self._tokens = block, block[:num_tokens]
        shape = torch.tensor(parents, dtype=torch.int64, device=device)
        out = DraftTree.allocate(batch, self.num_nodes, device)
        out.tokens = self._tokens.view(batch, self.num_nodes)
        self.tree = link_tree(torch.zeros_like(out.tokens), shape, out=out)
        self.root = self.tree.tokens[:, 0]
        probs = block[num_tokens:].view(torch.float32)[:num_probs]
        self._probs = probs.view(batch, self.num_nodes, -1) if num_probs else None
        self._depths = torch.arange(1, self.max_depth + 1, device=device)
        self.levels = []
        seen = {0: torch.zeros(words, dtype=torch.int32)}
        slot = 0
        for depth in range(1, self.max_depth + 1):
            above = {node: row for row, node in enumerate(live[depth - 1])}
            nodes = levels[depth]
            width = 1 + max(ranks[n] for n in nodes)
            picks = [above[parents[n]] * width + ranks[n] for n in nodes]
            below = live[depth] if depth < self.max_depth else []
            bits = _own_bits(slot, len(below), words)[0]
            for row, node in enumerate(below):
                seen[node] = seen[parents[node]] | bits[row]
            slot += len(below)
            visible = [seen[n] for n in below]
            self.levels.append(
                _Level(
                    width=width,
                    picks=_unless_identity(picks, len(above) * width, device),
                    live=_unless_identity([nodes.index(n) for n in below], len(nodes), device),
                    parent_rows=_unless_identity(
                        [b * len(above) + above[parents[n]] for b in range(batch) for n in below],
                        batch * len(above),
                        device,
                    ),
                    ancestors=(
                        torch.stack(visible).to(device).expand(batch, -1, -1).contiguous()
                        if visible
                        else None
                    ),
                    nodes=self.tree.tokens[:, nodes[0] : nodes[-1] + 1],
                    probs=[] if self._probs is None else [self._probs[:, n] for n in above],
                )
            )

    @property
    def draft_probs(self) -> Tensor | None:
        """``[B, N, V]`` float32: row i is the q from which the children of node i were drawn.

        None where no request samples its drafts. Rows of nodes without children stay 0.
        """
        sampled = self.sampling is not None and self.sampling.any_sampled
        return self._probs if sampled else None

    @property
    def message(self) -> Tensor:
        """What ranks without a drafter must be sent between ``draft`` and ``build``."""
        return self._tokens if self.draft_probs is None else self._with_probs

    def draft(self, start: DraftStart) -> None:
        """Runs the drafter down the levels and writes the drafts' tokens; uses up ``start``."""
        drafter, cache = self.drafter, self.cache
        batch = start.root_tokens.shape[0]
        logits, feature = start.logits, start.features
        rows = self.rows.split()
        coins = None if self.draft_probs is None else self._coins()
        for depth, level in enumerate(self.levels):
            if coins is None:
                chosen = self._best(level, logits)
            else:
                chosen = self._drawn(level, logits, coins[:, depth])
            tokens = drafter.target_ids.take(chosen).view(batch, -1)
            if level.picks is not None:
                tokens = tokens.index_select(1, level.picks)
            level.nodes.copy_(tokens)
            if level.ancestors is None:
                return
            if level.live is not None:
                tokens = tokens.index_select(1, level.live)
            if level.parent_rows is not None:
                feature = feature.index_select(0, level.parent_rows)
            positions, slots, rotation = rows[depth]
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

    def _coins(self) -> Tensor:
        """``[B, D, draws]``: the coins of the positions after the root."""
        table = self.sampling.coins
        positions = self.cache.context_lens.unsqueeze(1) + self._depths
        return table.gather(1, positions.unsqueeze(2).expand(-1, -1, table.shape[2]))

    def _best(self, level: _Level, logits: Tensor) -> Tensor:
        """Draft ids ``[rows, width]``, the likeliest."""
        if level.width == 1:
            return logits.argmax(-1, keepdim=True)
        return logits.topk(level.width, -1).indices

    def _drawn(self, level: _Level, logits: Tensor, coins: Tensor) -> Tensor:
        """Draft ids ``[rows, width]``, drawn where a request samples; notes their q.

        Nodes of one level share their position's coins ``[B, draws]``: at most one of them is on
        the path, and which one was settled at earlier positions.
        """
        num_parents, warmth = len(level.probs), self.sampling.temperature.unsqueeze(1)
        coins = coins[:, : level.width]
        if num_parents > 1:
            warmth = warmth.repeat_interleave(num_parents, 0)
            coins = coins.repeat_interleave(num_parents, 0)
        # Bounded below, so that finite logits stay finite.
        q = (logits.float() / warmth.clamp(min=_LEAST_WARMTH)).softmax(-1)
        by_parent = q.view(-1, num_parents, q.shape[1]).unbind(1)
        for row, own in zip(level.probs, by_parent, strict=True):
            row.index_copy_(1, self.drafter.target_ids, own)
        drawn = draw(q, coins)
        if self.sampling.any_greedy:
            drawn = torch.where(warmth > 0, drawn, self._best(level, logits))
        return drawn

    def build(self, start: DraftStart) -> DraftTree:
        """The tree to verify; its links never change."""
        self.root.copy_(start.root_tokens)
        return self.tree


@dataclasses.dataclass
class _Level:
    """One level of a static tree; index tensors are None where they would change nothing.

    ``picks`` chooses the level's nodes among width candidates of each live row above; ``live``
    those that have children among the nodes; ``parent_rows`` the live nodes' parents among the
    batch's rows above; ``nodes`` is the level's part of the tree's tokens; ``probs`` are the rows
    ``[B, V]`` of q that belong to the live nodes above.
    """

    width: int
    picks: Tensor | None
    live: Tensor | None
    parent_rows: Tensor | None
    ancestors: Tensor | None
    nodes: Tensor
    probs: list[Tensor]


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
    """

    def __init__(
        self, drafter: Drafter, cache: KVCache, batch: int, steps: int, topk: int, num_nodes: int
    ):
        self.drafter, self.cache, self.topk = drafter, cache, topk
        # The rerank chooses drafts by their scores, so they are no draws from q.
        self.draft_probs = None
        self.num_nodes, self.max_depth = num_nodes, min(steps, num_nodes - 1)
        device = drafter.device
        self.num_live_levels = steps - 1
        self.rows = _Rows(drafter, cache, [topk] * self.num_live_levels)
        self.num_draft_rows = self.rows.num_rows
        words = max(1, num_words(self.num_draft_rows))
        self.own_bits = [
            _own_bits(level * topk, topk, words).to(device) for level in range(self.num_live_levels)
        ]
        # One block, so that it is sent as one message.
        pool = pool_size(steps, topk)
        self.message = torch.zeros(3, batch, pool, dtype=torch.int64, device=device)
        self.candidates, self.parent_slots = self.message[0], self.message[1].fill_(-1)
        scores = self.message[2].view(torch.float32)
        self.scores = scores.view(-1)[: batch * pool].view(batch, pool)
        self.first_live = torch.arange(topk, device=device).expand(batch, -1)
        self.row_base = torch.arange(batch, device=device).unsqueeze(1) * topk
        self.tree = DraftTree.allocate(batch, num_nodes, device)

    def draft(self, start: DraftStart) -> None:
        """Fills the pool, level by level."""
        drafter, cache, k = self.drafter, self.cache, self.topk
        batch = start.root_tokens.shape[0]
        scores, tokens = self._best(start.logits)
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
            gains, children = self._best(drafter.logits(normed))
            total = (gains.view(batch, k, k) + scores.unsqueeze(2)).view(batch, k * k)
            children = children.view(batch, k * k)
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

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids of the k best successors, ``[rows, k]`` each."""
        best = logits.float().log_softmax(-1).topk(self.topk, -1)
        return best.values, self.drafter.target_ids.take(best.indices)

    def _put(self, base: int, scores: Tensor, tokens: Tensor, parents: Tensor | None) -> None:
        columns = slice(base, base + scores.shape[1])
        self.scores[:, columns] = scores
        self.candidates[:, columns] = tokens
        if parents is not None:
            self.parent_slots[:, columns] = parents

    def build(self, start: DraftStart) -> DraftTree:
        """The best N - 1 candidates of the pool, linked under the root."""
        return tree_build(
            self.scores, self.candidates, self.parent_slots, start.root_tokens, out=self.tree
        )


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
    """

    kind: str = "chain"
    steps: int = 3
    topk: int = 1
    num_nodes: int | None = None
    sampled: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"drafting: kind: expected one of {KINDS}, got {self.kind!r}")
        if self.sampled and self.kind == "dynamic":
            raise ValueError(
                "drafting: draft-sampling: expected a chain or a static tree, whose drafts are not "
                "chosen by their scores, got a dynamic tree"
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

    def _most_candidates(self) -> int:
        if self.kind == "dynamic":
            return pool_size(self.steps, self.topk)
        return sum(self.topk**depth for depth in range(1, self.steps + 1))

    def make(
        self, drafter: Drafter, cache: KVCache, batch: int, sampling: SamplingTensors
    ) -> StaticDraft | DynamicDraft:
        """ValueError if the draft vocabulary is smaller than ``topk``."""
        if self.topk > drafter.config.draft_vocab_size:
            raise ValueError(
                f"drafting: topk: expected at most the draft vocabulary of "
                f"{drafter.config.draft_vocab_size}, got {self.topk}"
            )
        if self.kind == "dynamic":
            return DynamicDraft(drafter, cache, batch, self.steps, self.topk, self.num_nodes)
        if self.kind == "chain":
            parents, ranks = list(range(-1, self.steps)), [0] * (self.steps + 1)
        else:
            parents, ranks = tree_from_paths(static_paths(self.steps, self.topk, self.num_nodes))
        return StaticDraft(
            drafter, cache, batch, parents, ranks, sampling if self.sampled else None
        )

    @property
    def num_draft_rows(self) -> int:
        """An upper bound on the drafter's K/V rows in flight, for sizing caches beforehand."""
        if self.kind == "dynamic":
            return (self.steps - 1) * self.topk
        return self.num_nodes
