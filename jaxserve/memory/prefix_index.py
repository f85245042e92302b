"""Which page holds which tokens: full pages by their keys."""

from __future__ import annotations

from collections.abc import Sequence


class PrefixIndex:
    """Full pages that can be found again, each by its key (`memory.page_keys`)."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def page(self, key: bytes) -> int | None:
        """The page of a key; None: it is not known."""
        return self._pages.get(key)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the first keys, as far as all of them are known."""
        found: list[int] = []
        pages = self._pages
        for key in keys:
            page = pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def put(self, key: bytes, page: int) -> None:
        """Know a page by its key; the first page of a key stays, and the first key of a page."""
        if key not in self._pages and page not in self._keys:
            self._pages[key] = page
            self._keys[page] = key

    def forget(self, page: int) -> None:
        """What a known page holds is about to be overwritten."""
        del self._pages[self._keys.pop(page)]

    def clear(self) -> None:
        self._pages.clear()
        self._keys.clear()

    def check_integrity(self) -> None:
        """Assert that keys and pages belong together."""
        if {page: key for key, page in self._pages.items()} != self._keys:
            raise AssertionError("keys and pages of the prefix cache differ")
