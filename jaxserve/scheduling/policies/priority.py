"""By the callers' priorities, as vLLM's policy of this name."""

from __future__ import annotations

from jaxserve.request import Request
from jaxserve.scheduling.policies.first_come import FirstComeFirstServed


class Priority(FirstComeFirstServed):
    """The smallest number first, by arrival among equals; the largest is preempted first.

    A running request is not preempted for one that waits. A request behind an endless stream of
    smaller numbers waits for ever: the callers have said so.
    """

    def rank(self, num_prompt: int, priority: int, num_output: int = 0) -> int:
        return priority

    def key(self, request: Request) -> tuple[int, int]:
        return request.queueing.priority, request.order
