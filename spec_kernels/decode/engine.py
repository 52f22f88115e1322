"""Prompts in, tokens out: prefill in chunks, then plain or speculative cycles until done."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from spec_kernels.decode.cycle import Cycle, PhaseClock, PlainCycle, causal_words
from spec_kernels.decode.drafting import DraftPlan, DraftStart
from spec_kernels.decode.kv_cache import KVCache
from spec_kernels.decode.sampling import SamplingParams, SamplingTensors
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.layers import Step
from spec_kernels.models.target import Target
from spec_kernels.ops.tree_verify import VerifyStatus, tree_verify

# Called with the tokens of one cycle and how many of them, the first ones, were drafts.
OnTokens = Callable[[list[int], int], None]

_SMALLEST_CHUNK = 16


@dataclasses.dataclass
class Generation:
    """What one prompt gave.

    Attributes:
        tokens: emitted ids, the stop id included if one ended it.
        accepted: drafts accepted in each cycle (0 for every plain one).
        seconds: of the cycles; ``prefill_seconds`` of the prompt and the first token.
        phase_seconds: of the cycles, by phase.
    """

    tokens: list[int]
    accepted: list[int]
    seconds: float
    prefill_seconds: float
    phase_seconds: dict[str, float]


class Engine:
    """Decodes with one target and, if given, one drafter.

    Args:
        target: this rank's part; every rank runs the same calls in the same order.
        drafter: needed for speculative decoding.
        plan: which drafts are made.
        max_tokens: longest prompt plus its continuation.
        batch: requests that the static buffers hold.
        page_size, num_pages: of the caches, see ``KVCache``.
        chunk: most prompt tokens in one forward, at most 1024.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | AbsentDrafter | None = None,
        plan: DraftPlan | None = None,
        *,
        max_tokens: int,
        batch: int = 1,
        page_size: int = 16,
        num_pages: int | None = None,
        chunk: int = 256,
    ):
        if not 1 <= chunk <= 1024:
            raise ValueError(f"engine: chunk: expected 1 <= chunk <= 1024, got {chunk}")
        self.target, self.drafter, self.chunk = target, drafter, chunk
        plan = plan or DraftPlan()
        # Rows in flight past the committed ones: the tree, the drafted rows, the extended rows.
        self.slack = 1
        if drafter is not None:
            self.slack = max(plan.num_nodes, plan.num_draft_rows, plan.steps + 1)
        self.cache = KVCache(target, drafter, batch, max_tokens + self.slack, page_size, num_pages)
        device = target.device
        self.start = DraftStart.allocate(drafter, batch, device)
        self.active = torch.zeros(batch, dtype=torch.int64, device=device)
        self.sampling = SamplingTensors(
            batch, device, max_tokens + self.slack, plan.topk if plan.sampled else 0
        )
        shared = (self.start, self.active, self.sampling)
        self.plain = PlainCycle(target, self.cache, *shared)
        self.speculative = None
        if drafter is not None:
            proposal = plan.make(drafter, self.cache, batch, self.sampling)
            self.speculative = Cycle(target, drafter, self.cache, proposal, *shared)
        self._drafts_here = drafter is not None and drafter.is_here
        self._prefill_capture = target.new_capture(chunk) if self._drafts_here else None

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        speculative: bool = True,
        sampling: SamplingParams | None = None,
        stop_ids: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
        request: int = 0,
    ) -> Generation:
        """Continues ``prompt`` by at most ``max_new_tokens`` tokens.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, or too many tokens for the
                model's positions or the cache.
            OutOfPages: the pool is taken by other requests.
            RuntimeError: the target's logits were not numbers, or the tree was unsound.
        """
        begun = time.perf_counter()
        first = self.begin(request, prompt, max_new_tokens, sampling, drafting=speculative)
        tokens, accepted = [first], []
        if on_tokens is not None:
            on_tokens([first], 0)
        cycle = self.speculative if speculative else self.plain
        clock = PhaseClock(self.target.device)
        stop = frozenset(stop_ids)
        prefilled = time.perf_counter()
        try:
            while len(tokens) < max_new_tokens and tokens[-1] not in stop:
                verified = cycle.run(clock)
                emitted, num_accepted = self.read(verified, request)
                accepted.append(num_accepted)
                emitted = emitted[: max_new_tokens - len(tokens)]
                ends = [i + 1 for i, token in enumerate(emitted) if token in stop]
                emitted = emitted[: ends[0]] if ends else emitted
                tokens += emitted
                if on_tokens is not None:
                    on_tokens(emitted, min(num_accepted, len(emitted)))
        finally:
            self.end(request)
        done = time.perf_counter()
        return Generation(
            tokens, accepted, done - prefilled, prefilled - begun, dict(clock.seconds)
        )

    def begin(
        self,
        request: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        drafting: bool = True,
    ) -> int:
        """Reserves the cache, prefills the prompt and returns the first new token.

        Errors as ``generate``; nothing is reserved or written when one is raised.
        """
        config = self.target.config
        if drafting and self.drafter is None:
            raise ValueError("engine: speculative decoding: expected a drafter, got none")
        if not prompt:
            raise ValueError("engine: prompt: expected at least one token, got none")
        if max_new_tokens < 1:
            raise ValueError(f"engine: max_new_tokens: expected at least 1, got {max_new_tokens}")
        wrong = [i for i in prompt if not 0 <= i < config.vocab_size]
        if wrong:
            raise ValueError(
                f"engine: prompt: expected ids in [0, {config.vocab_size}), got {wrong[0]}"
            )
        total = len(prompt) + max_new_tokens
        if total > config.max_position_embeddings:
            raise ValueError(
                f"engine: prompt of {len(prompt)} + {max_new_tokens} new tokens: expected at most "
                f"max_position_embeddings = {config.max_position_embeddings}, got {total}"
            )
        if self.active[request]:
            raise ValueError(f"engine: request: {request} is being decoded")
        self.cache.reserve(request, total + self.slack)
        try:
            drafted = range(len(prompt), total + self.slack)
            self.sampling.set(request, sampling or SamplingParams(), drafted)
            first = self._prefill(
                request,
                prompt,
                drafting and self._drafts_here,
                lambda x: self._choose(x, request, len(prompt) - 1),
            )
        except BaseException:
            self.end(request)
            raise
        self.active[request] = 1
        return first

    def end(self, request: int) -> None:
        """Gives the request's pages back, whether it is done or broken off."""
        self.active[request] = 0
        self.sampling.set(request, SamplingParams())
        self.start.root_tokens[request] = 0
        self.cache.release(request)

    def read(self, verified, request: int) -> tuple[list[int], int]:
        """The tokens that a cycle emitted for ``request``, and how many were drafts."""
        status = VerifyStatus(int(verified.status[request]))
        if status:
            fault = {
                VerifyStatus.NO_TOKEN: "the target's logits are not numbers",
                VerifyStatus.BAD_DRAFT: "the drafter's logits are not numbers",
            }.get(status, "the draft tree or a sampling parameter is unsound")
            raise RuntimeError(f"engine: request {request}: {fault} ({status!r})")
        num_accepted = int(verified.num_accepted[request])
        return verified.tokens[request, : num_accepted + 1].tolist(), num_accepted

    def _prefill(
        self,
        request: int,
        prompt: Sequence[int],
        drafting: bool,
        choose: Callable[[torch.Tensor], int],
    ) -> int:
        """Runs the prompt through target and drafter, chunk by chunk, and returns the first new
        token: what ``choose`` makes of the last row's logits ``[1, V]``.

        A chunk is a chain of nodes to verify. The drafter's row of a chunk's last token takes the
        token after it: the next prompt token, and only after the last chunk the one just chosen.
        """
        cache, target, start = self.cache, self.target, self.start
        device = target.device
        lens = cache.context_lens[request : request + 1]
        tables = cache.block_tables[request : request + 1]
        for begin in range(0, len(prompt), self.chunk):
            part = list(prompt[begin : begin + self.chunk])
            num_tokens, size = len(part), self._chunk_size(len(part))
            is_last = begin + num_tokens == len(prompt)
            # Padded rows see nothing and write nothing.
            slots = torch.arange(size, device=device).unsqueeze(0)
            positions = begin + slots
            slots[:, num_tokens:] = -1
            words = causal_words(size, device)
            words[:, num_tokens:] = 0

            ids = torch.zeros_like(positions)
            ids[0, :num_tokens] = torch.tensor(part)
            step = Step(ids, positions, words, slots, tables, lens)
            capture = self._prefill_capture[:size] if drafting else None
            last_row = torch.tensor([num_tokens - 1], device=device)
            logits = target.forward(step, cache.target, capture, last_row)
            following = choose(logits) if is_last else prompt[begin + num_tokens]
            if drafting:
                ids[0, :num_tokens] = torch.tensor([*part[1:], following])
                feature = self.drafter.fuse(capture)
                feature, normed = self.drafter.forward(step, feature, cache.draft)
                if is_last:
                    start.features[request] = feature[num_tokens - 1]
                    start.logits[request] = self.drafter.logits(normed.index_select(0, last_row))[0]
            lens.fill_(begin + num_tokens)
        start.root_tokens[request] = following
        return following

    def _chunk_size(self, num_tokens: int) -> int:
        """Rows of a chunk: the next power of two, so that few shapes are ever made."""
        size = _SMALLEST_CHUNK
        while size < num_tokens:
            size *= 2
        return min(size, self.chunk)

    def _choose(self, logits: torch.Tensor, request: int, position: int) -> int:
        """The token after the one at ``position``, by the rule of every later cycle."""
        device = logits.device
        none = torch.full((1, 1), -1, dtype=torch.int32, device=device)
        verified = tree_verify(
            logits.unsqueeze(0),
            torch.zeros(1, 1, dtype=torch.int64, device=device),
            none,
            none,
            torch.tensor([position], dtype=torch.int64, device=device),
            **self.sampling.arguments(request),
        )
        return self.read(verified, 0)[0][0]

    def logits_after(self, ids: Sequence[int], request: int = 0) -> torch.Tensor:
        """``[V]`` logits of the token after ``ids``, from a forward of its own."""
        kept = []

        def keep(logits: torch.Tensor) -> int:
            kept.append(logits[0].clone())
            return 0

        self.cache.reserve(request, len(ids) + self.slack)
        try:
            self._prefill(request, ids, False, keep)
        finally:
            self.end(request)
        return kept[0]
