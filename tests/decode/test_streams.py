"""Streams of an engine: iterated, awaited, read in parts, closed, and failing each by itself."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from spec_kernels.decode.kv_cache import INERT, OutOfPages
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.testing.tiny_models import PROMPTS

NEW = 12
SETTINGS = (SamplingParams(), SamplingParams(1.0, seed=4), SamplingParams(0.6, top_p=0.9, seed=9))


@pytest.fixture
def wanted(tiny) -> list[list[int]]:
    """Tokens of each prompt at its setting, decoded alone."""
    engine = tiny.engine(max_tokens=64)
    return [
        engine.generate(prompt, NEW, sampling=sampling).result().tokens
        for prompt, sampling in zip(PROMPTS, SETTINGS, strict=True)
    ]


def streams(engine, prompts=PROMPTS, **options):
    return [
        engine.generate(prompt, NEW, sampling=sampling, **options)
        for prompt, sampling in zip(prompts, SETTINGS, strict=True)
    ]


def counted(engine) -> list[int]:
    """Grows by the number of requests in the batch with each cycle."""
    launch, cycles = engine.batch.step, []

    def step():
        found = launch()
        cycles.append(engine.batch.num_requests)
        return found

    engine.batch.step = step
    return cycles


def is_empty(engine) -> bool:
    cache = engine.batch.cache
    free = cache.pool.num_free == cache.pool.num_pages
    return free and bool((cache.context_lens == INERT).all()) and not engine.batch.num_requests


# --------------------------------------------------------------------------------------- reading


def test_iteration_gives_the_tokens_one_by_one(tiny, wanted):
    engine = tiny.engine(max_requests=3)
    first, second, third = streams(engine)
    assert list(first) == wanted[0] and list(first) == []
    # In turns: who asks runs the engine for all.
    taken = [], []
    for pair in zip(second, third, strict=True):
        for tokens, token in zip(taken, pair, strict=True):
            tokens.append(token)
    assert list(taken) == wanted[1:]
    assert is_empty(engine)


def test_parts_and_result_add_up(tiny, wanted):
    engine = tiny.engine(max_requests=3)
    first, second, _ = streams(engine)
    parts = list(first.parts())
    assert [t for part in parts for t in part.tokens] == wanted[0]
    assert [part.is_done for part in parts] == [False] * (len(parts) - 1) + [True]
    result = first.result()
    assert result.tokens == wanted[0]
    assert result.accepted == [part.num_accepted for part in parts[1:]]
    assert result.prefill_seconds > 0 and result.seconds > 0
    # After some tokens were taken, the result is still all of them.
    assert [next(second) for _ in range(3)] == wanted[1][:3]
    assert second.result().tokens == wanted[1]
    assert list(second) == wanted[1][3:]


def test_nothing_runs_before_somebody_asks(tiny):
    engine = tiny.engine()
    cycles = counted(engine)
    stream = engine.generate(PROMPTS[0], NEW)
    assert not cycles and engine.batch.num_requests == 0
    next(stream)
    assert len(cycles) == 1


def test_a_prompt_that_its_owner_goes_on_writing_is_taken_as_it_was(tiny, wanted):
    engine = tiny.engine()
    engine.generate(PROMPTS[1], NEW)
    prompt = list(PROMPTS[0])
    stream = engine.generate(prompt, NEW)
    prompt += [1, 2, 3]
    assert stream.result().tokens == wanted[0]


@pytest.mark.parametrize("read_behind", [0, 1, 2])
def test_reading_behind_gives_the_same(tiny, wanted, read_behind):
    engine = tiny.engine(max_requests=2, read_behind=read_behind)
    assert [stream.result().tokens for stream in streams(engine)] == wanted
    assert is_empty(engine)


# ------------------------------------------------------------------------------------- coroutines


def test_tasks_read_their_streams_at_once(tiny, wanted):
    engine = tiny.engine(max_requests=2)
    cycles = counted(engine)

    async def read(stream):
        return [token async for token in stream]

    async def everything():
        return await asyncio.gather(*map(read, streams(engine)))

    assert asyncio.run(everything()) == wanted
    assert is_empty(engine) and cycles
    # Another event loop, the same engine.
    assert asyncio.run(everything()) == wanted


def test_tasks_do_not_step_for_what_came_while_they_waited_for_their_turn(tiny, wanted):
    engine = tiny.engine(max_requests=3)
    cycles = counted(engine)
    every = streams(engine)

    async def one_of_each():
        return await asyncio.gather(*map(anext, every))

    assert asyncio.run(one_of_each()) == [tokens[0] for tokens in wanted]
    assert cycles == [3]


def test_a_cancelled_task_leaves_the_others_as_they_are(tiny, wanted):
    engine = tiny.engine(max_requests=3)
    begun, go_on = threading.Event(), threading.Event()
    step = engine.batch.step
    running, most = [], []

    def slow():
        running.append(None)
        most.append(len(running))
        if len(most) == 3:
            begun.set()
            assert go_on.wait(60)
        found = step()
        running.pop()
        return found

    engine.batch.step = slow

    async def read(stream):
        return [token async for token in stream]

    async def everything():
        tasks = [asyncio.create_task(read(stream)) for stream in streams(engine)]
        await asyncio.to_thread(begun.wait, 60)
        # Whoever runs the step is among them; its thread goes on.
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = asyncio.run(everything())
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, asyncio.CancelledError)
    assert third == wanted[2]
    assert max(most) == 1  # one step at a time


def test_closing_waits_for_the_step_under_way(tiny, wanted):
    """A row that moves in the middle of a cycle would give others its tokens."""
    engine = tiny.engine(max_requests=3)
    first, second, third = streams(engine)
    next(first), next(second), next(third)
    cycle = engine.batch.cycle(3)
    build, closer = cycle.proposal.build, []

    def interrupted(confidence):
        if not closer:
            closer.append(threading.Thread(target=first.close))
            closer[0].start()
            # Long enough for a close that does not wait; too short a time hides a fault only.
            closer[0].join(0.2)
            assert closer[0].is_alive()
        return build(confidence)

    cycle.proposal.build = interrupted
    rest = second.result().tokens, third.result().tokens
    closer[0].join(60)
    assert rest == tuple(wanted[1:])
    assert first.is_done and first.result().tokens == wanted[0][: len(first.result().tokens)]
    assert is_empty(engine)


def test_threads_read_their_streams_at_once(tiny, wanted):
    engine = tiny.engine(max_requests=3)
    got = [None] * 3

    def read(index, stream):
        got[index] = list(stream)

    threads = [
        threading.Thread(target=read, args=(index, stream))
        for index, stream in enumerate(streams(engine))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == wanted
    assert is_empty(engine)


# ---------------------------------------------------------------------------------------- the queue


def test_requests_join_in_the_order_of_their_coming(tiny, wanted):
    engine = tiny.engine(max_requests=2)
    joined, join = [], engine.batch.join
    engine.batch.join = lambda request: joined.append(tuple(request.prompt)) or join(request)
    first, second, third = streams(engine)
    assert third.result().tokens == wanted[2]
    assert joined == [tuple(prompt) for prompt in PROMPTS]
    assert [first.result().tokens, second.result().tokens] == wanted[:2]


def test_a_long_request_is_not_overtaken_by_a_short_one(tiny):
    engine = tiny.engine(max_requests=3, num_pages=1 + 6, page_size=8)
    pages = engine.batch.num_pages
    running = engine.generate(PROMPTS[1], NEW)
    long = engine.generate(PROMPTS[1], NEW)
    short = engine.generate(PROMPTS[2], 2)
    needed = [pages(s.request) for s in (running, long, short)]
    assert needed[0] + needed[1] > 6 >= needed[0] + needed[2]
    order = []
    join = engine.batch.join
    engine.batch.join = lambda request: order.append(request) or join(request)
    next(running)
    engine.step()
    assert order == [running.request]
    assert long.result().tokens == running.result().tokens
    short.result()
    assert order == [running.request, long.request, short.request]
    assert is_empty(engine)


def test_what_can_never_fit_is_refused_at_once(tiny):
    engine = tiny.engine(num_pages=1 + 3, page_size=8)
    with pytest.raises(OutOfPages, match="engine: .* pages asked for, of 3 in all"):
        engine.generate(PROMPTS[1], NEW)
    with pytest.raises(ValueError, match="at most"):
        engine.generate([1] * 100, NEW)
    assert len(engine.generate(PROMPTS[2], NEW).result().tokens) == NEW


# ----------------------------------------------------------------------------------------- closing


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("read_behind", [0, 1])
def test_closing_gives_the_pages_back_and_leaves_others_alone(
    tiny, wanted, num_tokens, read_behind
):
    engine = tiny.engine(max_requests=2, read_behind=read_behind)
    first, second, waiting = streams(engine)
    taken = [next(first) for _ in range(num_tokens)]
    before = engine.batch.cache.pool.num_free
    held = engine.batch.num_pages(first.request) if num_tokens else 0
    first.close()
    assert engine.batch.cache.pool.num_free == before + held
    first.close()
    # The tokens that were there already may still be read.
    taken += list(first)
    assert taken == wanted[0][: len(taken)] and len(taken) < NEW
    assert first.result().tokens == taken
    assert [second.result().tokens, waiting.result().tokens] == wanted[1:]
    assert is_empty(engine)


def test_closing_who_waits_takes_it_out_of_the_queue(tiny, wanted):
    engine = tiny.engine()
    first, second, third = streams(engine)
    next(first)
    second.close()
    assert list(second) == [] and second.result().tokens == []
    assert third.result().tokens == wanted[2]
    assert first.result().tokens == wanted[0]
    third.close()  # nothing to break off
    assert third.result().tokens == wanted[2]


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("reader", ["result", "parts", "tokens", "tasks"])
def test_an_error_reaches_its_own_stream_and_no_other(tiny, wanted, reader):
    engine = tiny.engine(max_requests=3)
    every = streams(engine)
    engine.step()
    pages = [page for page in engine.batch.cache.block_tables[1].tolist() if page]
    with torch.inference_mode():
        engine.batch.cache.target[:, pages] = float("nan")

    def read(stream):
        if reader == "result":
            return stream.result().tokens
        if reader == "parts":
            return [token for part in stream.parts() for token in part.tokens]
        return list(stream)

    async def read_async(stream):
        return [token async for token in stream]

    async def everything():
        return await asyncio.gather(*map(read_async, every), return_exceptions=True)

    if reader == "tasks":
        first, error, third = asyncio.run(everything())
    else:
        # The others' readers run the cycle in which it fails.
        first, third = read(every[0]), read(every[2])
        with pytest.raises(RuntimeError) as caught:
            read(every[1])
        error = caught.value
    assert "request 1: the target's logits are not numbers" in str(error)
    assert [first, third] == [wanted[0], wanted[2]]
    for _ in range(2):  # it does not go away
        with pytest.raises(RuntimeError, match="not numbers"):
            every[1].result()
    assert is_empty(engine)
    assert streams(engine)[1].result().tokens == wanted[1]


def test_a_prompt_that_fails_reaches_its_own_stream_and_no_other(tiny, wanted):
    engine = tiny.engine(max_requests=3)
    run = engine.batch.prefill.run

    def failing(row, prompt, drafting):
        if list(prompt) == PROMPTS[1]:
            raise RuntimeError("out of memory")
        return run(row, prompt, drafting)

    engine.batch.prefill.run = failing
    first, second, third = streams(engine)
    assert [first.result().tokens, third.result().tokens] == [wanted[0], wanted[2]]
    with pytest.raises(RuntimeError, match="out of memory"):
        second.result()
    with pytest.raises(RuntimeError, match="out of memory"):
        next(second)
    assert is_empty(engine)


def test_a_cycle_that_fails_is_not_swallowed(tiny):
    engine = tiny.engine(max_requests=3)
    first, second, _ = streams(engine)
    next(first)

    def failing():
        raise RuntimeError("a rank is gone")

    engine.batch.step = failing
    for stream in (first, second):
        with pytest.raises(RuntimeError, match="a rank is gone"):
            stream.result()
