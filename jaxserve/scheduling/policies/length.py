"""Short prompts before long ones, by shares, and with a bound on overtaking.

Requests fall into three classes by the tokens of their prompts that are left to compute, and by the
output that they ask for. Prompt tokens are shared out among the classes that want some by fair
queueing (Demers, Keshav and Shenker, 1989): each class has a virtual time, its computed tokens
divided by its share, and the request that would be done first by these times is next. A class that
comes back after a pause goes on from the present, the time of the class that computed last
(Goyal, Vin and Cheng, 1996): a pause earns nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from jaxserve.request import Request
from jaxserve.scheduling.policies.inputs import NO_INPUTS, PolicyInputs
from jaxserve.scheduling.waiting_queue import WaitingQueue


class Length:
    """Three classes, a share of the computed tokens each, first come first served in a class.

    A request has its class when it begins to wait, by what the prefix cache holds then, and keeps
    it until it gives its slot up. The shares count the more the busier the device is: on one that
    has time for all they are nearly equal.

    A request that does not fit into the free pages lets others pass. Later arrivals pass the
    request that has waited longest only while three numbers together are at most
    `max_overtaken_tokens`: the tokens that they have been given, those that they are certain to
    get, and those of the next one's prompt. Then the request is next. So before a request begins,
    later arrivals are served at most that, and the output that is left to those that run by then,
    at most `max_num_seqs`. A preempted request begins again, with the same bound. The youngest
    running request is preempted first: the oldest one always goes on.

    Args:
        bounds: tokens left to compute from which a request is of the second and of the third
            class.
        shares: the share of each class, above 0.
        max_overtaken_tokens: see above; 0 is first come, first served.
        output_bounds: `n` times `max_tokens` from which it is at least of these classes.
        inputs: what is found in the prefix cache, and how busy the device is.
    """

    def __init__(
        self,
        bounds: Sequence[int] = (128, 512),
        shares: Sequence[float] = (6, 3, 1),
        max_overtaken_tokens: int = 32768,
        *,
        output_bounds: Sequence[int] = (4096, 32768),
        inputs: PolicyInputs = NO_INPUTS,
    ):
        self._bounds, self._shares = tuple(bounds), tuple(shares)
        self._most, self._output_bounds, self._inputs = max_overtaken_tokens, output_bounds, inputs
        self._busy = 1.0  # in this step
        self._classes: dict[Request, int] = {}  # of those that wait or run
        self._found: dict[Request, int] = {}  # tokens of those that wait, in the prefix cache
        self._queues = [WaitingQueue(self.key) for _ in shares]
        self._times = [0.0] * len(shares)  # virtual
        self._now = 0.0  # the time of the class that computed last, before it did
        self._running: set[Request] = set()
        self._gone: list[tuple[int, int]] = []  # order and tokens of those that left their slots
        self._next_tidy = 256
        self._passed: tuple[int, int] | None = None  # an order and what `_given` said of it

    def rank(self, num_prompt: int, priority: int, num_output: int = 0) -> int:
        by_output = bisect_right(self._output_bounds, num_output)
        return max(bisect_right(self._bounds, num_prompt), by_output)

    def key(self, request: Request) -> int:
        return request.order

    def push(self, request: Request) -> None:
        found = self._inputs.num_found(request)
        rank = self.rank(request.num_tokens - found, 0, request.asked.num_output_asked)
        self._classes[request], self._found[request] = rank, found
        if not self._queues[rank]:
            self._times[rank] = max(self._times[rank], self._now)
        self._queues[rank].push(request)

    def discard(self, request: Request) -> None:
        if self._found.pop(request, None) is None:  # the next of a group, which was not queued yet
            return
        self._queues[self._classes[request]].discard(request)
        if request not in self._running:
            del self._classes[request]

    def peek(self, fits: Callable[[Request], bool]) -> Request | None:
        heads = self._heads()
        if not heads:
            return None
        oldest = min(heads, key=self.key)
        allowed = [head for head in heads if head is oldest or self._may_pass(oldest, head)]
        return next(filter(fits, allowed), allowed[0])

    def lets_pass(self, request: Request) -> bool:
        oldest = min(self._heads(), key=self.key, default=None)
        return oldest is None or request.order < oldest.order or self._may_pass(oldest, request)

    def requests(self) -> list[Request]:
        return [request for queue in self._queues for request in queue.requests()]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def arrange(self, prefilling: list[Request]) -> tuple[list[Request], list[Request]]:
        self._passed = None  # what is given has changed since the last step
        self._busy = self._inputs.device_busy()
        # the class's turn is that of the one that came first in it, running or not
        waiting = self._heads()
        fronts: dict[int, Request] = {}
        for request in sorted([*prefilling, *waiting], key=self.key):
            fronts.setdefault(self._classes[request], request)

        def turn(request: Request) -> tuple[float, int, int]:
            rank = self._classes[request]
            return self._turn(fronts[rank]), rank, request.order

        ordered = sorted(prefilling, key=turn)
        first = min(map(turn, waiting), default=(math.inf, 0, 0))
        before = [request for request in ordered if turn(request) < first]
        return before, ordered[len(before) :]

    def computes(self, request: Request, num_tokens: int) -> None:
        rank = self._classes[request]
        self._now = max(self._now, self._times[rank])
        self._times[rank] += num_tokens / self._share(rank)

    def entered(self, request: Request) -> None:
        self._running.add(request)
        if request not in self._classes:  # a fork: its prompt is computed
            self._classes[request] = self.rank(0, 0, request.asked.num_output_asked)
        if self._passed is not None and request.order > self._passed[0]:
            self._passed = self._passed[0], self._passed[1] + request.num_tokens

    def left(self, request: Request) -> None:
        self._running.discard(request)
        del self._classes[request]
        self._gone.append((request.order, _given(request)))
        if len(self._gone) >= self._next_tidy:
            oldest = min((head.order for head in self._heads()), default=request.order)
            self._gone = [entry for entry in self._gone if entry[0] > oldest]
            self._next_tidy = max(256, 2 * len(self._gone))

    def _share(self, rank: int) -> float:
        return float(self._shares[rank] ** self._busy)

    def _turn(self, request: Request) -> float:
        """When it would be done by its class's virtual time."""
        rank = self._classes[request]
        done = self._found.get(request, request.num_computed)
        left = max(request.num_tokens, request.prefill_target) - done
        return self._times[rank] + left / self._share(rank)

    def _heads(self) -> list[Request]:
        """The first request of each class, the next one first."""
        heads = [head for queue in self._queues if (head := queue.peek()) is not None]
        return sorted(heads, key=self._turn)

    def _may_pass(self, oldest: Request, request: Request) -> bool:
        """Whether `oldest`, which has waited longest of all, may be passed by a later arrival.

        Tokens given to arrivals after `oldest` contain those given to arrivals after any other
        waiting request: one look says it for all.
        """
        if self._passed is None or self._passed[0] != oldest.order:
            given = sum(_given(r) for r in self._running if r.order > oldest.order)
            given += sum(tokens for order, tokens in self._gone if order > oldest.order)
            self._passed = oldest.order, given
        return self._passed[1] + request.num_tokens <= self._most


def _given(request: Request) -> int:
    """Tokens that a request with a slot has computed or is certain to."""
    return max(request.num_computed, request.prefill_target)
