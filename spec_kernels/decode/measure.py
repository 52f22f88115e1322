"""What cycles cost on this machine, for choosing among their sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from spec_kernels.decode.adaptive import CostTable
from spec_kernels.decode.captured import CapturedCycles, Kind
from spec_kernels.decode.graph import request_buckets
from spec_kernels.decode.kv_cache import INERT, KVCache
from spec_kernels.decode.prefill import Prefill

# Of each prompt: where the cache hardly counts, so that the table is one of the other costs.
_NUM_TOKENS = 32


def measure_costs(
    cycles: CapturedCycles,
    prefill: Prefill,
    cache: KVCache,
    slack: int,
    rungs: Sequence[int],
    num_repeats: int = 5,
) -> CostTable:
    """Times cycles of ``rungs`` nodes in every bucket, over random prompts, in rows that are free.

    The table is rank 0's, on every rank. OutOfPages where so many short requests do not fit.
    """
    state, device = cycles.state, cycles.target.device
    num_rows = cycles.max_requests
    length = max(1, min(_NUM_TOKENS, cache.capacity - slack))
    random = torch.Generator("cpu").manual_seed(0)
    size = (num_rows, length)
    prompts = torch.randint(state.vocab_size, size, generator=random, device="cpu").tolist()

    def run(num_requests: int, num_nodes: int, kept: int) -> float:
        # Each from the same state, in which nobody comes to an end.
        state.limits[:num_requests].fill_(torch.iinfo(torch.int64).max)
        cache.context_lens.fill_(INERT)[:num_requests].fill_(length)
        kind = Kind(num_nodes, evicts=kept < num_nodes)
        max_nodes = [kept] * num_requests if kind.evicts else None
        _wait(device)
        begun = time.perf_counter()
        cycles.replay(kind, num_requests, max_nodes)
        _wait(device)
        return 1e3 * (time.perf_counter() - begun)

    seconds = dict(cycles.clock.seconds)
    try:
        for row, prompt in enumerate(prompts):
            cache.reserve(row, length + slack)
            prefill.run(row, prompt, drafting=True)
        for num_nodes in rungs:
            for kept in {1, num_nodes}:
                run(num_rows, num_nodes, kept)
        buckets = request_buckets(num_rows)
        costs = CostTable.measure(run, buckets, rungs, num_repeats)
    finally:
        for row in range(num_rows):
            cache.release(row)
            state.clear(row)
        cycles.clock.seconds.update(seconds)
    return CostTable.from_dict(cycles.target.comm.exchange(costs.as_dict())[0])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
