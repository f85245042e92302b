"""Which page holds which tokens: full pages by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from jaxserve.boundary.messages import TierStats
from jaxserve.memory.tier import Move, Tier


class PrefixIndex:
    """Full pages that can be found again, each by its key (`memory.page_keys`).

    Args:
        tier: where pages go that are forgotten; None: nowhere.

    Attributes:
        moves: what the tier was asked for since they were last taken, in order.
    """

    def __init__(self, tier: Tier | None = None) -> None:
        self.moves: list[Move] = []
        self._tier = tier
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def page(self, key: bytes) -> int | None:
        """The page of a key; None: it is not known."""
        return self._pages.get(key)

    def knows(self, key: bytes) -> bool:
        """Whether there is a page of a key."""
        return key in self._pages

    def holds(self, key: bytes) -> bool:
        """Whether there is a page of a key, or the tier has what it holds."""
        return key in self._pages or (self._tier is not None and self._tier.holds(key))

    def holds_slowly(self, key: bytes) -> bool:
        """As `holds`, where a slower tier behind counts as well."""
        return key in self._pages or (self._tier is not None and self._tier.holds_slowly(key))

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
        key = self._keys.pop(page)
        del self._pages[key]
        host_page = None if self._tier is None else self._tier.leaves(key)
        if host_page is not None:
            self.moves.append(Move(page, host_page, leaves=True))

    def wants(self, keys: Sequence[bytes]) -> None:
        """What the tier has of the first of these keys is asked for next."""
        if self._tier is not None:
            self._tier.wants(keys)

    @property
    def has_tier(self) -> bool:
        return self._tier is not None

    def fetch(self, keys: Sequence[bytes], num_spared: int = 0) -> Future[None] | None:
        """See `Tier.fetch`."""
        return None if self._tier is None else self._tier.fetch(keys, num_spared)

    def bring(self, keys: Sequence[bytes], pages: Sequence[int], num_spared: int = 0) -> int:
        """Have pages hold what keys name, as far as the tier gives it; how many do.

        `num_spared`: see `Tier.find`.
        """
        if self._tier is None:
            return 0
        host_pages = self._tier.find(keys[: len(pages)], num_spared)
        for key, page, host_page in zip(keys, pages, host_pages):
            self.moves.append(Move(page, host_page, leaves=False))
            self.put(key, page)
        return len(host_pages)

    def tier_stats(self) -> TierStats:
        """What the tier holds and has moved; zeros without one."""
        return TierStats() if self._tier is None else self._tier.stats()

    def tier_states(self) -> np.ndarray:
        """See `Tier.states`; nothing without one."""
        return np.zeros(0, np.uint8) if self._tier is None else self._tier.states()

    def close(self) -> None:
        """End what the tier does beside the engine."""
        if self._tier is not None:
            self._tier.close()

    def clear(self) -> None:
        """Know no page any more, nor does the tier; what requests own still comes back to them."""
        self._pages.clear()
        self._keys.clear()
        self.moves = [move for move in self.moves if not move.leaves]
        if self._tier is not None:
            self._tier.forget_all()

    def check_integrity(self) -> None:
        """Assert that keys and pages belong together, those of the tier too."""
        if {page: key for key, page in self._pages.items()} != self._keys:
            raise AssertionError("keys and pages of the prefix cache differ")
        if self._tier is not None:
            self._tier.check_integrity()
