"""The times at which requests must end."""

from __future__ import annotations

import heapq

TIDY = 64  # entries of ended requests that may stay in the heap


class Deadlines:
    """Times at which requests end, in whatever state they are, by the client's clock."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # also of requests that have ended, for a while

    def add(self, request_id: str, time: float) -> None:
        self._times[request_id] = time
        heapq.heappush(self._heap, (time, request_id))

    def discard(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._times.pop(request_id, None)
        if len(self._heap) > 2 * len(self._times) + TIDY:
            self._heap = [(time, name) for name, time in self._times.items()]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[str]:
        """Remove and return the requests that are past their time."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            time, request_id = heapq.heappop(self._heap)
            # an id may have been used again since
            if self._times.get(request_id) == time:
                del self._times[request_id]
                found.append(request_id)
        return found

    @property
    def next(self) -> float | None:
        """The earliest time at which a request is due; None: there is none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __bool__(self) -> bool:
        return bool(self._times)
