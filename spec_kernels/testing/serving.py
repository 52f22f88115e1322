"""Requests served by a batch from the first to the last, to compare ways of running its cycles."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

from spec_kernels.decode.batch import Batch, Request
from spec_kernels.decode.sampling import SamplingParams


@dataclasses.dataclass
class Served:
    """What came of each request, by its number.

    Attributes:
        tokens, accepted: emitted ids, and drafts accepted in each cycle.
        sizes: requests in the batch, cycle by cycle.
    """

    tokens: list[list[int]]
    accepted: list[list[int]]
    sizes: list[int]


def requests(
    prompts: Sequence[Sequence[int]],
    count: int,
    num_new: int,
    *,
    samples: bool = False,
    plain_every: int = 0,
) -> list[Request]:
    """``count`` requests of different lengths, so that they come and go at different cycles.

    Args:
        samples: every second one does, with a seed of its own.
        plain_every: every so many makes no drafts; 0 = none of them, 1 = all.
    """
    made = []
    for i in range(count):
        sampling = SamplingParams()
        if samples and i % 2:
            sampling = SamplingParams(0.9, top_k=20, top_p=0.95, min_p=0.01, seed=i)
        length = max(1, num_new - 5 * i % max(1, num_new // 2))
        speculative = not (plain_every and i % plain_every == plain_every - 1)
        prompt = prompts[i % len(prompts)]
        made.append(Request(prompt, length, sampling, speculative=speculative))
    return made


def serve(
    batch: Batch, requests: Sequence[Request], aborts: Mapping[int, int] | None = None
) -> Served:
    """Lets requests join in their order, as there is room, and decodes until all have left.

    Args:
        aborts: for some requests, by number, after how many tokens or more they are broken off.

    Raises whatever a request failed with.
    """
    aborts = aborts or {}
    served = Served([[] for _ in requests], [[] for _ in requests], [])
    waiting, numbers = deque(enumerate(requests)), {}
    while waiting or batch.num_requests:
        while waiting and batch.has_room(waiting[0][1]):
            number, request = waiting.popleft()
            numbers[batch.join(request)] = number
        served.sizes.append(batch.num_requests)
        for part in batch.step():
            number = numbers.get(part.request)
            if number is None:
                continue
            if part.error is not None:
                raise part.error
            served.tokens[number] += part.tokens
            if part.num_accepted is not None:
                served.accepted[number].append(part.num_accepted)
            if not part.is_done and len(served.tokens[number]) >= aborts.get(number, 1 << 62):
                batch.leave(part.request)
                del numbers[part.request]
    # What was launched for the last ones before their end was known.
    batch.step()
    return served
