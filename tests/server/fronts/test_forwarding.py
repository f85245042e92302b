"""What a front hands over: whole requests, and answers as fast as they are taken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from jaxserve.boundary.front_messages import HttpAnswer, HttpRequest, HttpTaken
from server.body_reader import BodyReader
from server.client_limits import Limits
from server.fronts.forwarding import BrokenOff, Forwarding
from server.keys import ApiKey, KeyRing
from server.options import NO_OPTIONS

START = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = {"type": "http.response.body", "body": b"a", "more_body": True}
END = {"type": "http.response.body", "body": b"b"}


class Client:
    """A connection of a client that sends one request."""

    def __init__(self, path: str, body: bytes = b"", method: str = "POST"):
        self.scope = {"type": "http", "method": method, "path": path, "headers": []}
        self.told: list[Any] = []
        self.room = asyncio.Event()
        self.room.set()
        self.gone = asyncio.Event()
        self._body: bytes | None = body

    async def receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.room.wait()
        self.told.append(message)


class Front:
    def __init__(self, *keys: ApiKey):
        self.sent: list[Any] = []
        service: Any = SimpleNamespace(
            bodies=BodyReader(Limits()),
            keys=KeyRing(keys) if keys else None,
            options=NO_OPTIONS,
        )
        own = PlainTextResponse("own")
        self.app = Forwarding(own, {"/v1/completions"}, service, self.sent.append)

    async def until_sent(self, count: int) -> Any:
        while len(self.sent) < count:
            await asyncio.sleep(0)
        return self.sent[-1]

    def begin(self, client: Client) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.app(client.scope, client.receive, client.send))


def test_an_answer_is_passed_on_piece_by_piece() -> None:
    async def run() -> None:
        front, client = Front(), Client("/v1/responses", b"{}")
        task = front.begin(client)
        asked = await front.until_sent(1)
        assert asked == HttpRequest(0, client.scope, b"{}")
        front.app.take(HttpAnswer(0, START))
        assert await front.until_sent(2) == HttpTaken(0)
        client.room.clear()
        front.app.take(HttpAnswer(0, PIECE))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(front.sent) == 2, "the client has not taken it"
        client.room.set()
        await front.until_sent(3)
        front.app.take(HttpAnswer(0, END))
        await task
        assert client.told == [START, PIECE, END]
        assert len(front.sent) == 3, "an answer that is over is over for the server too"

    asyncio.run(asyncio.wait_for(run(), 5))


def test_a_client_that_leaves_ends_the_answer() -> None:
    async def run() -> None:
        front, client = Front(), Client("/metrics", method="GET")
        task = front.begin(client)
        await front.until_sent(1)
        client.gone.set()
        await task
        assert front.sent[1:] == [HttpTaken(0, gone=True)]
        front.app.take(HttpAnswer(0, START))  # was on its way

    asyncio.run(asyncio.wait_for(run(), 5))


def test_an_answer_that_is_broken_off_breaks_the_connection_off() -> None:
    async def run() -> None:
        front, client = Front(), Client("/v1/responses", b"{}")
        task = front.begin(client)
        await front.until_sent(1)
        front.app.take(HttpAnswer(0, {}))
        with pytest.raises(BrokenOff):
            await task

    asyncio.run(asyncio.wait_for(run(), 5))


def test_own_paths_and_strangers_are_answered_here() -> None:
    async def run() -> None:
        for front, client in (
            (Front(), Client("/v1/completions")),
            (Front(ApiKey("k", "n")), Client("/v1/responses", b"x" * 1000)),
        ):
            await front.begin(client)
            assert client.told[1]["body"] == b"own" and front.sent == []

    asyncio.run(asyncio.wait_for(run(), 5))
