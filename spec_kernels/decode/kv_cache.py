"""Paged K/V storage that target and drafter share: one allocator, one block table, one length.

A request that decodes has a length of at least 0. A row of length -1 is inert: every op takes it
for a padded request, of which nothing is read and for which nothing is written. What is written
past ``context_lens`` is invisible until the length grows over it, so rows of rejected nodes need no
cleaning. Page 0 is never handed out: a table without reservations leads there, and nowhere else.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

INERT = -1


class OutOfPages(RuntimeError):
    """The pool cannot hold what was asked for; nothing was reserved or written."""


class PagePool:
    """Hands out page numbers 1 .. num_pages - 1; page 0 belongs to nobody."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"page pool: num_pages: expected at least 2, got {num_pages}")
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPages(f"page pool: {count} pages asked for, {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


@dataclasses.dataclass
class CacheView:
    """The caches, and the tables and lengths of some requests.

    Attributes:
        target: ``[L, P, page, R + Dr]``; ``layers`` are its L views.
        draft: ``[P, page, 2, Hkv, D]`` or None.
        block_tables: ``[B, M]`` int32; 0 where nothing is reserved.
        context_lens: ``[B]`` int64, committed tokens, the same for target and drafter; -1 = inert.
    """

    target: Tensor
    layers: list[Tensor]
    draft: Tensor | None
    block_tables: Tensor
    context_lens: Tensor

    def view(self, rows: slice) -> CacheView:
        """The same caches for some of the requests; tables and lengths are views."""
        tables, lens = self.block_tables[rows], self.context_lens[rows]
        return CacheView(self.target, self.layers, self.draft, tables, lens)


class KVCache(CacheView):
    """The caches of target and drafter for ``batch`` requests, and the tables that lead into them.

    Args:
        target: makes the target's cache (``new_cache``).
        drafter: makes the drafter's; None, or one that is not here, has no cache.
        batch: requests.
        max_tokens: most tokens one request may hold, drafts in flight included.
        page_size: tokens a page.
        num_pages: pages in the pool; default: enough for every request at ``max_tokens``.
    """

    def __init__(
        self,
        target,
        drafter,
        batch: int,
        max_tokens: int,
        page_size: int = 16,
        num_pages: int | None = None,
    ):
        if batch < 1 or max_tokens < 1 or page_size < 1:
            raise ValueError(
                f"kv cache: expected batch, max_tokens, page_size >= 1, got {batch}, {max_tokens}, "
                f"{page_size}"
            )
        pages_each = -(-max_tokens // page_size)
        num_pages = 1 + batch * pages_each if num_pages is None else num_pages
        self.page_size, self.capacity = page_size, pages_each * page_size
        self.pool = PagePool(num_pages)
        storage = target.new_cache(num_pages, page_size)
        has_drafter = drafter is not None and drafter.is_here
        device = storage.device
        super().__init__(
            target=storage,
            layers=list(storage),
            draft=drafter.new_cache(num_pages, page_size) if has_drafter else None,
            block_tables=torch.zeros(batch, pages_each, dtype=torch.int32, device=device),
            context_lens=torch.full((batch,), INERT, dtype=torch.int64, device=device),
        )
        self._pages: list[list[int]] = [[] for _ in range(batch)]

    def num_pages(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens of one request take.

        ValueError for more than one request may hold.
        """
        if num_tokens > self.capacity:
            raise ValueError(
                f"kv cache: {num_tokens} tokens asked for one request, at most {self.capacity}"
            )
        return -(-num_tokens // self.page_size)

    def reserve(self, row: int, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` tokens in all of the request in ``row``.

        Raises:
            ValueError: more than one request may hold.
            OutOfPages: the pool has too few pages left; nothing has changed.
        """
        pages = self._pages[row]
        missing = self.num_pages(num_tokens) - len(pages)
        if missing <= 0:
            return
        first = len(pages)
        pages += self.pool.take(missing)
        taken = torch.tensor(pages[first:], dtype=torch.int32, device="cpu")
        self.block_tables[row, first : len(pages)].copy_(pinned(taken, self.target.device), True)

    def release(self, row: int) -> None:
        """Gives the pages of ``row`` back, whatever state its decoding was in; it is inert then."""
        self.pool.give_back(self._pages[row])
        self._pages[row] = []
        self.block_tables[row].zero_()
        self.context_lens[row].fill_(INERT)

    def move(self, source: int, row: int) -> None:
        """Puts the request of ``source`` into ``row``, which is free; ``source`` is free then."""
        self._pages[row], self._pages[source] = self._pages[source], []
        for tensor in (self.block_tables, self.context_lens):
            tensor[row].copy_(tensor[source])
        self.block_tables[source].zero_()
        self.context_lens[source].fill_(INERT)

    def rows(self, positions: Tensor, request: int | None = None) -> Tensor:
        """Where to look for what stands in the caches: flat rows ``[B, N]`` of logical positions
        ``[B, N]``, each below ``capacity``; 0, which is nobody's, where nothing is reserved.

        With ``request`` the one row of positions ``[1, N]`` is that request's.
        """
        tables = self.block_tables if request is None else self.block_tables[request : request + 1]
        page = tables.gather(1, positions // self.page_size).long()
        return torch.where(page > 0, page * self.page_size + positions % self.page_size, 0)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """``x`` where it can be copied to ``device`` without a wait."""
    return x.pin_memory() if device.type == "cuda" else x
