"""What a feature of the step has too little of for all requests, beside slots and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxserve.request.request import Request


class StepResource(Protocol):
    """What the scheduler asks of a resource; but for `takes`, of requests that take some of it."""

    def takes(self, request: Request) -> bool:
        """Whether a request takes some of it; called once, before the request is queued."""

    def begin_plan(self) -> None:
        """A step is planned from here on."""

    def has_room(self, request: Request, *, samples: bool) -> bool:
        """Whether a request without a slot may get one now.

        Args:
            request: the request.
            samples: it would sample in the step that is planned now.
        """

    def entered(self, request: Request) -> None:
        """A request got a slot."""

    def left(self, request: Request) -> None:
        """A request left its slot."""

    def may_sample(self, request: Request) -> bool:
        """Whether a request with a slot may sample in the step that is planned now."""


class Resources:
    """All resources of an engine, of which most requests take nothing."""

    def __init__(self, parts: Sequence[StepResource] = ()):
        self._parts = parts

    def _of(self, request: Request) -> list[StepResource]:
        return [part for part in self._parts if request.takes_turns and part.takes(request)]

    def mark(self, request: Request) -> None:
        """A request comes: say whether it takes something."""
        request.takes_turns = any(part.takes(request) for part in self._parts)

    def begin_plan(self) -> None:
        for part in self._parts:
            part.begin_plan()

    def has_room(self, request: Request, *, samples: bool = False) -> bool:
        return all(part.has_room(request, samples=samples) for part in self._of(request))

    def entered(self, request: Request) -> None:
        for part in self._of(request):
            part.entered(request)

    def left(self, request: Request) -> None:
        for part in self._of(request):
            part.left(request)

    def may_sample(self, request: Request) -> bool:
        if not request.takes_turns:
            return True
        return all(part.may_sample(request) for part in self._of(request))
