"""The prompt of one request, through target and drafter, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_kernels.decode.cycle import CycleResult, causal_words
from spec_kernels.decode.kv_cache import pinned
from spec_kernels.decode.state import BatchState
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.layers import Step
from spec_kernels.models.target import Target
from spec_kernels.ops.tree_verify import tree_verify

_SMALLEST_CHUNK = 16


class Prefill:
    """Runs prompts, one after the other, and chooses their first new tokens.

    The request stays inert for the cycles until ``run`` is done with it. A chunk is a chain of
    nodes to verify, padded to few sizes. Nothing waits for the device.

    Args:
        state: the batch whose rows are filled.
        chunk: most tokens in one forward.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | AbsentDrafter | None,
        state: BatchState,
        chunk: int,
    ):
        self.target, self.state, self.chunk = target, state, chunk
        self.drafter = drafter if drafter is not None and drafter.is_here else None
        device = target.device
        self.capture = target.new_capture(chunk) if self.drafter else None
        self.lens, self.position = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self.result = CycleResult.allocate(1, 1, 0, device)
        self.root = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.no_links = torch.full((1, 1), -1, dtype=torch.int32, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self._words: dict[int, Tensor] = {}

    def run(self, row: int, prompt: Sequence[int], drafting: bool) -> CycleResult:
        """Fills the caches of ``row``, chooses the token after the prompt, and sets the row going.

        Returns:
            The first new token, as of a cycle of one request; the next call overwrites it.
        """
        state, drafting = self.state.rows(slice(row, row + 1)), drafting and self.drafter
        ids = self._ids(prompt)
        for begin in range(0, len(prompt), self.chunk):
            end = min(begin + self.chunk, len(prompt))
            step, logits = self._target_chunk(state, ids, begin, end, bool(drafting))
            if end == len(prompt):
                following = self._choose(state, logits, end - 1)
                ids[end : end + 1] = following
            if drafting:
                self._draft_chunk(state, step, ids, begin, end, end == len(prompt))
        out = self.result.verified
        state.cache.context_lens.fill_(len(prompt) - 1)
        state.advance(out.tokens, out.num_accepted, self.last)
        return self.result

    def logits(self, row: int, ids: Sequence[int]) -> Tensor:
        """``[V]`` logits of the token after ``ids``; the request stays inert."""
        state, ids = self.state.rows(slice(row, row + 1)), self._ids(ids)
        for begin in range(0, len(ids) - 1, self.chunk):
            end = min(begin + self.chunk, len(ids) - 1)
            _, logits = self._target_chunk(state, ids, begin, end, False)
        return logits[0].clone()

    def _ids(self, prompt: Sequence[int]) -> Tensor:
        """The prompt, and room for the token after it."""
        device = self.target.device
        host = pinned(torch.tensor([*prompt, 0], dtype=torch.int64, device="cpu"), device)
        return host.to(device, non_blocking=True)

    def _target_chunk(
        self, state: BatchState, ids: Tensor, begin: int, end: int, captures: bool
    ) -> tuple[Step, Tensor]:
        """(the chunk's rows, logits ``[1, V]`` of its last one)."""
        cache, device = state.cache, ids.device
        num_tokens = end - begin
        size = self._chunk_size(num_tokens)
        # Padded rows see nothing and write nothing.
        slots = torch.arange(size, device=device).unsqueeze(0)
        positions = begin + slots
        slots = slots.masked_fill(slots >= num_tokens, -1)
        if size not in self._words:
            self._words[size] = causal_words(size, device)
        words = self._words[size].masked_fill((slots < 0).unsqueeze(2), 0)
        tokens = torch.zeros_like(positions)
        tokens[0, :num_tokens] = ids[begin:end]
        self.lens.fill_(begin)
        step = Step(tokens, positions, words, slots, cache.block_tables, self.lens)
        capture = self.capture[:size] if captures else None
        last_row = torch.full((1,), num_tokens - 1, device=device)
        return step, self.target.forward(step, cache.target, capture, last_row)

    def _draft_chunk(
        self, state: BatchState, step: Step, ids: Tensor, begin: int, end: int, is_last: bool
    ) -> None:
        """The drafter's rows of a chunk take the tokens after theirs: the last one's is the next
        prompt token, and only after the last chunk the one just chosen."""
        drafter, start, num_tokens = self.drafter, state.start, end - begin
        step.tokens[0, :num_tokens] = ids[begin + 1 : end + 1]
        feature = drafter.fuse(self.capture[: step.shape[1]])
        feature, normed = drafter.forward(step, feature, state.cache.draft)
        if is_last:
            start.features.copy_(feature[num_tokens - 1 : num_tokens])
            start.logits.copy_(drafter.logits(normed[num_tokens - 1 : num_tokens]))

    def _chunk_size(self, num_tokens: int) -> int:
        """Rows of a chunk: the next power of two, so that few shapes are ever made."""
        size = _SMALLEST_CHUNK
        while size < num_tokens:
            size *= 2
        return min(size, self.chunk)

    def _choose(self, state: BatchState, logits: Tensor, position: int) -> Tensor:
        """``[1]``: the token after the one at ``position``, by the rule of every later cycle."""
        self.position.fill_(position)
        tree_verify(
            logits.unsqueeze(0),
            self.root,
            self.no_links,
            self.no_links,
            self.position,
            out=self.result.verified,
            **state.sampling.arguments(1),
        )
        return self.result.verified.tokens[0]
