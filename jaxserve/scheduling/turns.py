"""Requests take turns where a step has no room for what all of them bring along."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.request.request import Request


class Turns:
    """Which running requests may sample in a step: a `StepResource`.

    Args:
        most: that the sampling rows of a step may bring along.
        amount_of: what a row of a request brings, at most `most`.
    """

    def __init__(self, most: int, amount_of: Callable[[Request], int]):
        self._most, self._amount_of = most, amount_of
        self._requests: list[Request] = []  # running ones, next to sample first
        self._total = 0  # of all of them
        self._turn: set[Request] | None = None  # that may sample; None: all of them
        self._new: set[Request] = set()  # got their slots in the step that is planned

    def takes(self, request: Request) -> bool:
        return self._amount_of(request) > 0

    def entered(self, request: Request) -> None:
        self._requests.append(request)
        self._new.add(request)
        self._total += self._amount_of(request)

    def left(self, request: Request) -> None:
        self._requests.remove(request)
        self._new.discard(request)
        self._total -= self._amount_of(request)

    def begin_plan(self) -> None:
        """Choose which may sample in the step that is planned now."""
        self._new.clear()
        left = self._most
        if self._total <= left:
            self._turn = None
            return
        self._turn = set()
        while self._amount_of(self._requests[0]) <= left:
            request = self._requests[0]
            left -= self._amount_of(request)
            self._turn.add(request)
            self._requests.append(self._requests.pop(0))

    def may_sample(self, request: Request) -> bool:
        if self._turn is None:
            # one that was admitted in this step may be too many; for the others there was room
            return request not in self._new or self._total <= self._most
        return request in self._turn

    def has_room(self, request: Request, *, samples: bool) -> bool:
        """One that does not sample at once waits for its turn in its slot."""
        if not samples:
            return True
        return self._turn is None and self._total + self._amount_of(request) <= self._most
