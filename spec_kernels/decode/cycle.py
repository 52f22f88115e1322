"""The decode cycle: draft, build, verify, accept, extend.

Shapes are static and lengths stand in tensors; nothing here looks at a value on the host, so the
whole cycle can be captured and replayed. Between cycles

    target length == drafter length == number of ids - 1

holds for every request: the last emitted token, the next root, has no K/V yet.
"""

from __future__ import annotations

import time

import torch

from spec_kernels.decode.drafting import DraftStart, DynamicDraft, StaticDraft
from spec_kernels.decode.kv_cache import KVCache
from spec_kernels.decode.sampling import SamplingTensors
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.layers import Step
from spec_kernels.models.target import Target
from spec_kernels.ops.tree_build import DraftTree, num_words
from spec_kernels.ops.tree_verify import Verified, tree_verify, tree_verify_compact

PHASES = ("draft", "build", "verify", "accept", "extend")


class PhaseClock:
    """Wall seconds a phase; a CUDA device is synchronised at each mark, so it is for eager runs."""

    def __init__(self, device: torch.device):
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._cuda = device.type == "cuda"
        self._last = 0.0

    def start(self) -> None:
        self._last = self._now()

    def mark(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] += now - self._last
        self._last = now

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def causal_words(num_rows: int, device=None) -> torch.Tensor:
    """``[1, N, W]`` int32: row i sees rows 0..i, as the nodes of a chain do."""
    seen = torch.ones(num_rows, num_rows, dtype=torch.int64).tril()
    seen = torch.nn.functional.pad(seen, (0, num_words(num_rows) * 32 - num_rows))
    words = (seen.view(num_rows, -1, 32) << torch.arange(32)).sum(-1)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.to(device=device, dtype=torch.int32).unsqueeze(0)


class Cycle:
    """One speculative cycle over static buffers, for all requests of the batch.

    ``active [B]`` is 1 for requests that are being decoded: an idle one runs along, writes nothing
    to the caches, its length stays, and what it emits is to be ignored.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | AbsentDrafter,
        cache: KVCache,
        proposal: StaticDraft | DynamicDraft,
        start: DraftStart,
        active: torch.Tensor,
        sampling: SamplingTensors,
    ):
        self.target, self.drafter, self.cache, self.proposal = target, drafter, cache, proposal
        self.start, self.active, self.sampling = start, active, sampling
        batch, nodes, device = active.shape[0], proposal.num_nodes, target.device
        rows = proposal.max_depth + 1
        self.node_ids = torch.arange(nodes, device=device)
        self.row_base = torch.arange(batch, device=device) * rows
        self.extend_words = causal_words(rows, device).expand(batch, -1, -1).contiguous()
        self.verified = Verified.allocate(batch, proposal.max_depth, device)
        self.capture = self.captured = None
        if drafter.is_here:
            self.capture = target.new_capture(batch * nodes)
            self.captured = self.capture.view(batch, nodes, *self.capture.shape[1:])
        self.moved_rows = [self.captured] if drafter.is_here else []

    def run(self, clock: PhaseClock) -> Verified:
        """Decodes 1 to D + 1 tokens a request; the result is overwritten by the next run."""
        cache, start, out = self.cache, self.start, self.verified
        lens, tables = cache.context_lens, cache.block_tables
        clock.start()
        if self.drafter.is_here:
            self.proposal.draft(start)
        if self.drafter.audience is not None:
            self.drafter.audience.broadcast(self.proposal.message)
        clock.mark("draft")

        tree = self.proposal.build(start)
        clock.mark("build")

        logits = self.target.forward(self._verify_step(tree), cache.target, self.capture)
        clock.mark("verify")

        links = (tree.tokens, tree.first_child, tree.next_sibling)
        moved = (tables, cache.layers, self.moved_rows)
        sampling = self.sampling.arguments() | {"draft_probs": self.proposal.draft_probs}
        tree_verify_compact(logits, *links, lens, *moved, out=out, **sampling)
        clock.mark("accept")

        last = self.row_base + out.num_accepted
        if self.drafter.is_here:
            self._extend(last)
        torch.index_select(out.tokens.view(-1), 0, last, out=start.root_tokens)
        lens.add_((out.num_accepted + 1) * self.active)
        clock.mark("extend")
        return out

    def _verify_step(self, tree: DraftTree) -> Step:
        """Node n stands at position context + depth and in the cache at context + n."""
        cache = self.cache
        return Step(
            tree.tokens,
            cache.context_lens.unsqueeze(1) + tree.depths,
            tree.ancestors,
            cache.slots(self.node_ids),
            cache.block_tables,
            cache.context_lens,
        )

    def _extend(self, last: torch.Tensor) -> None:
        """Runs the drafter over the accepted rows with the target's features.

        Row i pairs emitted token i with the stream captured at the i-th accepted node, one row for
        every emitted token. Rows past the bonus token are computed too and stay invisible: they
        stand past the new length. The output of the bonus rows ``last [B]`` starts the next draft.
        """
        cache, drafter, start, out = self.cache, self.drafter, self.start, self.verified
        num_rows = out.tokens.shape[1]
        row_ids = self.node_ids[:num_rows]
        step = Step(
            out.tokens.clamp(min=0),
            cache.context_lens.unsqueeze(1) + row_ids,
            self.extend_words,
            cache.slots(row_ids),
            cache.block_tables,
            cache.context_lens,
        )
        feature = drafter.fuse(self.captured[:, :num_rows].flatten(0, 1))
        feature, normed = drafter.forward(step, feature, cache.draft)
        torch.index_select(feature, 0, last, out=start.features)
        start.logits.copy_(drafter.logits(normed.index_select(0, last)))


class PlainCycle:
    """Plain decoding: verification of a tree that is its root alone, with no drafter."""

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        start: DraftStart,
        active: torch.Tensor,
        sampling: SamplingTensors,
    ):
        self.target, self.cache, self.start = target, cache, start
        self.active, self.sampling = active, sampling
        batch, device = active.shape[0], target.device
        self.words = causal_words(1, device).expand(batch, -1, -1).contiguous()
        self.first_slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.no_links = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
        self.verified = Verified.allocate(batch, 0, device)

    def run(self, clock: PhaseClock) -> Verified:
        """Decodes one token a request; the result is overwritten by the next run."""
        cache, start, out = self.cache, self.start, self.verified
        clock.start()
        roots = start.root_tokens.unsqueeze(1)
        lens, tables = cache.context_lens, cache.block_tables
        slots = cache.slots(self.first_slot)
        step = Step(roots, lens.unsqueeze(1), self.words, slots, tables, lens)
        logits = self.target.forward(step, cache.target)
        clock.mark("verify")
        links = (roots, self.no_links, self.no_links)
        tree_verify(logits, *links, lens, out=out, **self.sampling.arguments())
        start.root_tokens.copy_(out.tokens[:, 0])
        lens.add_(self.active)
        clock.mark("accept")
        return out
