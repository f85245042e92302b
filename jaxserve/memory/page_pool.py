"""The free list of KV pages, with reference counts."""

from __future__ import annotations

TRASH_PAGE = 0


class PagePool:
    """Hands out page ids 1 .. num_pages-1; page 0 is the trash page that padding rows write to.

    Pages freed last are handed out first, so a short-lived request reuses warm memory.

    Args:
        num_pages: pages in the device pool, the trash page included; at least 2.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: a pool needs the trash page and one more")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._ref_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference.

        Raises:
            MemoryError: fewer than `count` pages are free; nothing is taken then.
        """
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add a reference to a page in use."""
        if self._ref_counts[page] == 0:
            raise ValueError(f"page {page} is free and cannot be shared")
        self._ref_counts[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop one reference of each page; a page without references is free again."""
        for page in pages:
            count = self._ref_counts[page]
            if count == 0:
                raise ValueError(f"page {page} is released but was free")
            self._ref_counts[page] = count - 1
            if count == 1:
                self._free.append(page)

    def check_integrity(self, holders: list[list[int]]) -> None:
        """Assert that `holders` (every live page list) account for exactly the pages in use."""
        counts = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                counts[page] += 1
        if counts != self._ref_counts:
            raise AssertionError("reference counts differ from the live page lists")
        if sorted(self._free) != [p for p in range(1, self.num_pages) if counts[p] == 0]:
            raise AssertionError("the free list differs from the pages without references")
