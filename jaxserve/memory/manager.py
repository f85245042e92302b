"""Which pages a request owns, and which of them the device has still to be told about."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.memory.page_pool import PagePool
from jaxserve.request import Request


class PageUpdate(NamedTuple):
    """One entry of the device's page table: `page_table[slot, page_index] = page`."""

    slot: int
    page_index: int
    page: int


class PageManager:
    """Grows and frees the page lists of requests.

    The host's page lists are the truth. The device keeps a copy of the page table, row by slot,
    which each step brings up to date with the few entries that the step is the first to use.

    Args:
        num_pages: pages in the pool, the trash page included.
        page_size: tokens a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.pool = PagePool(num_pages)
        self.page_size = page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def usage(self) -> float:
        """Share of the pages that requests own, 0 to 1."""
        return self.pool.num_used / (self.pool.num_pages - 1)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give `request` pages for `num_tokens` tokens; False, and no change, if too few free."""
        missing = self.pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        request.pages += self.pool.allocate(missing)
        return True

    def share(self, request: Request, pages: list[int]) -> None:
        """Make `request`, which owns no page yet, one more owner of pages of its prompt."""
        self.pool.share(pages)
        request.pages = list(pages)

    def publish(self, request: Request, num_tokens: int, updates: list[PageUpdate]) -> None:
        """Append the page-table entries that the device lacks to reach the first `num_tokens`."""
        covered = self.pages_for(num_tokens)
        slot = request.slot
        assert slot is not None
        for index in range(request.num_published, covered):
            updates.append(PageUpdate(slot, index, request.pages[index]))
        request.num_published = max(request.num_published, covered)

    def release(self, request: Request) -> None:
        """Free every page of `request`."""
        self.pool.release(request.pages)
        request.pages = []
        request.num_published = 0
