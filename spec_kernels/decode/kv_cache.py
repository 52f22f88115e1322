"""Paged K/V storage that target and drafter share: one allocator, one block table, one length.

Rows of a request that has nothing reserved are absent: ``slots`` is -1 for them. What is written
past ``context_lens`` is invisible until the length grows over it, so rows of rejected nodes need no
cleaning. Page 0 is never handed out: a table without reservations leads there, and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OutOfPages(RuntimeError):
    """The pool cannot hold what was asked for; nothing was reserved or written."""


class PagePool:
    """Hands out page numbers 1 .. num_pages - 1; page 0 belongs to nobody."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"page pool: num_pages: expected at least 2, got {num_pages}")
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


class KVCache:
    """The caches of target and drafter for ``batch`` requests, and the tables that lead into them.

    Args:
        target: makes the target's cache (``new_cache``).
        drafter: makes the drafter's; None, or one that is not here, has no cache.
        batch: requests.
        max_tokens: most tokens one request may hold, drafts in flight included.
        page_size: tokens a page.
        num_pages: pages in the pool; default: enough for every request at ``max_tokens``.

    Attributes:
        target: ``[L, P, page, R + Dr]``; ``layers`` are its L views.
        draft: ``[P, page, 2, Hkv, D]`` or None.
        block_tables: ``[B, M]`` int32; 0 where nothing is reserved.
        context_lens: ``[B]`` int64, committed tokens; the same for target and drafter.
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
        self.target = target.new_cache(num_pages, page_size)
        self.layers = list(self.target)
        has_drafter = drafter is not None and drafter.is_here
        self.draft = drafter.new_cache(num_pages, page_size) if has_drafter else None
        device = self.target.device
        self.block_tables = torch.zeros(batch, pages_each, dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(batch, dtype=torch.int64, device=device)
        self._is_reserved = torch.zeros(batch, 1, dtype=torch.bool, device=device)
        self._pages: list[list[int]] = [[] for _ in range(batch)]

    def reserve(self, request: int, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` tokens of ``request`` in all.

        Raises:
            ValueError: more than one request may hold.
            OutOfPages: the pool has too few pages left; nothing has changed.
        """
        if num_tokens > self.capacity:
            raise ValueError(
                f"kv cache: {num_tokens} tokens asked for request {request}, at most "
                f"{self.capacity}"
            )
        pages = self._pages[request]
        missing = -(-num_tokens // self.page_size) - len(pages)
        if missing <= 0:
            return
        first = len(pages)
        pages += self.pool.take(missing)
        taken = torch.tensor(pages[first:], dtype=torch.int64)
        self.block_tables[request, first : len(pages)] = taken.to(self.block_tables)
        self._is_reserved[request] = True

    def release(self, request: int) -> None:
        """Gives the pages of ``request`` back, whatever state its decoding was in."""
        self.pool.give_back(self._pages[request])
        self._pages[request] = []
        self.block_tables[request] = 0
        self._is_reserved[request] = False
        self.context_lens[request] = 0

    def slots(self, ids: Tensor) -> Tensor:
        """``Step.slots [B, N]`` of rows ``ids [N]`` past the committed length, reserved before."""
        return torch.where(self._is_reserved, ids, -1)

    def rows(self, positions: Tensor, request: int | None = None) -> Tensor:
        """Where to look for what stands in the caches: flat rows ``[B, N]`` of logical positions
        ``[B, N]``, each below ``capacity``; 0, which is nobody's, where nothing is reserved.

        With ``request`` the one row of positions ``[1, N]`` is that request's.
        """
        tables = self.block_tables if request is None else self.block_tables[request : request + 1]
        page = tables.gather(1, positions // self.page_size).long()
        return torch.where(page > 0, page * self.page_size + positions % self.page_size, 0)
