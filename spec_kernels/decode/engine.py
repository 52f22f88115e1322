"""Prompts in, streams of tokens out: a queue before a ``Batch``, and iterators behind it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import torch

from spec_kernels.decode.batch import Batch, Emitted, Request
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.kv_cache import OutOfPages
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.target import Target


@dataclasses.dataclass
class Generation:
    """What one prompt gave.

    Attributes:
        tokens: emitted ids, the stop id included if one ended it.
        accepted: drafts accepted in each cycle (0 for every plain one).
        seconds: from the first token to the last; ``prefill_seconds`` to the first one.
        phase_seconds: of the cycles meanwhile, by phase, for all requests that shared them.
    """

    tokens: list[int]
    accepted: list[int]
    seconds: float
    prefill_seconds: float
    phase_seconds: dict[str, float]


class Stream:
    """The tokens of one request, as they come: iterate over it, or ``async for``.

    Whoever asks for the next token runs the engine, for all of its streams, until it is there.
    """

    def __init__(self, engine: Engine, request: Request):
        self.engine, self.request = engine, request
        self.is_done = False
        self._parts: deque[Emitted] = deque()
        self._rest: deque[int] = deque()
        self._error: Exception | None = None
        self._result = Generation([], [], 0.0, 0.0, {})
        self._begun = self._first = time.perf_counter()
        self._phases: dict[str, float] = {}

    def parts(self) -> Iterator[Emitted]:
        """What each cycle gave: not together with iteration over single tokens.

        Raises:
            RuntimeError: the target's logits were not numbers, or the tree was unsound.
        """
        while self._needs_more():
            self.engine.step()
        while self._parts:
            yield self._parts.popleft()
            while self._needs_more():
                self.engine.step()
        self._finish()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while self._needs_token():
            self.engine.step()
        return self._next(StopIteration)

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        while self._needs_token():
            await self.engine.step_async(self._needs_token)
        return self._next(StopAsyncIteration)

    def result(self) -> Generation:
        """Runs the request to its end and returns all of it. Errors as ``parts``."""
        while not self.is_done:
            self.engine.step()
        self._finish()
        return self._result

    def close(self) -> None:
        """Breaks the request off: its pages are free at once, and the tokens so far are all."""
        if not self.is_done:
            self.engine.withdraw(self)

    def _needs_more(self) -> bool:
        return not self._parts and not self.is_done

    def _needs_token(self) -> bool:
        return not self._rest and self._needs_more()

    def _next(self, end: type[Exception]) -> int:
        if not self._rest and self._parts:
            self._rest.extend(self._parts.popleft().tokens)
        if not self._rest:
            self._finish()
            raise end
        return self._rest.popleft()

    def _finish(self) -> None:
        if self._error is not None:
            raise self._error

    def joined(self, phases: dict[str, float]) -> None:
        """The engine's: its prompt begins."""
        self._begun, self._phases = time.perf_counter(), dict(phases)

    def receive(self, part: Emitted, phases: dict[str, float]) -> None:
        """The engine's: what a cycle gave, and the clock after it."""
        now, result = time.perf_counter(), self._result
        if part.num_accepted is None:
            self._first = now
            result.prefill_seconds = now - self._begun
            # The clock does not run for prompts, but for others' cycles meanwhile.
            self._phases = dict(phases)
        elif part.error is None:
            result.accepted.append(part.num_accepted)
        result.tokens += part.tokens
        result.seconds = now - self._first
        result.phase_seconds = {k: v - self._phases[k] for k, v in phases.items()}
        if part.error is None:
            self._parts.append(part)
        self._error = part.error
        self.is_done = part.is_done

    def closed(self, error: Exception | None = None) -> None:
        """The engine's: nothing will follow, but ``error``."""
        self._error, self.is_done = error, True


class Engine:
    """Serves requests in the order of their coming, as many at a time as there is room for.

    Its streams may be used from several threads and event loops: one step runs at a time.

    Args:
        target, drafter, plan, and further ones: as ``Batch``.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | AbsentDrafter | None = None,
        plan: DraftPlan | None = None,
        **options,
    ):
        self.batch = Batch(target, drafter, plan, **options)
        self._waiting: deque[Stream] = deque()
        self._streams: dict[int, Stream] = {}
        # A closed stream must not change the batch in the middle of a cycle, nor may a cancelled
        # task's step, whose thread goes on, meet the next one.
        self._lock = threading.Lock()
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        speculative: bool = True,
        sampling: SamplingParams | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Stream:
        """Continues ``prompt`` by at most ``max_new_tokens`` tokens.

        It joins as soon as a row and pages are free, after those that came before. Nothing runs
        until somebody asks for tokens: ``for token in engine.generate(...)``, ``async for``, or
        ``engine.generate(...).result()``.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, or too many tokens for the
                model's positions or the cache.
            OutOfPages: the pool is too small for it even when nobody else is there.
        """
        params = sampling or SamplingParams()
        request = Request(prompt, max_new_tokens, params, stop_ids, speculative)
        needed, pool = self.batch.num_pages(request), self.batch.cache.pool
        if needed > pool.num_pages:
            raise OutOfPages(f"engine: {needed} pages asked for, of {pool.num_pages} in all")
        stream = Stream(self, request)
        self._waiting.append(stream)
        return stream

    def step(self) -> None:
        """Lets in who has room, runs one cycle, and hands its tokens out."""
        with self._lock:
            self._admit()
            for part in self.batch.step():
                stream = self._streams[part.request]
                stream.receive(part, self.batch.clock.seconds)
                if part.is_done:
                    del self._streams[part.request]

    async def step_async(self, is_needed: Callable[[], bool]) -> None:
        """``step`` on another thread, if it ``is_needed`` still when the caller's turn comes."""
        # Read once: the loop of another thread may put its own turn in place meanwhile.
        loop, turn = asyncio.get_running_loop(), self._turn
        if turn is None or turn[0] is not loop:
            turn = self._turn = (loop, asyncio.Lock())
        async with turn[1]:
            if is_needed():
                await asyncio.to_thread(self.step)

    def withdraw(self, stream: Stream) -> None:
        """Takes a request out, wherever it stands, once the step under way is done."""
        with self._lock:
            if stream in self._waiting:
                self._waiting.remove(stream)
            for name, other in list(self._streams.items()):
                if other is stream:
                    self.batch.leave(name)
                    del self._streams[name]
            if not stream.is_done:
                stream.closed()

    def logits_after(self, ids: Sequence[int]) -> torch.Tensor:
        """``[V]`` logits of the token after ``ids``, from a forward of its own."""
        with self._lock:
            return self.batch.logits_after(ids)

    def _admit(self) -> None:
        while self._waiting and self.batch.has_room(self._waiting[0].request):
            stream = self._waiting.popleft()
            stream.joined(self.batch.clock.seconds)
            try:
                name = self.batch.join(stream.request)
            except Exception as error:
                # It reaches whoever reads this stream, which need not be who runs the step.
                stream.closed(error)
                continue
            except BaseException:
                stream.closed()
                raise
            self._streams[name] = stream
