"""How busy the device was of late."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from time import monotonic

WINDOW_S = 10.0
INTERVAL_S = 1.0  # between two of the moments that are kept


class BusyWindow:
    """The share of the last seconds in which the device computed steps.

    One thread may record, any may ask.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._newest = (clock(), 0.0)  # a moment, and how long it had been busy by then
        self._moments: deque[tuple[float, float]] = deque([self._newest])

    def record(self, busy: float) -> None:
        """The device has been busy for that many seconds in all."""
        (last, before), now = self._newest, self._clock()
        if now - last > INTERVAL_S:  # nothing ran until lately
            self._moments.append((max(last, now - (busy - before)), before))
        self._newest = now, busy
        if now - self._moments[-1][0] >= INTERVAL_S:
            self._moments.append(self._newest)
        while len(self._moments) > 1 and self._moments[1][0] <= now - WINDOW_S:
            self._moments.popleft()

    def fraction(self) -> float:
        """0 to 1, of the last ten seconds, or of the time since the start where that is less."""
        moments, now = [*self._moments, self._newest], self._clock()
        since = max(moments[0][0], now - WINDOW_S)
        after = min(bisect_right(moments, (since, math.inf)), len(moments) - 1)
        (begin, before), (end, busy) = moments[after - 1], moments[after]
        part = min(1.0, (since - begin) / max(end - begin, 1e-9))
        seconds = moments[-1][1] - before - part * (busy - before)
        return min(1.0, max(0.0, seconds / max(now - since, 1e-9)))
