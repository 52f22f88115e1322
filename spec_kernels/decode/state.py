"""What cycles know of their requests: static tensors in device memory, one row a request.

A batch of n requests is the first n rows, so every bucket is a view of the same tensors. The host
writes a row when a request joins, leaves or moves; in between only the cycles do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_kernels.decode.kv_cache import CacheView, KVCache, pinned
from spec_kernels.decode.sampling import SamplingOptions, SamplingParams, SamplingTensors
from spec_kernels.models.drafter import AbsentDrafter, Drafter

# Never an emitted id, nor the -1 beside them.
_NO_STOP = -2
MAX_STOP_IDS = 8


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
    def allocate(cls, drafter: Drafter | AbsentDrafter | None, batch: int, device) -> DraftStart:
        hidden, vocab, dtype = 0, 0, torch.float32
        if drafter is not None:
            hidden, vocab = drafter.config.hidden_size, drafter.config.draft_vocab_size
            dtype = drafter.dtype
        return cls(
            root_tokens=torch.zeros(batch, dtype=torch.int64, device=device),
            features=torch.zeros(batch, hidden, dtype=dtype, device=device),
            logits=torch.zeros(batch, vocab, dtype=dtype, device=device),
        )

    def rows(self, rows: slice) -> DraftStart:
        return DraftStart(self.root_tokens[rows], self.features[rows], self.logits[rows])


@dataclasses.dataclass
class BatchState:
    """The requests of a batch.

    Attributes:
        cache: their caches, tables and lengths. A request decodes while its length is >= 0.
        start: where their drafts begin.
        sampling: how their tokens are chosen.
        limits: ``[B]`` int64: a request whose length comes to its limit is done, and inert.
        stop_ids: ``[B, MAX_STOP_IDS]`` int64: so is one that emits one of these.
        max_nodes: ``[B]`` int64: nodes of its tree that are verified, the root included.
        vocab_size: V, of the target.
    """

    cache: CacheView
    start: DraftStart
    sampling: SamplingTensors
    limits: Tensor
    stop_ids: Tensor
    max_nodes: Tensor
    vocab_size: int

    @classmethod
    def allocate(
        cls,
        cache: KVCache,
        drafter: Drafter | AbsentDrafter | None,
        vocab_size: int,
        options: SamplingOptions | None = None,
    ) -> BatchState:
        """Inert rows, as many as ``cache`` has."""
        device, batch = cache.target.device, len(cache.context_lens)
        return cls(
            cache=cache,
            start=DraftStart.allocate(drafter, batch, device),
            sampling=SamplingTensors.allocate(batch, vocab_size, device, options),
            limits=torch.zeros(batch, dtype=torch.int64, device=device),
            stop_ids=torch.full((batch, MAX_STOP_IDS), _NO_STOP, device=device),
            max_nodes=torch.ones(batch, dtype=torch.int64, device=device),
            vocab_size=vocab_size,
        )

    def rows(self, rows: slice) -> BatchState:
        """The same of some requests, as views."""
        return BatchState(
            self.cache.view(rows),
            self.start.rows(rows),
            self.sampling.rows(rows),
            self.limits[rows],
            self.stop_ids[rows],
            self.max_nodes[rows],
            self.vocab_size,
        )

    def tensors(self) -> list[Tensor]:
        """Everything that has a row for each request."""
        held = [self.cache.block_tables, self.cache.context_lens, self.limits]
        held += [self.stop_ids, self.max_nodes]
        for part in (self.start, self.sampling):
            held += [x for x in vars(part).values() if isinstance(x, Tensor)]
        return held

    def set(self, row: int, sampling: SamplingParams, stop_ids: Sequence[int], limit: int) -> None:
        """Writes what a request brings along; it stays inert until its length is written."""
        self.sampling.set(row, sampling)
        padded = [*stop_ids, *[_NO_STOP] * (MAX_STOP_IDS - len(stop_ids))]
        self.stop_ids[row].copy_(
            pinned(torch.tensor(padded, device="cpu"), self.limits.device), True
        )
        self.limits[row].fill_(limit)

    def clear(self, row: int) -> None:
        """Leaves nothing of the request that was in ``row``, which the cache has released."""
        self.sampling.set(row, SamplingParams())
        self.stop_ids[row].fill_(_NO_STOP)
        self.limits[row].zero_()
        self.start.root_tokens[row].zero_()

    def move(self, source: int, row: int) -> None:
        """Copies all of ``source`` but its table and length, which the cache moves."""
        for tensor in self.tensors()[2:]:
            tensor[row].copy_(tensor[source])

    def advance(self, tokens: Tensor, num_accepted: Tensor, last: Tensor) -> None:
        """Takes over what one cycle emitted: new roots and lengths; who is done becomes inert.

        Args:
            tokens: ``[B, D + 1]`` int64 emitted, padded with -1.
            num_accepted: ``[B]`` int64; one token more was emitted.
            last: ``[B]`` int64, where in ``tokens``, flat, each request's last token stands.
        """
        lens, root = self.cache.context_lens, self.start.root_tokens
        torch.index_select(tokens.view(-1), 0, last, out=root)
        # An inert row emits -1, which is no id to embed.
        root.clamp_(min=0)
        lens.add_(num_accepted).add_(1)
        stopped = (tokens.unsqueeze(2) == self.stop_ids.unsqueeze(1)).flatten(1).any(1)
        done = torch.ge(lens, self.limits).logical_or_(stopped)
        # An inert row comes to length 0 in each cycle; a limit of 0 keeps it inert.
        self.limits.masked_fill_(done, 0)
        lens.masked_fill_(done, -1)
