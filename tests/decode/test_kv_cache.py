"""The paged allocator: what is reserved, what is refused, and where unreserved rows go."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.decode.kv_cache import INERT, KVCache, OutOfPages, PagePool


class Cacheless:
    """Stands for a target or drafter whose cache rows are single numbers."""

    is_here = True

    def __init__(self, num_layers=0):
        self.num_layers = num_layers

    def new_cache(self, num_pages, page_size):
        layers = (self.num_layers,) if self.num_layers else ()
        return torch.zeros(*layers, num_pages, page_size, 1)


def cache(batch=2, max_tokens=10, page_size=4, **options):
    return KVCache(Cacheless(3), Cacheless(), batch, max_tokens, page_size, **options)


def test_target_and_drafter_are_sized_together():
    c = cache()
    assert c.target.shape == (3, 7, 4, 1) and c.draft.shape == (7, 4, 1)
    assert c.capacity == 12
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(c.layers, c.target, strict=True))


def test_rows_follow_the_block_table():
    c = cache()
    c.reserve(1, 3)
    c.reserve(0, 5)
    c.reserve(1, 10)
    at = torch.arange(12).expand(2, -1)
    rows, table = c.rows(at), c.block_tables.long()
    for request, reserved in ((0, 8), (1, 12)):
        wanted = table[request, at[0] // 4] * 4 + at[0] % 4
        assert torch.equal(rows[request, :reserved], wanted[:reserved])
        assert torch.equal(c.rows(at[:1], request), rows[request : request + 1])
    used = torch.cat((rows[0, :8], rows[1, :12]))
    assert used.unique().numel() == 20 and used.min() >= 4  # nobody owns page 0


def test_unreserved_positions_lead_to_page_0():
    c = cache()
    c.reserve(0, 4)
    rows = c.rows(torch.arange(12).expand(2, -1))
    assert (rows[0, 4:] == 0).all() and (rows[1] == 0).all()


def test_release_gives_everything_back():
    c = cache()
    c.reserve(0, 12)
    c.context_lens[0] = 7
    c.release(0)
    assert c.pool.num_free == 6
    assert not c.block_tables.any() and c.context_lens.tolist() == [INERT, INERT]
    assert not c.rows(torch.arange(12).expand(2, -1)).any()
    c.release(0)
    assert c.pool.num_free == 6


def test_a_request_moves_with_its_pages_and_length():
    c = cache()
    c.reserve(1, 10)
    c.context_lens[1] = 9
    at = torch.arange(12).unsqueeze(0)
    rows = c.rows(at, 1)
    c.move(1, 0)
    assert torch.equal(c.rows(at, 0), rows) and not c.rows(at, 1).any()
    assert c.context_lens.tolist() == [9, INERT]
    assert c.pool.num_free == 3
    c.reserve(0, 12)  # what it holds is known where it went
    assert c.pool.num_free == 3
    c.release(0)
    assert c.pool.num_free == 6


def test_a_view_of_some_requests_shares_the_storage():
    c = cache()
    c.reserve(1, 10)
    view = c.view(slice(1, 2))
    assert view.target is c.target and view.draft is c.draft and view.layers is c.layers
    assert torch.equal(view.block_tables[0], c.block_tables[1])
    view.context_lens.fill_(5)
    assert c.context_lens.tolist() == [INERT, 5]


def test_refusals_change_nothing():
    c = cache(num_pages=4)
    c.reserve(0, 5)
    before = c.block_tables.clone(), c.rows(torch.arange(12).expand(2, -1)).clone()
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 free"):
        c.reserve(1, 8)
    with pytest.raises(ValueError, match="13 tokens asked for one request, at most 12"):
        c.reserve(1, 13)
    assert torch.equal(c.block_tables, before[0])
    assert torch.equal(c.rows(torch.arange(12).expand(2, -1)), before[1])
    assert c.pool.num_free == 1
    c.reserve(1, 4)


@pytest.mark.parametrize("sizes", [(0, 10, 4), (1, 0, 4), (1, 10, 0)])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="expected batch, max_tokens, page_size >= 1"):
        cache(*sizes)
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1)
