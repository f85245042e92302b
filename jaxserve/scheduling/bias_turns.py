"""Rows with logit_bias take turns where a step has no room for the values of all of them."""

from __future__ import annotations

from collections import deque

from jaxserve.request import Request


class BiasTurns:
    """Which running requests with logit_bias may sample in a step.

    Args:
        max_entries: values that the sampling rows of a step may bring along.
    """

    def __init__(self, max_entries: int):
        self._max_entries = max_entries
        self._requests: deque[Request] = deque()  # running ones, next to sample first
        self._entries = 0  # of all of them
        self._turn: set[Request] | None = None  # who may sample; None: all of them
        self._new: set[Request] = set()  # got their slots in the step that is planned

    def add(self, request: Request) -> None:
        """A request got a slot."""
        if request.num_bias:
            self._requests.append(request)
            self._new.add(request)
            self._entries += request.num_bias

    def remove(self, request: Request) -> None:
        """A request left its slot."""
        if request.num_bias:
            self._requests.remove(request)
            self._new.discard(request)
            self._entries -= request.num_bias

    def begin_step(self) -> None:
        """Choose who may sample in the step that is planned now."""
        self._new.clear()
        left = self._max_entries
        if self._entries <= left:
            self._turn = None
            return
        self._turn = set()
        while self._requests[0].num_bias <= left:
            request = self._requests[0]
            left -= request.num_bias
            self._turn.add(request)
            self._requests.rotate(-1)

    def may_sample(self, request: Request) -> bool:
        """Whether the step has room for the values of a running request; true without any."""
        if not request.num_bias:
            return True
        if self._turn is None:
            # who was admitted in this step may be one too many; for the others there was room
            return request not in self._new or self._entries <= self._max_entries
        return request in self._turn

    def has_room(self, request: Request) -> bool:
        """Whether a request without a slot could get one and sample at once."""
        if not request.num_bias:
            return True
        return self._turn is None and self._entries + request.num_bias <= self._max_entries
