"""A client that leaves takes its requests with it, whatever they are doing."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jaxserve.errors import ValidationError
from server.app import create_app
from server.event_stream import until_disconnect
from tests.server.fake_engine import FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Connection:
    """An ASGI connection that can be cut at any moment."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.some_data = asyncio.Event()
        self.gone = asyncio.Event()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "headers": [(b"content-type", b"application/json")],
        }
        self._body: bytes | None = json.dumps(body).encode()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.some_data.set()


async def wait_for(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def asked(engine: FakeEngine, path: str, body: dict[str, Any]) -> AsyncIterator[Connection]:
    """A request; behind the block its client leaves, and the application is done with it."""
    connection, app = Connection(path, body), create_app(engine)
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    yield connection
    connection.gone.set()
    async with asyncio.timeout(5):
        await call
    assert app.state.service.responses.count == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_leaving_while_tokens_come(path: str, stream: bool, prompts: int) -> None:
    async def main() -> None:
        engine = FakeEngine("x" * 40)
        engine.delay = 0.01
        body: dict[str, Any] = {"stream": stream}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": "hi"}]
            body["n"] = prompts
        else:
            body["prompt"] = ["a"] * prompts
            body["max_tokens"] = 40
        async with asked(engine, path, body) as connection:
            await wait_for(lambda: engine.started)
            await (connection.some_data.wait() if stream else asyncio.sleep(0.02))
        expected = 1 if path == CHAT else prompts
        assert len(engine.aborted) == expected and not engine.finished
        if stream:
            assert connection.sent[-1]["more_body"], "nothing is sent after the client has left"
        else:
            assert not connection.sent

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}),
    ],
)
def test_leaving_what_is_told_as_parts(path: str, body: dict[str, Any], stream: bool) -> None:
    async def main() -> None:
        engine = FakeEngine("x" * 40)
        engine.delay = 0.01
        async with asked(engine, path, body | {"stream": stream}) as connection:
            await wait_for(lambda: engine.started)
            await (connection.some_data.wait() if stream else asyncio.sleep(0.02))
        assert len(engine.aborted) == 1 and not engine.finished

    asyncio.run(main())


def test_leaving_before_the_first_token() -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.delay = 60
        async with asked(engine, COMPLETIONS, {"prompt": "a", "stream": True}) as connection:
            await wait_for(lambda: engine.started)
        assert engine.aborted == engine.started and not connection.sent

    asyncio.run(main())


def test_events_are_sent_one_by_one_as_they_come() -> None:
    async def main() -> None:
        engine = FakeEngine("abc")
        engine.delay = 0.01
        connection = Connection(COMPLETIONS, {"prompt": "a", "stream": True})
        await create_app(engine)(connection.scope, connection.receive, connection.send)
        bodies = [one["body"] for one in connection.sent if one["type"] == "http.response.body"]
        assert [body[:6] for body in bodies] == [b"data: "] * 4
        assert not connection.sent[-1].get("more_body", False)
        assert engine.finished and not engine.aborted

    asyncio.run(main())


def test_a_cancelled_server_task_aborts_too() -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.delay = 60
        connection = Connection(COMPLETIONS, {"prompt": ["a", "b"]})
        app = create_app(engine)
        call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
        await wait_for(lambda: len(engine.started) == 2)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert sorted(engine.aborted) == sorted(engine.started)

    asyncio.run(main())


def test_what_an_error_has_ended_is_freed_without_a_collection() -> None:
    class Work:
        async def fail(self) -> None:
            raise ValidationError("n", 0, "1")

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")

    async def refused() -> weakref.ref[Work]:
        work = Work()
        with pytest.raises(ValidationError):
            await until_disconnect(receive, work.fail())
        return weakref.ref(work)

    async def main() -> None:
        found = await refused()
        await asyncio.sleep(0)
        assert found() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
