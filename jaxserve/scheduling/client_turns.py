"""Clients take turns: whatever one of them sends, the others get their share of slots and steps.

Slots are shared out max-min fairly: a client that wants fewer than its share leaves the rest to the
others. Among clients with equally many slots, and for prompt tokens, the turn is of the one that
was served the fewest tokens: fair queueing in tokens, as deficit round robin (Shreedhar and
Varghese, 1996) and virtual token counters for language models (Sheng et al., 2024) do it. Here the
virtual time decides where a client begins, so that neither a pause nor a new name earns a turn.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import count, zip_longest
from typing import Any

from jaxserve.request import Request
from jaxserve.scheduling.policies import Policy

REMEMBERED = 64  # clients without work
LOOKS = 8  # clients of the line that are asked in a step


class _Client:
    """One client.

    Attributes:
        number: its place in the order in which clients came.
        policy: holds its requests that wait.
        running: its requests with a slot, by the policy's keys.
        served: tokens computed for it, and at least the virtual time when it began to wait.
        step: the last step for which its policy was called to `arrange`.
        place: its entry in the line, None if it has none.
        held: its entry among those that hold slots, None if it has none.
    """

    __slots__ = ("held", "number", "place", "policy", "running", "served", "step")

    def __init__(self, number: int, policy: Policy):
        self.number, self.policy = number, policy
        self.running: list[Request] = []
        self.served = 0.0
        self.step = 0
        self.place: _Place | None = None
        self.held: _Held | None = None

    @property
    def turn(self) -> tuple[int, float, int]:
        """Its place in the line: slots, tokens served, number."""
        return len(self.running), self.served, self.number

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.policy))


_Place = tuple[int, float, int, _Client]  # slots, tokens served, number
_Held = tuple[int, int, _Client]  # slots, number


class ClientTurns:
    """Holds the requests without a slot, a policy for each client, and says which is next.

    The policy decides among the requests of one client, and all where there is but one. The line of
    clients that wait is sorted: the one with the fewest slots is first, then the one that was
    served the fewest tokens. A client with work costs no step anything unless it is its turn.

    Args:
        make: makes the policy of a client; all of them have the same ranks and keys.

    Attributes:
        rank: see `Policy.rank`: of requests of one client.
        key: see `Policy.key`: of two clients' requests as of one's.
        passed: its turn came, but it did not fit, and others may begin before it; None if there is
            no such request.
    """

    def __init__(self, make: Callable[[], Policy]):
        self._make = make
        common = make()
        self.rank, self.key = common.rank, common.key
        self._clients: dict[str, _Client] = {}  # with work
        self._idle: dict[str, _Client] = {}  # the last ones without, the one idle longest first
        self._numbers = count()
        self._line: list[_Place] = []  # clients that wait, the next first
        self._holders: list[_Held] = []  # clients with slots, the most slots last
        self._changed: set[_Client] = set()  # their places have to be looked at again
        self._now = 0.0  # virtual time: tokens that a client with work was served, were all equal
        self._step = 0
        self.passed: Request | None = None
        self._beside: dict[Request, None] = {}  # the last one last

    @property
    def num_clients(self) -> int:
        """Clients that have work."""
        return len(self._clients)

    def push(self, request: Request) -> None:
        """A request waits: it is new, or has lost its slot."""
        client = self._of(request)
        if not len(client.policy):
            client.served = max(client.served, self._now)
        client.policy.push(request)
        self._changed.add(client)

    def discard(self, request: Request) -> None:
        """It does not wait any more: it has a slot or has ended."""
        client = self._clients.get(request.queueing.client)
        if client is not None:
            client.policy.discard(request)
            self._changed.add(client)
            if request is self.passed:
                self._forget_passed()
            self._forget_if_idle(request, client)

    def peek(self, fits: Callable[[Request], bool]) -> Request | None:
        """See `Policy.peek`: the next request of the client that is first in the line.

        If it does not fit it is passed over by the next of the first clients whose request does.
        """
        if len(self._clients) == 1:
            (only,) = self._clients.values()
            return only.policy.peek(fits)
        first: Request | None = None
        for _, client in self._first():
            found = self._next_of(client, fits)
            if found.pending or fits(found):
                return found
            self.pass_over(found)
            first = first or found
        return first

    def below(self, fits: Callable[[Request], bool]) -> Iterator[Request]:
        """The next requests of the first clients that hold two slots fewer than another client.

        With one slot more the two would change places for ever.
        """
        for slots, client in self._first():
            if not self._holders or self._holders[-1][0] < slots + 2:
                return
            yield self._next_of(client, fits)

    def pass_over(self, request: Request) -> None:
        """The next request does not fit: others may begin before it.

        This is remembered of the client that is first in the line, until one of its requests
        begins.
        """
        client, passed = self._of(request), self._passed_client
        if passed is None or client.turn < passed.turn:
            self._beside = {}
        elif client is not passed:
            return
        self.passed = request

    def passed_over(self, fits: Callable[[Request], bool]) -> Request | None:
        """What the client of `passed` would begin with now."""
        client = self._passed_client
        return None if client is None else self._next_of(client, fits)

    def beside(self) -> list[Request]:
        """The sequences that have begun before `passed` from behind it, the last one first."""
        return [*reversed(self._beside)]

    def lets_pass(self, request: Request) -> bool:
        """See `Policy.lets_pass`: not before another client that is next and could begin."""
        client = self._of(request)
        if len(self._clients) == 1:
            return client.policy.lets_pass(request)
        self._sort()
        passed = self._passed_client
        first = next((place for place in self._line[:2] if place[-1] is not passed), None)
        if first is not None and first[:-1] < client.turn:
            return False
        return self._asked(client).lets_pass(request)

    def requests(self) -> list[Request]:
        """All waiting requests."""
        return [
            request for client in self._clients.values() for request in client.policy.requests()
        ]

    def __len__(self) -> int:
        """How many wait."""
        return sum(len(client.policy) for client in self._clients.values())

    def begin_step(self) -> None:
        """A step of several clients is planned from now on."""
        self._step += 1

    def arrange(
        self, prefilling: list[Request], fits: Callable[[Request], bool]
    ) -> tuple[list[Request], list[Request]]:
        """See `Policy.arrange`: by clients, the one first that was served the fewest tokens.

        Those served fewer than the client of the request that begins next come before it.
        """
        if len(self._clients) == 1:
            (only,) = self._clients.values()
            return only.policy.arrange(prefilling)
        if not prefilling:
            return [], []
        parts: dict[_Client, list[Request]] = {}
        for request in prefilling:
            parts.setdefault(self._of(request), []).append(request)
        first = self.peek(fits)
        following = None if first is None else self._of(first)
        before: list[Request] = []
        after: list[Request] = []
        for client in sorted(parts, key=_turn):
            client.step = self._step
            ahead, behind = client.policy.arrange(parts[client])
            if following is None or _turn(client) < _turn(following):
                ahead, behind = ahead + behind, []
            elif client is not following:
                ahead, behind = [], ahead + behind
            before += ahead
            after += behind
        return before, after

    def computes(self, request: Request, num_tokens: int) -> None:
        """A chunk of known tokens is planned."""
        client = self._of(request)
        client.policy.computes(request, num_tokens)
        self._serve(client, num_tokens)

    def entered(self, request: Request) -> None:
        """A request has got a slot."""
        client = self._of(request)
        passed = self._passed_client
        if client is passed:
            self._forget_passed()
        elif passed is not None and passed.turn < client.turn and not request.has_given_way:
            self._beside[request] = None
        running, key = client.running, self.key
        if running and key(request) < key(running[-1]):
            insort(running, request, key=key)
        else:
            running.append(request)
        client.policy.entered(request)
        self._changed.add(client)

    def left(self, request: Request) -> None:
        """A request is about to give its slot up: it has ended or is preempted."""
        client = self._of(request)
        client.policy.left(request)
        client.running.remove(request)
        self._beside.pop(request, None)
        # chunks were counted when they were planned
        self._serve(client, max(0, request.num_computed - request.prefill_target))
        self._forget_if_idle(request, client)

    def running(self) -> list[Request]:
        """The requests with a slot, such that the last is preempted first.

        First the first one of each client, by their keys, then the second of each: the last is of
        a client with the most slots, and the one with the smallest key of all is never last, so
        that it always goes on. Of one client they are in the order of its keys.
        """
        self._sort()
        if len(self._holders) == 1:
            return self._holders[0][-1].running
        rounds = zip_longest(*(client.running for *_, client in self._holders))
        return [
            request
            for one in rounds
            for request in sorted((r for r in one if r is not None), key=self.key)
        ]

    def above(self, request: Request) -> list[Request]:
        """The sequences that may lose their slots to a request that waits, first to last.

        They are those that a client has beyond as many as the request's client has with it.
        """
        most = len(self.of_client(request)) + 1
        number = sum(max(0, slots - most) for slots, *_ in self._holders)
        running = self.running()
        return running[len(running) - number :][::-1]

    def of_client(self, request: Request) -> list[Request]:
        """The requests with a slot of the same client."""
        return self._of(request).running

    def check_integrity(self, running: list[Request]) -> None:
        """Assert that the requests of clients are those that run and wait, and that none is lost.

        Args:
            running: the requests with a slot.
        """
        self._sort()
        clients = self._clients.values()
        if {*running} != {r for client in clients for r in client.running}:
            raise AssertionError("a request with a slot is not counted for its client")
        line = [(*c.turn, c) for c in clients if len(c.policy)]
        if self._line != sorted(line):
            raise AssertionError("the line of clients is out of order")
        if self._holders != sorted((len(c.running), c.number, c) for c in clients if c.running):
            raise AssertionError("the slots of clients are counted wrongly")
        if not {*self._beside} <= {*running}:
            raise AssertionError("a request without a slot has begun beside another")
        if self.passed is not None and self.passed not in self.requests():
            raise AssertionError("a request that does not wait is passed over")
        if not all(client.has_work for client in clients):
            raise AssertionError("a client without work is not forgotten")
        if any(client.has_work for client in self._idle.values()):
            raise AssertionError("a client with work is forgotten")

    def _first(self) -> list[tuple[int, _Client]]:
        """The clients that are first in the line, and how many slots they have."""
        self._sort()
        return [(slots, client) for slots, _, _, client in self._line[:LOOKS]]

    def _next_of(self, client: _Client, fits: Callable[[Request], bool]) -> Request:
        """The next request of a client that waits."""
        request = self._asked(client).peek(fits)
        assert request is not None
        return request

    @property
    def _passed_client(self) -> _Client | None:
        return None if self.passed is None else self._of(self.passed)

    def _forget_passed(self) -> None:
        self.passed, self._beside = None, {}

    def _of(self, request: Request) -> _Client:
        """The client of a request that runs or waits, or is about to."""
        name = request.queueing.client
        client = self._clients.get(name)
        if client is None:
            client = self._idle.pop(name, None) or _Client(next(self._numbers), self._make())
            self._clients[name] = client
        return client

    def _forget_if_idle(self, request: Request, client: _Client) -> None:
        """Of one that has gone, what it was served is remembered: it may come back at once."""
        if not client.has_work:
            self._changed.discard(client)
            self._put_in_place(client)
            name = request.queueing.client
            self._idle[name] = self._clients.pop(name)
            if len(self._idle) > REMEMBERED:
                del self._idle[next(iter(self._idle))]

    def _asked(self, client: _Client) -> Policy:
        """The policy of a client, which has been asked to arrange in this step."""
        if client.step != self._step:
            client.step = self._step
            client.policy.arrange([])
        return client.policy

    def _serve(self, client: _Client, num_tokens: int) -> None:
        client.served += num_tokens
        self._changed.add(client)
        self._now += num_tokens / len(self._clients)

    def _sort(self) -> None:
        """Put the clients of which something has changed in their places."""
        for client in self._changed:
            self._put_in_place(client)
        self._changed.clear()

    def _put_in_place(self, client: _Client) -> None:
        slots = len(client.running)
        place = (*client.turn, client) if len(client.policy) else None
        _move(self._line, client.place, place)
        client.place = place
        held = (slots, client.number, client) if slots else None
        _move(self._holders, client.held, held)
        client.held = held


def _move(entries: list[Any], old: Any, new: Any) -> None:
    """Replace an entry of a sorted list, which `old` is one of unless it is None."""
    if old == new:
        return
    if old is not None:
        del entries[bisect_left(entries, old)]
    if new is not None:
        insort(entries, new)


def _turn(client: _Client) -> tuple[float, int, int]:
    return client.served, len(client.running), client.number
