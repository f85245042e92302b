"""The free list of KV pages, how many own each of the others, and which can be found again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from jaxserve.memory.prefix_index import PrefixIndex
from jaxserve.memory.tier import Tier

TRASH_PAGE = 0


class PageState(IntEnum):
    """The state of a page, as a view of the pool shows it."""

    FREE = 0
    CACHED = 1  # without an owner, but what it holds can still be found
    USED = 2  # one owner
    SHARED = 3  # several


class PagePool:
    """Hands out page ids 1 .. num_pages-1; page 0 is the trash page that padding rows write to.

    A page may have several owners, which only read it. It is free when the last one gave it back.
    A free page whose key is known keeps what it holds until it is handed out again. The pool hands
    out uncached pages first, the last freed first, so that a short-lived request reuses warm
    memory; then cached pages, the least recently freed first.

    Args:
        num_pages: pages in the device pool, the trash page included; at least 2.
        tier: see `PrefixIndex`.

    Attributes:
        index: the pages whose keys are known.
    """

    def __init__(self, num_pages: int, tier: Tier | None = None):
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: a pool needs the trash page and one more")
        self.num_pages = num_pages
        self.index = PrefixIndex(tier)
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._reclaimable: OrderedDict[int, None] = (
            OrderedDict()
        )  # free and known, the oldest first
        self._num_owners = [0] * num_pages
        # the trash page takes the places of pages that a window has passed
        self._num_owners[TRASH_PAGE] = 1

    @property
    def num_free(self) -> int:
        """Pages that can be handed out, known ones among them."""
        return len(self._free) + len(self._reclaimable)

    @property
    def num_reclaimable(self) -> int:
        """Pages without an owner that can still be found."""
        return len(self._reclaimable)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free

    def num_free_among(self, pages: Sequence[int]) -> int:
        """How many of the pages have no owner."""
        owners = self._num_owners
        return sum([not owners[page] for page in pages])

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages.

        Raises:
            MemoryError: fewer than `count` pages are free; nothing is taken then.
        """
        if count > self.num_free:
            raise MemoryError(f"{count} pages wanted, {self.num_free} free")
        if count == 1 and self._free:  # a running request's next page
            pages = [self._free.pop()]
            self._num_owners[pages[0]] = 1
            return pages
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        while len(pages) < count:
            page, _ = self._reclaimable.popitem(last=False)
            self.index.forget(page)
            pages.append(page)
        for page in pages:
            self._num_owners[page] = 1
        return pages

    def num_owners(self, page: int) -> int:
        return self._num_owners[page]

    def states(self) -> np.ndarray:
        """uint8[num_pages - 1]: a `PageState` of each page, without the trash page."""
        states = np.minimum(np.array(self._num_owners, np.uint32), 2).astype(np.uint8)
        states[states > 0] += PageState.USED - 1
        if self._reclaimable:
            known = np.fromiter(self._reclaimable, np.int64, len(self._reclaimable))
            states[known] = PageState.CACHED
        return states[TRASH_PAGE + 1 :]

    def share(self, pages: list[int]) -> None:
        """Add an owner to pages that have one, or that can still be found.

        Raises:
            ValueError: a page that is free and not known.
        """
        for page in pages:
            if not self._num_owners[page]:
                if page not in self._reclaimable:
                    raise ValueError(f"page {page} is shared but was free")
                del self._reclaimable[page]
            self._num_owners[page] += 1

    def release(self, pages: list[int]) -> None:
        """Give pages back; those without another owner are free then.

        The last one first: a page is of no use without the pages before it.

        Raises:
            ValueError: a page that is free already.
        """
        for page in reversed(pages):
            if not self._num_owners[page]:
                raise ValueError(f"page {page} is released but was free")
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                if page in self.index:
                    self._reclaimable[page] = None
                else:
                    self._free.append(page)

    def forget_all(self) -> None:
        """Make every page unknown; owners keep theirs."""
        self.index.clear()
        self._free += self._reclaimable
        self._reclaimable.clear()

    def check_integrity(self, holders: list[list[int]]) -> None:
        """Assert that `holders` (every live page list) are all owners of all pages in use."""
        held = Counter(page for pages in [[TRASH_PAGE], *holders] for page in pages)
        if held != Counter({page: count for page, count in enumerate(self._num_owners) if count}):
            raise AssertionError("pages leaked or are owned too often")
        unused = {page for page, count in enumerate(self._num_owners) if not count}
        free = {*self._free, *self._reclaimable}
        if free != unused or len(free) != self.num_free:
            raise AssertionError("the free list differs from the pages that nobody owns")
        self.index.check_integrity()
        if any((page in self.index) != (page in self._reclaimable) for page in unused):
            raise AssertionError("free pages that are known are not those that can be reclaimed")
