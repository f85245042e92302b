"""What is refused before a body is read, by the connection and not by the application."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.errors import QueueFullError
from server.app import create_app
from server.connection import Connection
from server.door import Door
from server.limits import Limits
from tests.server.fake_engine import FakeEngine
from tests.server.test_connection import HEAD, answer, check_error, serving
from tests.server.test_many_connections import connect, post

FULL = QueueFullError("max_queue_wait", "the predicted wait is 1.2 s", 1.2)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def asked() -> list[str]:
    """Paths for which the application was asked."""
    return []


@pytest.fixture
def port(engine: FakeEngine, asked: list[str]) -> Iterator[int]:
    app = create_app(engine, allowed_origins=["http://a.example"])

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.append(scope["path"])
        await app(scope, receive, send)

    engine.service = service = app.state.service  # type: ignore[attr-defined]
    door = Door(service.refusal, service.in_flight)
    with serving(watched, Connection.limited(Limits(idle_timeout=1), door)) as port:
        yield port


def read_answer(client: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)
    assert len(body) == length
    return head + b"\r\n\r\n" + body


def test_a_refusal_leaves_the_application_alone_and_the_connection_open(
    port: int, engine: FakeEngine, asked: list[str]
) -> None:
    with connect(port) as client:
        for _ in range(2):
            engine.refusal = FULL
            client.sendall(post())
            refused = read_answer(client)
            error = json.loads(refused.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == 503 and error["message"].startswith("the predicted wait")
            assert b"\r\nretry-after: 2\r\n" in refused and b"connection: close" not in refused
            assert b"\r\nx-request-id: " in refused
            # a body that comes late and in pieces is dropped, and so is one in chunks
            client.sendall(HEAD + b"Content-Length: 10\r\n\r\n12345")
            assert read_answer(client).startswith(b"HTTP/1.1 503")
            client.sendall(b"67890" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
            assert read_answer(client).startswith(b"HTTP/1.1 503")
            client.sendall(b"0\r\n\r\n")
            assert not asked and not engine.started
            engine.refusal = None
            client.sendall(post())
            assert read_answer(client).startswith(b"HTTP/1.1 200")
            assert asked == ["/v1/completions"]
            asked.clear()
            engine.started.clear()


def test_refusals_keep_the_order_of_their_requests(port: int, engine: FakeEngine) -> None:
    engine.refusal, health = FULL, b"GET /health HTTP/1.1\r\n\r\n"
    with connect(port) as client:
        client.sendall(
            post() + health + post() + health.replace(b"\r\n\r", b"\r\nConnection: close\r\n\r")
        )
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [
        b"503",
        b"200",
        b"503",
        b"200",
    ]


@pytest.mark.parametrize(
    "header", ["Origin: http://a.example", "Expect: 100-continue", "Upgrade: h2c"]
)
def test_what_the_application_knows_better_is_its_own(
    port: int, engine: FakeEngine, asked: list[str], header: str
) -> None:
    engine.refusal = FULL
    lines = header.encode() + b"\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    received = answer(port, HEAD + lines)
    assert b"HTTP/1.1 503 " in received and asked == ["/v1/completions"]
    if header.startswith("Origin"):
        assert b"access-control-allow-origin" in received.lower()


def test_other_routes_and_methods_are_let_in(
    port: int, engine: FakeEngine, asked: list[str]
) -> None:
    engine.refusal = FULL
    for line in (b"GET /health", b"GET /v1/models", b"GET /v1/completions"):
        answer(port, line + b" HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert asked == ["/health", "/v1/models", "/v1/completions"]


def test_a_connection_that_is_not_kept_is_closed(port: int, engine: FakeEngine) -> None:
    engine.refusal = FULL
    for text in (post().replace(b"HTTP/1.1", b"HTTP/1.0", 1), post()):
        given = (
            text if b"HTTP/1.0" in text else text.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        )
        refused = answer(port, given)
        check_error(refused, 503)
        assert b"connection: close" in refused


def test_a_body_that_does_not_come_is_not_waited_for(
    port: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.connection.LINGER_S", 0.1)
    engine.refusal = FULL
    received = answer(port, HEAD + b"Content-Length: 100\r\n\r\nabc")
    assert received.startswith(b"HTTP/1.1 503 ")


def test_the_clients_request_id_is_given_back_if_it_is_harmless(
    port: int, engine: FakeEngine
) -> None:
    engine.refusal = FULL
    for given, is_shown in ((b"abc-1", True), (b'a"b', False)):
        header = b"\r\nX-Request-Id: " + given + b"\r\nConnection: close\r\n"
        refused = answer(port, post().replace(b"\r\n", header, 1))
        assert (given in refused) is is_shown and b"x-request-id: " in refused


def test_an_engine_that_is_not_ready_is_the_applications(engine: FakeEngine) -> None:
    service = create_app(engine).state.service
    assert service.refusal() is None
    engine.refusal = FULL
    assert json.loads(json.dumps(service.refusal().body()))["error"]["code"] == 503
    engine.silence = "no step for 7 s"
    assert service.refusal() is None and not service.serves()
    engine.silence = None
    assert service.serves()
    engine.is_ready = False
    assert service.refusal() is None


def test_who_is_let_in_counts_until_the_answer(engine: FakeEngine) -> None:
    service = create_app(engine).state.service
    door, flight = Door(service.refusal, service.in_flight), service.in_flight
    headers = [(b"content-type", b"application/json")]
    entries = [door.answer(b"POST", b"/v1/completions", headers) for _ in range(3)]
    assert flight.entering == 3 and flight.count == 0
    for _ in range(2):
        entries[0].leave()
    assert flight.entering == 2
    for _ in range(20):
        with flight.one(1):
            pass
    assert flight.wait(1) == pytest.approx(1 * 2 / 20), "those that enter wait too"
    assert door.answer(b"GET", b"/v1/completions", headers) is None
    assert flight.entering == 2
    closing = Door(service.refusal, flight, service.serves)
    assert closing.answer(b"POST", b"/v1/completions", headers) is not None
    engine.is_draining = True
    assert closing.answer(b"POST", b"/v1/completions", headers) is None
    assert flight.entering == 3, "a drain waits for nobody who is told that it is one"


@pytest.mark.parametrize("text", [post(), post(n=0), HEAD + b"Content-Length: 1\r\n\r\n{"])
def test_nobody_is_left_in_the_door(port: int, engine: FakeEngine, text: bytes) -> None:
    service = engine.service  # type: ignore[attr-defined]
    with connect(port) as client:
        client.sendall(text)
        read_answer(client)
        assert service.in_flight.entering == service.in_flight.count == 0
    engine.delay = 5.0
    with connect(port) as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        wait_until(lambda: service.in_flight.entering == 1)
    wait_until(lambda: service.in_flight.entering == 0)
    with connect(port) as client:
        client.sendall(post())
        wait_until(lambda: service.in_flight.count == 1 and service.in_flight.entering == 0)
    wait_until(lambda: service.in_flight.count == 0)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
