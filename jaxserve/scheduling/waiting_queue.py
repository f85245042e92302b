"""Requests without a slot, in the order in which they get one."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from jaxserve.request.request import Request


class WaitingQueue:
    """A heap by the key of a policy.

    Removal is lazy: an entry that is no longer a member is skipped when it comes to the front.

    Args:
        key: see `Policy.key`.
    """

    def __init__(self, key: Callable[[Request], Any]):
        self._key = key
        self._heap: list[tuple[Any, int, Request]] = []
        self._pushes = itertools.count()  # one that has gone may have had the same key
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        self._members.add(request)
        heapq.heappush(self._heap, (self._key(request), next(self._pushes), request))

    def peek(self) -> Request | None:
        """The request that is next, or None."""
        while self._heap and self._heap[0][-1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def discard(self, request: Request) -> None:
        self._members.discard(request)
        if not self._members:
            self._heap.clear()  # it may not be asked for long

    def requests(self) -> list[Request]:
        """All waiting requests."""
        return list(self._members)
