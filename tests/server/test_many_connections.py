"""Connections that hold what others need: refused, cut off, or closed for a newer one."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from server import connection, descriptors, peer
from server.app import create_app
from server.client_limits import Limits
from server.connection import MAX_HEAD_BYTES, Connection
from server.descriptors import Descriptors
from tests.server.fake_engine import FakeEngine
from tests.server.test_connection import CHUNKED, HEAD, answer, check_error, serving
from tests.waiting import until

HEALTH = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
LIMITS = Limits(max_connections=4, write_timeout=0.4, idle_timeout=1)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def port(engine: FakeEngine) -> Iterator[int]:
    with serving(create_app(engine), Connection.limited(LIMITS)) as port:
        yield port


def post(**body: object) -> bytes:
    text = json.dumps({"prompt": "a", **body}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(text) + text


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def test_trailers_are_dropped_and_bounded(port: int) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    chunk = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    good = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    received = answer(port, good + chunk + b"X-Priority: 1\r\nY: 2\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200 ")
    many = b"X: aaaa\r\n" * (MAX_HEAD_BYTES // 9 + 2)
    check_error(answer(port, CHUNKED + chunk + many), 431)
    # behind a response that needed no body
    chunked_get = b"GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert answer(port, chunked_get + b"0\r\n", many).count(b"HTTP/1.1 ") <= 2


def test_a_body_that_goes_on_behind_its_answer_is_not_read_for_ever(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    begin = time.monotonic()
    received = answer(port, b"GET /health HTTP/1.1\r\nContent-Length: 100\r\n\r\nabc")
    assert received.startswith(b"HTTP/1.1 200 ") and 0.15 < time.monotonic() - begin < 5


def test_who_leaves_while_a_refusal_waits_is_noticed(
    port: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "LOOK_S", 0.05)
    engine.delay = 60
    with connect(port) as client:
        client.sendall(post() + b"\x00\r\n" * 40)
        until(lambda: engine.started)
        client.sendall(b"\r\n" * 40)
        time.sleep(0.1)
        assert not engine.aborted
    until(lambda: engine.aborted, 5)


@pytest.mark.parametrize("sent", [b"", HEAD + b"Content-Length: 60\r\n\r\n{"])
def test_a_connection_without_a_whole_request_makes_room(
    port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """However many others open without a word, or with half of it, everybody is served."""
    monkeypatch.setattr(connection, "MIN_IDLE_S", 0.0)
    with ExitStack() as stack:
        idle = []
        for _ in range(40):
            idle.append(stack.enter_context(connect(port)))
            idle[-1].sendall(sent)
            time.sleep(0.005)  # so that they are read in this order
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        for _ in range(8):
            assert answer(port, head + body).startswith(b"HTTP/1.1 200 ")
        assert idle[0].recv(10) == b"", "the first to be silent is the first to go"


def test_where_all_are_busy_others_may_ask_for_health(
    port: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "EXTRA_CONNECTIONS", 64)
    engine.delay = 60
    with ExitStack() as stack:
        for _ in range(LIMITS.max_connections):
            stack.enter_context(connect(port)).sendall(post())
        until(lambda: len(engine.started) >= LIMITS.max_connections)
        assert answer(port, HEALTH).startswith(b"HTTP/1.1 200 ")
        refused = answer(port, post())
        assert b"retry-after: 1" in refused and "too many" in check_error(refused, 503)
        crowd = [stack.enter_context(connect(port)) for _ in range(200)]
        assert answer(port, HEALTH).startswith(b"HTTP/1.1 200 "), "one of the crowd makes room"
        assert crowd[0].recv(10) == b""
        monkeypatch.setattr(descriptors, "EXTRA_CONNECTIONS", -64)
        for one in crowd:
            one.close()
        time.sleep(0.05)
        refused = stack.enter_context(connect(port))
        assert b" 503 " in refused.recv(100), "beyond any bound it is answered at once"


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off() -> None:
    ended: list[float] = []

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": b" " * 2**20, "more_body": True})
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        ended.append(time.monotonic())

    with serving(flood, Connection.limited(LIMITS)) as port, connect(port) as client:
        begin = time.monotonic()
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: ended, 10)
        assert LIMITS.write_timeout * 0.9 < ended[0] - begin < 5
    # one that reads gets it all, however long that takes in all
    with serving(flood, Connection.limited(LIMITS)) as port, connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        received = 0
        while received < 64 * 2**20:
            received += len(client.recv(2**20))


@pytest.fixture
def uvicorn_log(port: int, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What uvicorn tells, which keeps it from the root's handlers."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    caplog.set_level("INFO", "uvicorn.error")
    caplog.clear()
    try:
        yield caplog
    finally:
        logger.removeHandler(caplog.handler)


UPGRADE = b"Host: x\r\nConnection: Upgrade\r\nUpgrade: %b\r\n"


def test_a_websocket_is_refused_without_a_word(
    port: int, uvicorn_log: pytest.LogCaptureFixture
) -> None:
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    for path in (b"/v1/models", b"/v1/chat/completions", b"/"):
        asked = b"GET %b HTTP/1.1\r\n" % path + UPGRADE % b"WebSocket" + key
        assert "websockets" in check_error(answer(port, asked, b"\x81\x80abcd"), 400)
    assert not uvicorn_log.records


def test_another_protocol_that_a_client_would_like_is_passed_over(
    port: int, uvicorn_log: pytest.LogCaptureFixture
) -> None:
    """As curl --http2 asks."""
    asked = b"GET /health HTTP/1.1\r\n" + UPGRADE % b"h2c" + b"\r\n"
    with connect(port) as client:
        for _ in range(2):
            client.sendall(asked)
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert not uvicorn_log.records


def test_expectations(port: int) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n" % len(body)
    with connect(port) as client:
        client.sendall(head + b"Expect: 100-Continue\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    check_error(answer(port, head + b"Expect: bogus\r\n\r\n" + body), 417)


class OfAnother(Descriptors):
    """Of a process that has 20 files open beside its connections, whatever this one has."""

    connections: ClassVar[Collection[Any]] = ()

    def excess(self, number: int) -> int:
        return super().excess(20 + len(self.connections) - 1)


class Counted(Connection):
    def connection_made(self, transport: Any) -> None:
        OfAnother.connections = self.connections
        super().connection_made(transport)


def test_where_descriptors_run_out_health_is_told_and_the_log_says_so(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 64: 16 are kept, 1 listens, 8 are for health; 39 and above are not served."""
    engine.delay = 60
    protocol = Counted.limited(Limits(), None, OfAnother(64))
    with serving(create_app(engine), protocol) as port, ExitStack() as stack:
        for _ in range(39 - 20):
            stack.enter_context(connect(port)).sendall(post())
        until(lambda: len(engine.started) >= 39 - 20)
        assert not caplog.records
        assert answer(port, HEALTH).startswith(b"HTTP/1.1 200 ")
        assert "too many" in check_error(answer(port, post()), 503)
        assert "open: 20" in caplog.text
        silent = [stack.enter_context(connect(port)) for _ in range(20)]
        assert answer(port, HEALTH).startswith(b"HTTP/1.1 200 ")
        assert silent[0].recv(1) == b"", "the newest of them may still ask"
        silent[-1].sendall(HEALTH)
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_websocket_behind_a_request_does_not_end_its_answer(
    port: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is not idle while an answer is being made, however it was refused more."""

    def soon(self: Connection) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(0.05, self.timeout_keep_alive_handler)

    monkeypatch.setattr(Connection, "_keep_for_a_while", soon)
    engine.delay = 0.1  # each of five tokens
    asked = b"GET / HTTP/1.1\r\n" + UPGRADE % b"websocket" + b"\r\n"
    ok, refusal = answer(port, post() + asked).split(b"HTTP/1.1 ")[1:]
    assert ok.startswith(b"200 ")
    check_error(b"HTTP/1.1 " + refusal, 400)
