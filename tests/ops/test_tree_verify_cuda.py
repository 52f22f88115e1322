"""``tree_verify`` in CUDA: any call, any schedule, and what only its way of selecting meets."""

import random

import pytest
import torch
from cuda_on_host import host_build
from test_tree_verify import assert_equal, per_request, poisoned_out, random_case, roots_only

from spec_kernels import tree_verify

BACKENDS = ("cuda_on_host",)
LIST = 2048  # kListCapacity of tree_verify_walk.cuh


@pytest.mark.parametrize("schedule", range(6))
def test_any_call_under_any_schedule(backend, schedule):
    if backend == "cuda_on_host":
        machine = host_build.load()
        machine.configure(schedule)
    try:
        for case in range(schedule, 60, 6):
            logits, arguments = random_case(random.Random(case))
            expected = tree_verify(logits, **arguments, backend="reference")
            out = poisoned_out(*expected.accept_index.shape)
            assert_equal(tree_verify(logits, **arguments, out=out, backend=backend), expected)
    finally:
        if backend == "cuda_on_host":
            machine.configure(host_build.schedule())


def agree(logits, backend, **arguments):
    batch = len(logits)
    sampling = per_request(batch, temperature=1.0) | {"seeds": torch.arange(batch)} | arguments
    expected = roots_only(logits, **sampling, backend="reference")
    assert_equal(roots_only(logits, **sampling, backend=backend), expected)
    return expected.tokens.flatten()


@pytest.mark.parametrize("k", [1, LIST, LIST + 1, 2999, 3000, 3001])
def test_ties_that_no_list_takes(backend, dtype, k):
    """Ties at the cut, more of them than the list holds: the lower ids are kept."""
    logits = torch.zeros(4099)
    ties = torch.randperm(4099, generator=torch.Generator().manual_seed(3))[:3000]
    logits[ties] = 2.0
    rows = logits.to(dtype).repeat(3, 1)
    chosen = agree(rows, backend, top_k=torch.full((3,), k))
    assert k > 3000 or (chosen <= ties.sort().values[k - 1]).all()
    # The share of k ties in the mass, as a nucleus: the same cut by weight.
    total = 3000 + 1099 * torch.tensor(-2.0).double().exp()
    top_p = torch.full((3,), float((k - 0.5) / total))
    assert agree(rows, backend, top_p=top_p).equal(chosen) or k > 3000


@pytest.mark.parametrize("scale", [1e-3, 0.05, 1.0, 20.0])
def test_cuts_of_any_size(backend, dtype, scale):
    """Kept sets from one token to all, found in the list or bin by bin; top-k, then a nucleus."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(6, 4500, generator=generator) * scale).to(dtype)
    logits[:, 2000:3000] = -torch.inf
    k = torch.tensor([1, 7, 384, 385, 2049, 3501])
    agree(logits, backend, top_k=k)
    agree(logits, backend, top_p=torch.tensor([1e-6, 0.1, 0.5, 0.9, 0.9999, 1 - 2e-7]))
    agree(logits, backend, top_k=k, top_p=torch.full((6,), 0.7), min_p=torch.full((6,), 0.01))


@pytest.mark.parametrize("offset", range(8))
def test_rows_at_any_alignment(backend, dtype, offset):
    """Vectors of 16 bytes begin where they may; what stands around a row is never read."""
    generator = torch.Generator().manual_seed(offset)
    for vocab in (1, 7, 8, 9, 300, 513):
        wide = torch.full((4, vocab + 16), 100.0, dtype=dtype)
        logits = wide[:, offset : offset + vocab]
        logits.copy_(torch.randn(4, vocab, generator=generator))
        for temperature in (0.0, 1.0):
            agree(logits, backend, temperature=torch.full((4,), temperature))
