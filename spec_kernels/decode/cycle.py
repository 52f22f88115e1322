"""The decode cycle: draft, build, verify, accept, compact, extend.

Shapes are static and lengths stand in tensors; nothing here looks at a value on the host, so the
whole cycle can be captured and replayed. Between cycles

    target length == drafter length == number of ids - 1

holds for every request: the last emitted token, the next root, has no K/V yet.
"""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor

from spec_kernels.decode.drafting import DynamicDraft, StaticDraft
from spec_kernels.decode.state import BatchState
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.layers import Step
from spec_kernels.models.target import Target
from spec_kernels.ops.tree_build import DraftTree, num_words
from spec_kernels.ops.tree_verify import Verified, tree_verify, tree_verify_compact

PHASES = ("draft", "build", "verify", "accept", "extend")


class PhaseClock:
    """Wall seconds a phase, on the CPU. A graph has no phases for the host: there it is silent.

    ``accept`` is the walk and the compaction, which are one launch.
    """

    def __init__(self, device: torch.device):
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._is_silent = device.type != "cpu"
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        if self._is_silent:
            return
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


@dataclasses.dataclass
class CycleResult:
    """What one cycle settled, in one block of memory, so that one copy brings it to the host.

    Attributes:
        block: all of it.
        verified: ``tree_verify``'s result, int64.
        confidence: ``[B, N]`` float32, how sure the drafter was of each node.
    """

    block: Tensor
    verified: Verified
    confidence: Tensor

    @classmethod
    def allocate(cls, batch: int, num_nodes: int, max_depth: int, device) -> CycleResult:
        size = batch * (2 * (max_depth + 1) + 2) + (batch * num_nodes + 1) // 2
        return cls.of(torch.zeros(size, dtype=torch.int64, device=device), batch, num_nodes)

    @classmethod
    def of(cls, block: Tensor, batch: int, num_nodes: int) -> CycleResult:
        """The parts of ``block``, which may be a copy of another's."""
        num_words = (batch * num_nodes + 1) // 2
        rows = ((block.shape[0] - num_words) // batch - 2) // 2
        path = batch * rows
        tokens, index, accepted, status, confidence = block.split(
            (path, path, batch, batch, num_words)
        )
        return cls(
            block,
            Verified(index.view(batch, rows), accepted, tokens.view(batch, rows), status),
            confidence.view(torch.float32)[: batch * num_nodes].view(batch, num_nodes),
        )


def causal_words(num_rows: int, device=None) -> Tensor:
    """``[1, N, W]`` int32: row i sees rows 0..i, as the nodes of a chain do."""
    seen = torch.ones(num_rows, num_rows, dtype=torch.int64, device="cpu").tril()
    seen = torch.nn.functional.pad(seen, (0, num_words(num_rows) * 32 - num_rows))
    words = (seen.view(num_rows, -1, 32) << torch.arange(32, device="cpu")).sum(-1)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.to(device=device, dtype=torch.int32).unsqueeze(0)


class Eviction:
    """Cuts each request's tree down to its first ``max_nodes``, which hold their ancestors.

    An evicted node becomes a copy of the root that nothing leads to: same token, same position,
    same keys, hence the same experts, so that it adds nothing to the weights that are read.
    """

    def __init__(self, batch: int, num_nodes: int, device):
        self.ids = torch.arange(num_nodes, device=device)
        self.tree = DraftTree.allocate(batch, num_nodes, device)
        self.root_only = torch.zeros(1, 1, num_words(num_nodes), dtype=torch.int32, device=device)
        self.root_only[..., 0] = 1
        self.no_link = torch.full((1,), -1, dtype=torch.int32, device=device)

    def cut(self, tree: DraftTree, max_nodes: Tensor) -> DraftTree:
        out, most = self.tree, max_nodes.unsqueeze(1)
        kept = self.ids < most
        torch.where(kept, tree.tokens, tree.tokens[:, :1], out=out.tokens)
        torch.mul(tree.depths, kept, out=out.depths)
        torch.where(kept.unsqueeze(2), tree.ancestors, self.root_only, out=out.ancestors)
        for name in ("first_child", "next_sibling"):
            links = getattr(tree, name)
            torch.where(links < most, links, self.no_link, out=getattr(out, name))
        return out


class Cycle:
    """One speculative cycle over static buffers, for all requests of the batch.

    A request of negative length runs along inert: nothing is written to the caches for it, its
    length stays, and what it emits is -1.

    Args:
        proposal: makes the drafts.
        state: the requests.
        evicts: whether ``state.max_nodes`` is heeded.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | AbsentDrafter,
        proposal: StaticDraft | DynamicDraft,
        state: BatchState,
        clock: PhaseClock,
        evicts: bool = False,
    ):
        self.target, self.drafter, self.proposal = target, drafter, proposal
        self.state, self.clock = state, clock
        batch, device = len(state.limits), target.device
        nodes, rows = proposal.num_nodes, proposal.max_depth + 1
        self.node_ids = torch.arange(nodes, device=device).expand(batch, -1)
        self.row_base = torch.arange(batch, device=device) * rows
        self.extend_words = causal_words(rows, device).expand(batch, -1, -1).contiguous()
        self.result = CycleResult.allocate(batch, nodes, rows - 1, device)
        self.eviction = Eviction(batch, nodes, device) if evicts else None
        self.capture = self.captured = None
        if drafter.is_here:
            self.capture = target.new_capture(batch * nodes)
            self.captured = self.capture.view(batch, nodes, *self.capture.shape[1:])
        moved_rows = [self.captured] if drafter.is_here else []
        self.moved = (state.cache.block_tables, state.cache.layers, moved_rows)
        self.sampling = state.sampling.arguments(nodes) | {"draft_probs": proposal.draft_probs}

    def run(self) -> CycleResult:
        """Decodes 1 to D + 1 tokens a request; the result is overwritten by the next run."""
        state, clock, proposal = self.state, self.clock, self.proposal
        cache, out = state.cache, self.result.verified
        clock.start()
        if self.drafter.is_here:
            proposal.draft()
        if self.drafter.audience is not None:
            self.drafter.audience.broadcast(proposal.message)
        clock.mark("draft")

        tree = proposal.build(self.result.confidence)
        if self.eviction is not None:
            tree = self.eviction.cut(tree, state.max_nodes)
        clock.mark("build")

        logits = self.target.forward(self._verify_step(tree), cache.target, self.capture)
        clock.mark("verify")

        links = (tree.tokens, tree.first_child, tree.next_sibling)
        lens = cache.context_lens
        tree_verify_compact(logits, *links, lens, *self.moved, out=out, **self.sampling)
        clock.mark("accept")

        last = self.row_base + out.num_accepted
        if self.drafter.is_here:
            self._extend(last)
        state.advance(out.tokens, out.num_accepted, last)
        clock.mark("extend")
        return self.result

    def _verify_step(self, tree: DraftTree) -> Step:
        """Node n stands at position context + depth and in the cache at context + n."""
        cache = self.state.cache
        return Step(
            tree.tokens,
            cache.context_lens.unsqueeze(1) + tree.depths,
            tree.ancestors,
            self.node_ids,
            cache.block_tables,
            cache.context_lens,
        )

    def _extend(self, last: Tensor) -> None:
        """Runs the drafter over the accepted rows with the target's features.

        Row i pairs emitted token i with the stream captured at the i-th accepted node, one row for
        every emitted token. Rows past the bonus token are computed too and stay invisible: they
        stand past the new length. The output of the bonus rows ``last [B]`` starts the next draft.
        """
        drafter, start, out = self.drafter, self.state.start, self.result.verified
        cache = self.state.cache
        num_rows = out.tokens.shape[1]
        row_ids = self.node_ids[:, :num_rows]
        step = Step(
            out.tokens.clamp(min=0),
            cache.context_lens.unsqueeze(1) + row_ids,
            self.extend_words,
            row_ids,
            cache.block_tables,
            cache.context_lens,
        )
        feature = drafter.fuse(self.captured[:, :num_rows].flatten(0, 1))
        feature, normed = drafter.forward(step, feature, cache.draft)
        torch.index_select(feature, 0, last, out=start.features)
        start.logits.copy_(drafter.logits(normed.index_select(0, last)))


class PlainCycle:
    """Plain decoding: verification of a tree that is its root alone, with no drafter."""

    def __init__(self, target: Target, state: BatchState, clock: PhaseClock):
        self.target, self.state, self.clock = target, state, clock
        batch, device = len(state.limits), target.device
        self.words = causal_words(1, device).expand(batch, -1, -1).contiguous()
        self.first_slot = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.no_links = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
        self.last = torch.arange(batch, device=device)
        self.result = CycleResult.allocate(batch, 1, 0, device)
        self.sampling = state.sampling.arguments(1)

    def run(self) -> CycleResult:
        """Decodes one token a request; the result is overwritten by the next run."""
        state, clock, out = self.state, self.clock, self.result.verified
        cache = state.cache
        clock.start()
        roots, lens = state.start.root_tokens.unsqueeze(1), cache.context_lens
        step = Step(roots, lens.unsqueeze(1), self.words, self.first_slot, cache.block_tables, lens)
        logits = self.target.forward(step, cache.target)
        clock.mark("verify")
        links = (roots, self.no_links, self.no_links)
        tree_verify(logits, *links, lens, out=out, **self.sampling)
        state.advance(out.tokens, out.num_accepted, self.last)
        clock.mark("accept")
        return self.result
