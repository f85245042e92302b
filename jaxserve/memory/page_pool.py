"""The free list of KV pages, and how many own each of the others."""

from __future__ import annotations

from collections import Counter

TRASH_PAGE = 0


class PagePool:
    """Hands out page ids 1 .. num_pages-1; page 0 is the trash page that padding rows write to.

    A page may have several owners, who only read it; it is free when the last one gave it back.
    Pages freed last are handed out first, so a short-lived request reuses warm memory.

    Args:
        num_pages: pages in the device pool, the trash page included; at least 2.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: a pool needs the trash page and one more")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._num_owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages.

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
            self._num_owners[page] = 1
        return pages

    def has_sole_owner(self, pages: list[int]) -> bool:
        """Whether one of the pages would be free without one of its owners."""
        return any(self._num_owners[page] == 1 for page in pages)

    def share(self, pages: list[int]) -> None:
        """Add an owner to pages that have one.

        Raises:
            ValueError: a page that is free.
        """
        for page in pages:
            if not self._num_owners[page]:
                raise ValueError(f"page {page} is shared but was free")
            self._num_owners[page] += 1

    def release(self, pages: list[int]) -> None:
        """Give pages back; those without another owner are free then.

        Raises:
            ValueError: a page that is free already.
        """
        for page in pages:
            if not self._num_owners[page]:
                raise ValueError(f"page {page} is released but was free")
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                self._free.append(page)

    def check_integrity(self, holders: list[list[int]]) -> None:
        """Assert that `holders` (every live page list) are all owners of all pages in use."""
        held = Counter(page for pages in holders for page in pages)
        if held != Counter({page: count for page, count in enumerate(self._num_owners) if count}):
            raise AssertionError("pages leaked or are owned too often")
        unused = [page for page, count in enumerate(self._num_owners) if not count]
        if [TRASH_PAGE, *sorted(self._free)] != unused:
            raise AssertionError("the free list differs from the pages that nobody owns")
