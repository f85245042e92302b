"""Answers that their clients have not read: one bound on what all of them take."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.counts import Cell, Counts
from server.errors import ApiError
from server.keys import client_name

logger = logging.getLogger("jaxserve.server")

PIECE_BYTES = 2**16  # of an answer, which its connection is given at a time
UNCOUNTED_BYTES = 2**14  # that any connection may hold
LOOK_S = 0.25  # between two looks while something is unread


@dataclass(eq=False, slots=True)
class UnreadAnswer:
    """One answer on its way to its client.

    Attributes:
        answers: of the server.
        transport: of its connection; None where there is none, as in a batch.
        client: tells the name of its client, see `client_name`.
        whole: bytes of the answer that are kept until its last is taken, of a stream those that it
            tells once more at its end.
        sending: other bytes of it that wait for the connection.
        waits: parts of it that the connection has not taken yet.
        queued: what is told of its outputs that wait, in bytes.
        since: when the client took something last, or was first told something that it has not
            taken; infinity before that: while an answer is made, its client is not slow.
        seen: bytes that were unread at the last look.
    """

    answers: UnreadAnswers
    transport: asyncio.Transport | None
    client: Callable[[], str] = str
    whole: int = 0
    sending: int = 0
    waits: int = 0
    queued: Callable[[], int] = int
    since: float = math.inf
    seen: int = 0

    @property
    def in_transport(self) -> int:
        """Bytes that the connection has been given and the system has not taken."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def num_bytes(self) -> int:
        """What is unread of it."""
        return (self.whole or self.sending) + self.queued() + self.in_transport

    def is_taken(self) -> bool:
        """Whether the client has taken what it was given."""
        return not self.waits and self.in_transport <= UNCOUNTED_BYTES

    def is_settled(self) -> bool:
        """Whether nothing of it has to be watched."""
        return not self.whole and self.is_taken()

    def keep(self, num_bytes: int) -> None:
        """More of a whole answer was made.

        Raises:
            ApiError: it alone is more than all answers may be.
        """
        self.whole += num_bytes
        if self.whole > self.answers.most:
            raise ApiError(
                400,
                f"the answer would have more than {self.answers.most} bytes, as many as this "
                "server keeps of answers that are not read (--max-unread-answer-bytes); ask for "
                "fewer choices or logprobs",
            )
        self.answers.watch(self)

    def cut(self) -> None:
        """End the connection with what it holds."""
        if self.transport is not None:
            self.transport.abort()


class UnreadAnswers:
    """Answers of one server that are not read, which share a bound.

    While a client does not take its answer, it is looked at what there is of it, here, in its
    stream's queue and in its connection. Where all is too much, it is an answer to the client with
    the most unread bytes that is cut off: of its answers the one of which nothing was taken for
    longest.

    Args:
        most: bytes of all.
        clock: seconds.
        counts: of the server; None: of no other. Of several processes each cuts off its own
            answers, as long as they are more than its equal share.
    """

    def __init__(
        self, most: int, clock: Callable[[], float] = time.monotonic, counts: Counts | None = None
    ):
        self.most, self.clock = most, clock
        self._counts = counts or Counts()
        self._watched: set[UnreadAnswer] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        """What is unread of all answers, but for what any connection may hold."""
        return sum(one.num_bytes() for one in self._watched)

    def watch(self, answer: UnreadAnswer) -> None:
        """Look at an answer until it is settled."""
        if answer not in self._watched:
            self._watched.add(answer)
            answer.since, answer.seen = math.inf, 0
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def tells(self, answer: UnreadAnswer) -> None:
        """A client is given a piece of an answer, which it may leave unread."""
        self.watch(answer)
        answer.since = min(answer.since, self.clock())

    def took(self, answer: UnreadAnswer) -> None:
        """The client has made room for a piece of an answer."""
        if answer.is_settled():
            self._watched.discard(answer)
        else:
            answer.since = math.inf if answer.is_taken() else self.clock()

    def look(self) -> None:
        """Cut off the slowest answers of the clients with the most where too much is unread."""
        now, total = self.clock(), 0
        for answer in [*self._watched]:
            size = answer.num_bytes()
            if answer.is_settled():
                self._watched.discard(answer)
                continue
            if size < answer.seen and answer.since < now:
                answer.since = now
            answer.seen = size
            total += size
        self._counts.put(Cell.UNREAD_BYTES, total)
        others = self._counts.total(Cell.UNREAD_BYTES) - total
        most = max(self.most - others, self.most / self._counts.processes)
        if total <= most:
            return
        clients: defaultdict[str, list[UnreadAnswer]] = defaultdict(list)
        for answer in self._watched:
            clients[answer.client()].append(answer)
        sizes = {name: sum(one.seen for one in answers) for name, answers in clients.items()}
        while total > most:
            name = max(sizes, key=lambda one: sizes[one])
            slowest = _slowest(clients[name])
            logger.warning(
                "%d bytes of answers are unread, more than --max-unread-answer-bytes %d: of the "
                "client with the most, %d, the answer is cut off of which it has taken nothing for "
                "%.1f s, with %d",
                int(total + others),
                self.most,
                sizes[name],
                max(0.0, now - slowest.since),
                slowest.seen,
            )
            self._watched.discard(slowest)
            clients[name].remove(slowest)
            slowest.cut()
            sizes[name] -= slowest.seen
            total -= slowest.seen
        self._counts.put(Cell.UNREAD_BYTES, total)

    def _look_again(self) -> None:
        self._timer = None
        self.look()
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)


class UnreadMiddleware:
    """Gives connections answers in pieces, each when there is room for it, and counts the rest.

    Args:
        answers: knows of each while its client does not take it.
    """

    def __init__(self, app: ASGIApp, answers: UnreadAnswers) -> None:
        self.app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answers, state = self._answers, scope.setdefault("state", {})
        # the key's client is known further in, and asked for later
        answer = UnreadAnswer(answers, state.get("transport"), lambda: client_name(scope))
        state["unread"] = answer
        announced = 0

        async def send_watched(message: Message) -> None:
            nonlocal announced
            body = message.get("body", b"")
            if message["type"] == "http.response.start":
                announced = answer.sending = _length(message["headers"])
            elif not announced:
                answer.sending += len(body)
            answer.waits += 1
            answers.tells(answer)
            try:
                if len(body) > PIECE_BYTES:
                    body = memoryview(body)
                    while len(body) > PIECE_BYTES:
                        await send({**message, "body": body[:PIECE_BYTES], "more_body": True})
                        answer.sending -= PIECE_BYTES
                        answers.took(answer)
                        body = body[PIECE_BYTES:]
                    message = {**message, "body": body}
                await send(message)
            finally:
                answer.waits -= 1
                answer.sending -= len(body)
            answers.took(answer)

        try:
            await self.app(scope, receive, send_watched)
        finally:
            answer.whole = answer.sending = 0
            answer.queued = int
            answers.took(answer)


def unread_of(request: Request) -> UnreadAnswer:
    """The answer to a request, as far as it is not read."""
    found: UnreadAnswer = request.state.unread
    return found


def _slowest(answers: list[UnreadAnswer]) -> UnreadAnswer:
    """Of one client's answers the one of which nothing was taken for longest.

    One is passed over where cutting it would free next to nothing.
    """
    worth = min(PIECE_BYTES, sum(one.seen for one in answers) // (2 * len(answers)))
    return min((one for one in answers if one.seen >= worth), key=lambda one: one.since)


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """What an answer says of its length; 0 if it says nothing."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)
