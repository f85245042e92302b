"""A tier of the tests' own: host pages by key, the one used longest ago given away first."""

from __future__ import annotations

from collections import OrderedDict


class HostTier:
    """What a tier of an engine would be.

    Args:
        num_pages: of the host.
        keeps: whether a page that was moved back stays; else its host page is free at once.
    """

    def __init__(self, num_pages: int, *, keeps: bool = True):
        self._num_pages = num_pages
        self._keeps = keeps
        self.forget_all()

    def leaves(self, key: bytes) -> int | None:
        if key in self._pages:
            self._pages.move_to_end(key)
            return None
        page = self._free.pop() if self._free else self._pages.popitem(last=False)[1]
        self._pages[key] = page
        return page

    def find(self, key: bytes) -> int | None:
        page = self._pages.get(key)
        if page is not None and self._keeps:
            self._pages.move_to_end(key)
        elif page is not None:
            del self._pages[key]
            self._free.append(page)
        return page

    def forget_all(self) -> None:
        self._free = [*range(self._num_pages)]
        self._pages: OrderedDict[bytes, int] = OrderedDict()
