"""Order in which requests get slots and keep pages."""

from __future__ import annotations

import heapq

from jaxserve.request import Request, RequestState


class WaitingQueue:
    """First come, first served; a preempted request keeps its place by its arrival order.

    Removal is lazy: a request that is no longer waiting is skipped when it comes to the front.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Request]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        self._members.add(request.order)
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The request that is next, or None."""
        while self._heap and self._heap[0][0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("no request is waiting")
        heapq.heappop(self._heap)
        self._members.discard(request.order)
        return request

    def discard(self, request: Request) -> None:
        self._members.discard(request.order)

    def requests(self) -> list[Request]:
        """All waiting requests, in order."""
        live = [entry for entry in self._heap if entry[0] in self._members]
        return [r for _, r in sorted(live, key=lambda e: e[0]) if r.state is RequestState.WAITING]
