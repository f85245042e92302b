"""The requests with a slot, and the free slots. Neither tokens nor pages play a part here."""

from __future__ import annotations

from bisect import insort

from jaxserve.request import Request, RequestState
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.resources import Resources


class Slots:
    """Rows in the device state: the requests that have one, and those that are free.

    Args:
        count: slots.
        clients: is told which requests enter and leave; its keys order those that run.
        resources: is told the same.

    Attributes:
        running: the requests with a slot, by the policy's keys.
    """

    def __init__(self, count: int, clients: ClientTurns, resources: Resources):
        self.running: list[Request] = []
        self._count, self._clients, self._resources = count, clients, resources
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, request: Request) -> None:
        """Give a request a slot, of which one is free."""
        request.slot = self._free.pop()
        request.state = RequestState.RUNNING
        insort(self.running, request, key=self._clients.key)
        self._resources.entered(request)
        self._clients.entered(request)

    def leave(self, request: Request) -> None:
        """Take the slot of a request back."""
        assert request.slot is not None
        self._clients.left(request)
        self.running.remove(request)
        self._resources.left(request)
        self._free.append(request.slot)
        request.slot = None
        request.decode_until = 0

    def check_integrity(self) -> None:
        """Assert that each slot is free or of one request."""
        owned = [request.slot for request in self.running if request.slot is not None]
        if sorted(owned + self._free) != list(range(self._count)):
            raise AssertionError("slots leaked or are owned twice")
