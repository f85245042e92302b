"""Tiers of the tests' own."""

from __future__ import annotations

from random import Random

from jaxserve.memory.host_tier import HostTier


class ForgetfulTier(HostTier):
    """Gives host pages away at random, those that are looked for among them.

    Args:
        num_pages: of the host.
        seed: of what is given away.
        share: how many of the calls give a page away for nothing.
    """

    def __init__(self, num_pages: int, seed: int = 0, share: float = 0.3):
        self._rng, self._share = Random(seed), share
        super().__init__(num_pages)

    def _oldest(self) -> bytes:
        return self._rng.choice([*self._pages])

    def _settle(self) -> None:
        super()._settle()
        there = sorted(key for key, page in self._pages.items() if page not in self._arriving)
        if there and self._rng.random() < self._share:
            page = self._pages.pop(self._rng.choice(there))
            del self._keys[page]
            self._free.append(page)
