"""Whether this process was stopped for a while, by a signal or with its container."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BEAT_S = 0.25  # between two beats
LATE_S = 1.0  # a beat that comes so much after the last one: the process did not run between


class Pulse:
    """Tells time in which this process ran from time in which it was stopped.

    One thread beats, at least every `BEAT_S`; any thread asks.

    Args:
        clock: seconds, of `time.monotonic()`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._last = clock()
        self._resumed = -math.inf

    def beat(self) -> float:
        """Seconds since the last beat; 0.0 where the process was stopped between."""
        before, self._last = self._last, self._clock()
        seconds = self._last - before
        if seconds <= LATE_S:
            return seconds
        self._resumed = self._last
        return 0.0

    def has_stopped_since(self, moment: float) -> bool:
        """Whether the process was stopped after a moment of the clock."""
        # the thread that beats may not have had its turn since
        return self._resumed > moment or self._clock() - self._last > LATE_S
