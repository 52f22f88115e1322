"""Streams of an engine: iterated, awaited, read in parts, closed, and failing each by itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest
import torch

from spec_kernels.decode.engine import Engine
from spec_kernels.decode.kv_cache import INERT, OutOfPages
from spec_kernels.decode.sampling import SamplingOptions, SamplingParams
from spec_kernels.testing.tiny_models import PLANS, PROMPTS

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


@pytest.mark.parametrize("kind", PLANS)
def test_engines_over_one_target_take_turns_in_their_threads(tiny, kind):
    """The buffers of a step are the target's: two steps at once would mix up their rows."""
    models = tiny.models()
    engines = [Engine(*models, PLANS[kind], max_tokens=64) for _ in range(2)]
    wanted = [engines[0].generate(prompt, NEW).result().tokens for prompt in PROMPTS]
    got = [[], []]

    def read(index):
        for prompt in PROMPTS * 2:
            got[index].append(engines[index].generate(prompt, NEW).result().tokens)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [wanted * 2] * 2


@contextlib.contextmanager
def _defaults(dtype, device, autocast):
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "defaults",
    [
        (torch.bfloat16, None, False),
        (torch.float64, None, False),
        (torch.float32, "meta", False),
        (torch.float32, None, True),
    ],
    ids=["bfloat16", "float64", "meta", "autocast"],
)
@pytest.mark.parametrize("plan", [PLANS["static"], PLANS["dynamic"]], ids=["static", "dynamic"])
def test_defaults_of_torch_change_nothing(tiny, plan, defaults):
    sampling = SamplingParams(0.7, seed=3, logit_bias={3: 1.0}, allowed=range(30))
    options = SamplingOptions(logit_bias=True, allowed=True)

    def made():
        engine = Engine(*models, plan, max_tokens=64, max_requests=3, sampling=options)
        return [engine.generate(prompt, NEW, sampling=sampling) for prompt in PROMPTS]

    models = tiny.models()
    wanted = [stream.result().tokens for stream in made()]
    begun = made()
    next(begun[0])
    with _defaults(*defaults):
        assert [stream.result().tokens for stream in begun] == wanted
        assert [stream.result().tokens for stream in made()] == wanted


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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_breaks_off_loses_nothing_that_was_read(tiny, wanted, kind):
    """A request that is done would otherwise be waited for without end."""
    engine = tiny.engine(max_requests=2)
    done = engine.generate(PROMPTS[0], 1)
    other = engine.generate(PROMPTS[1], NEW, sampling=SETTINGS[1])
    launch = engine.batch._launch

    def failing():
        engine.batch._launch = launch
        raise kind("stop")

    engine.batch._launch = failing
    with pytest.raises(kind, match="stop"):
        engine.step()
    engine.step()
    assert done.is_done and done.result().tokens == wanted[0][:1]
    assert other.result().tokens == wanted[1]
    assert is_empty(engine)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"prompt": [1.5, 2]}, r"batch: prompt: expected integers, got \[1.5, 2\]"),
        ({"prompt": [float("nan")]}, r"batch: prompt: expected integers, got \[nan\]"),
        ({"prompt": "text"}, "batch: prompt: expected integers, got 'text'"),
        ({"prompt": torch.ones(2, 2)}, "batch: prompt: expected integers, got tensor"),
        ({"prompt": None}, "batch: prompt: expected integers, got None"),
        # The device would compare with 5, the host with 5.5: each would wait for the other.
        ({"stop_ids": [5.5]}, r"batch: stop_ids: expected integers, got \[5.5\]"),
        ({"stop_ids": None}, "batch: stop_ids: expected integers, got None"),
        ({"max_new_tokens": 2.5}, r"batch: max_new_tokens: expected integers, got \[2.5\]"),
        ({"sampling": {"seed": 1}}, "batch: sampling: expected SamplingParams, got dict"),
        # No comparison with it is true: it would wait at the head of the queue for ever.
        ({"max_new_tokens": float("nan")}, "batch: max_new_tokens: expected integers"),
    ],
)
def test_values_of_another_kind_are_refused_at_once(tiny, wanted, change, match):
    engine = tiny.engine()
    with pytest.raises(ValueError, match=match):
        engine.generate(**{"prompt": PROMPTS[0], "max_new_tokens": NEW} | change)
    assert engine.generate(PROMPTS[0], NEW).result().tokens == wanted[0]


def test_integers_of_other_kinds_are_taken_as_such(tiny, wanted):
    engine = tiny.engine()
    for prompt in (torch.tensor(PROMPTS[0]), np.array(PROMPTS[0], np.int32), iter(PROMPTS[0])):
        stream = engine.generate(prompt, np.int64(NEW), stop_ids={wanted[0][5]})
        assert stream.result().tokens == wanted[0][: 1 + wanted[0].index(wanted[0][5])]


def test_logits_of_ids_outside_the_vocabulary_are_refused(tiny, wanted):
    engine = tiny.engine()
    for ids, match in (
        ([1, 40], r"batch: logits_after: expected ids in \[0, 40\), got 40"),
        ([-1], r"batch: logits_after: expected ids in \[0, 40\), got -1"),
        ([1.5], r"batch: logits_after: expected integers, got \[1.5\]"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.logits_after(ids)
    assert is_empty(engine)
    assert int(engine.logits_after(PROMPTS[0]).argmax()) == wanted[0][0]
