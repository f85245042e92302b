"""The gaps between tokens of one sequence, counted in narrow bins: there may be millions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SHORTEST, LONGEST, RATIO = 1e-6, 1e4, 1.005  # seconds, and of a bin's ends


class Gaps:
    """A histogram of gaps; percentiles are right to half a bin, 0.25 %.

    Args:
        slots: of the engine: the sequence in a slot has its own newest token.
    """

    def __init__(self, slots: int):
        count = math.ceil(math.log(LONGEST / SHORTEST) / math.log(RATIO)) + 2
        self._counts = np.zeros(count, np.int64)
        self._last = np.zeros(slots)  # when the newest token of each slot came
        self._sum = self._squares = 0.0

    def begin(self, slot: int, moment: float) -> None:
        """The sequence in a slot has its first token."""
        self._last[slot] = moment

    def newest(self, slot: int) -> float:
        """When the newest token of a slot came."""
        return float(self._last[slot])

    def took(self, slots: Sequence[int], moment: float) -> None:
        """The sequences in some slots have one more token."""
        where = np.asarray(slots)
        gaps = moment - self._last[where]
        self._last[where] = moment
        np.maximum(gaps, SHORTEST, out=gaps)
        bins = (np.log(gaps * (1 / SHORTEST)) * (1 / math.log(RATIO))).astype(np.int64)
        np.add.at(self._counts, np.minimum(bins, len(self._counts) - 1), 1)
        self._sum += float(gaps.sum())
        self._squares += float(gaps @ gaps)

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    @property
    def mean(self) -> float:
        """Seconds; 0 without gaps."""
        return self._sum / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """Of the whole population, in seconds."""
        return math.sqrt(max(0.0, self._squares / max(1, self.count) - self.mean**2))

    def percentile(self, percent: float) -> float:
        """Seconds; the middle of the bin that holds it, 0 without gaps."""
        if not self.count:
            return 0.0
        bin_ = int(np.searchsorted(np.cumsum(self._counts), percent / 100 * self.count))
        return float(SHORTEST * RATIO ** (min(bin_, len(self._counts) - 1) + 0.5))
