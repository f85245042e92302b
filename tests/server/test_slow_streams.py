"""Streams that wait in the queue, and readers that do not keep up."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.observability import repeated
from jaxserve.outputs import CompletionOutput, RequestOutput
from server import event_stream
from server.app import create_app
from server.client_limits import Limits
from server.event_stream import COMMENT, COMMENT_END, EventStream, merge
from server.unread_answers import PIECE_BYTES, UnreadAnswers, UnreadMiddleware
from tests.server.fake_engine import FakeEngine
from tests.server.test_event_stream import CHAT, COMPLETIONS, Connection, wait_for

BODY = {"prompt": "a", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
LIMITS = Limits(keep_alive_interval=0.02)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_waits_gets_headers_and_comments(
    path: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "FIRST_COMMENT_S", 0.01)
    engine.delay = 0.1
    with TestClient(create_app(engine, limits=LIMITS)) as client:
        response = client.post(path, json={**BODY, "max_tokens": 2})
    comment = COMMENT + COMMENT_END
    assert response.status_code == 200 and response.content.startswith(comment * 2)
    assert response.content.endswith(b"data: [DONE]\n\n")
    events = [e for e in response.content.split(b"\n\n") if e and e != comment.strip()]
    assert all(event.startswith(b"data: ") for event in events)


def events_of_stripped(pieces: list[bytes]) -> list[str]:
    """The events that a client finds which strips each piece that it reads.

    So does that of `vllm bench serve`, the first benchmark that many run.
    """
    found, buffer = list[str](), ""
    for piece in pieces:
        buffer += piece.strip().decode()
        *whole, buffer = buffer.split("\n\n")
        found += [one for one in whole if one.strip() and not one.startswith(":")]
        text = buffer.removeprefix("data: ")
        if text != buffer and (text == "[DONE]" or text.endswith("}")):
            found.append(buffer)
            buffer = ""
    return [one.removeprefix("data: ") for one in found]


def test_comments_cost_no_event_where_a_client_strips_what_it_reads(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "FIRST_COMMENT_S", 0.01)
    engine.delay = 0.1

    async def main() -> None:
        connection = Connection(COMPLETIONS, BODY)
        app = create_app(engine, limits=LIMITS)
        await app(connection.scope, connection.receive, connection.send)
        pieces = [one["body"] for one in connection.sent[1:]]
        assert sum(piece.endswith(COMMENT) for piece in pieces) > 5
        *events, done = events_of_stripped(pieces)
        told = "".join(json.loads(one)["choices"][0]["text"] for one in events)
        assert (told, done) == (engine.reply, "[DONE]")

    asyncio.run(main())


def test_a_stream_with_news_has_no_comments(client: TestClient) -> None:
    assert COMMENT not in client.post(COMPLETIONS, json=BODY).content


def test_an_error_behind_the_headers_is_an_event(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "FIRST_COMMENT_S", 0.01)
    engine.delay, engine.fail_after = 0.1, 0
    with TestClient(create_app(engine, limits=LIMITS)) as client:
        response = client.post(COMPLETIONS, json=BODY)
    assert response.status_code == 200
    *_, error, done, end = response.content.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500
    assert (done, end) == (b"data: [DONE]", b"")


def test_leaving_while_comments_come(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "FIRST_COMMENT_S", 0.01)

    async def main() -> None:
        engine.delay = 60
        connection = Connection(COMPLETIONS, BODY)
        app = create_app(engine, limits=LIMITS)
        before = asyncio.all_tasks()
        call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
        await wait_for(lambda: len(connection.sent) > 2)
        connection.gone.set()
        async with asyncio.timeout(5):
            await call
        assert engine.aborted == engine.started
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "no task is left"

    asyncio.run(main())


def test_no_comment_comes_into_the_middle_of_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader takes it piece by piece, and slowly."""
    monkeypatch.setattr(event_stream, "FIRST_COMMENT_S", 0.001)
    large = b"data: " + b"x" * (4 * PIECE_BYTES) + b"\n\n"

    async def events() -> Any:
        yield large
        await asyncio.sleep(0.05)

    async def main() -> None:
        connection = Connection(COMPLETIONS, {})
        send = connection.send

        async def slowly(message: Any) -> None:
            await asyncio.sleep(0.01)
            await send(message)

        app = UnreadMiddleware(EventStream(events(), 0.001), UnreadAnswers(2**20))
        await app(connection.scope, connection.receive, slowly)
        sent = b"".join(one["body"] for one in connection.sent[1:])
        assert len(connection.sent) > 6 and large in sent and sent.count(COMMENT) > 1

    asyncio.run(main())


def test_a_comment_that_was_never_written_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a reader that reads on when the stream is over."""
    monkeypatch.setattr(event_stream, "FIRST_COMMENT_S", 0.001)

    async def main() -> None:
        connection, waits = Connection(COMPLETIONS, {}), asyncio.Event()

        async def events() -> Any:
            yield b"data: 1\n\n"
            await waits.wait()

        async def send(message: Any) -> None:
            if message.get("body") == COMMENT:
                waits.set()
                await asyncio.Event().wait()
            await connection.send(message)

        await EventStream(events(), 0.001)({}, connection.receive, send)
        assert [one["body"] for one in connection.sent[1:]] == [
            b"data: 1\n\n",
            b"data: [DONE]\n\n",
        ]

    asyncio.run(main())


def test_what_several_streams_have_to_say_waits_in_them() -> None:
    """A reader of two streams that stops reading stops them after a bounded number of outputs."""
    told = [0]

    async def endless() -> Any:
        while True:
            told[0] += 1
            yield RequestOutput("r", None, [1], [CompletionOutput(0, "x", [1])], False)
            await asyncio.sleep(0)

    async def main() -> None:
        outputs = merge([endless(), endless()])
        await anext(outputs)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert told[0] < 100
        await outputs.aclose()

    asyncio.run(main())


def test_repeated_lines_are_counted(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(repeated.time, "monotonic", lambda: now[0])
    logger = logging.getLogger("jaxserve.test_repeated")
    handler = logging.Handler()
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(repeated.RepeatedFilter())
    logger.addHandler(handler)
    try:
        for number in range(50):
            logger.warning("too hot: %d", number)
            logger.info("fine")
        assert lines == [f"too hot: {number}" for number in range(10)]
        logger.error("another place")
        now[0] = 61.0
        logger.warning("elsewhere")
        for number in (50, 51):
            logger.warning("too hot: %d", number) if number == 51 else None
    finally:
        logger.removeHandler(handler)
    assert lines[10:12] == ["another place", "elsewhere"]


def test_the_next_minute_says_how_many_were_left_out(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(repeated.time, "monotonic", lambda: now[0])
    check = repeated.RepeatedFilter()

    def line() -> logging.LogRecord | None:
        record = logging.LogRecord("a", logging.WARNING, "file.py", 7, "hot: %d", (1,), None)
        return record if check.filter(record) else None

    assert sum(line() is not None for _ in range(50)) == 10
    now[0] = 61.0
    record = line()
    assert record is not None and record.getMessage() == "hot: 1 (and 40 such lines before)"
