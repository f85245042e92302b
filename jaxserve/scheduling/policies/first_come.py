"""First come, first served: the policy that others change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.request import Request
from jaxserve.scheduling.policies.inputs import NO_INPUTS, PolicyInputs
from jaxserve.scheduling.waiting_queue import WaitingQueue


class FirstComeFirstServed:
    """By arrival; a preempted request keeps its place.

    No request starves: the one that came first is next in line, and never preempted.

    Args:
        inputs: for policies that change this one.
    """

    def __init__(self, inputs: PolicyInputs = NO_INPUTS) -> None:
        self.inputs = inputs
        self._queue = WaitingQueue(self.key)

    def rank(self, num_prompt: int, priority: int, num_output: int = 0) -> int:
        return 0

    def key(self, request: Request) -> Any:
        return request.order

    def push(self, request: Request) -> None:
        self._queue.push(request)

    def discard(self, request: Request) -> None:
        self._queue.discard(request)

    def peek(self, fits: Callable[[Request], bool]) -> Request | None:
        return self._queue.peek()

    def lets_pass(self, request: Request) -> bool:
        first = self._queue.peek()
        return first is None or bool(self.key(request) < self.key(first))

    def requests(self) -> list[Request]:
        return self._queue.requests()

    def __len__(self) -> int:
        return len(self._queue)

    def arrange(self, prefilling: list[Request]) -> tuple[list[Request], list[Request]]:
        return prefilling, []

    def computes(self, request: Request, num_tokens: int) -> None:
        return None

    def entered(self, request: Request) -> None:
        return None

    def left(self, request: Request) -> None:
        return None
