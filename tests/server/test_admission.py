"""Refusals before a body is read, by the connection and not by the application."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from jaxserve.errors import QueueFullError
from jaxserve.scheduling.ledger import Entry, Ledger
from server.admission import Admission, BusyResponse
from server.app import create_app
from server.client_limits import Limits
from server.connection import Connection
from server.engine_route import engine_paths
from server.keys import ApiKey
from server.options import Options
from tests.resolved_config import resolved_config
from tests.server.fake_engine import FakeEngine
from tests.server.test_connection import HEAD, answer, check_error, serving
from tests.server.test_many_connections import connect, post
from tests.waiting import until

PATHS = {b"/v1/completions": "/v1/completions"}
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
    admission = Admission(service, engine_paths(app.routes))
    with serving(watched, Connection.limited(Limits(idle_timeout=1), admission)) as port:
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
            engine.room_error = FULL
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
            engine.room_error = None
            client.sendall(post())
            assert read_answer(client).startswith(b"HTTP/1.1 200")
            assert asked == ["/v1/completions"]
            asked.clear()
            engine.started.clear()


def test_refusals_keep_the_order_of_their_requests(port: int, engine: FakeEngine) -> None:
    engine.room_error, health = FULL, b"GET /health HTTP/1.1\r\n\r\n"
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
    engine.room_error = FULL
    lines = header.encode() + b"\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    received = answer(port, HEAD + lines)
    assert b"HTTP/1.1 503 " in received and asked == ["/v1/completions"]
    if header.startswith("Origin"):
        assert b"access-control-allow-origin" in received.lower()


def test_other_routes_and_methods_are_let_in(
    port: int, engine: FakeEngine, asked: list[str]
) -> None:
    engine.room_error = FULL
    for line in (b"GET /health", b"GET /v1/models", b"GET /v1/completions"):
        answer(port, line + b" HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert asked == ["/health", "/v1/models", "/v1/completions"]


def test_a_connection_that_is_not_kept_is_closed(port: int, engine: FakeEngine) -> None:
    engine.room_error = FULL
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
    engine.room_error = FULL
    received = answer(port, HEAD + b"Content-Length: 100\r\n\r\nabc")
    assert received.startswith(b"HTTP/1.1 503 ")


def test_the_clients_request_id_is_given_back_if_it_is_harmless(
    port: int, engine: FakeEngine
) -> None:
    engine.room_error = FULL
    for given, is_shown in ((b"abc-1", True), (b'a"b', False)):
        header = b"\r\nX-Request-Id: " + given + b"\r\nConnection: close\r\n"
        refused = answer(port, post().replace(b"\r\n", header, 1))
        assert (given in refused) is is_shown and b"x-request-id: " in refused


def test_an_engine_that_is_not_ready_is_the_applications(engine: FakeEngine) -> None:
    service = create_app(engine).state.service
    assert service.refusal("") is None
    engine.room_error = FULL
    assert json.loads(json.dumps(service.refusal("").body()))["error"]["code"] == 503
    engine.silence = "no step for 7 s"
    assert service.refusal("") is None and not service.serves()
    engine.silence = None
    assert service.serves()
    engine.is_ready = False
    assert service.refusal("") is None


def test_every_route_that_has_the_engine_work_is_judged_by_its_heads() -> None:
    """Each asks for room in the queue before its body is read: the others have no use for it."""
    engine = FakeEngine()
    app = create_app(engine, options=Options(has_control_routes=True))
    posts = [one for one in app.routes if isinstance(one, Route) and "POST" in (one.methods or ())]
    asking = set()
    with TestClient(app, raise_server_exceptions=False) as client:
        for route in posts:
            engine.rooms.clear()
            client.post(route.path.replace("{response_id}", "resp_1"), json={})
            if engine.rooms:
                asking.add(route.path)
    assert {"/v1/messages", "/invocations"} < asking and len(posts) > len(asking)
    assert set(engine_paths(app.routes).values()) == asking


def test_paths_are_judged_behind_a_root_path_too() -> None:
    engine = FakeEngine()
    app = create_app(engine, options=Options(root_path="/api"))
    admission = Admission(app.state.service, engine_paths(app.routes, "/api"))
    engine.room_error = FULL
    for root in (b"", b"/api"):
        told = admission.look(b"POST", root + b"/v1/completions?a=b", JSON_HEADERS, "10.0.0.1")
        assert isinstance(told, BusyResponse) and json.loads(told.body)["error"]["code"] == 503
        told = admission.look(b"POST", root + b"/v1/messages", JSON_HEADERS, "10.0.0.1")
        assert isinstance(told, BusyResponse)
        assert json.loads(told.body)["error"]["type"] == "overloaded_error", "Anthropic's shape"
    for url in (b"/api/v1/models", b"/other/v1/completions", b"/v1/messages/count_tokens"):
        assert admission.look(b"POST", url, JSON_HEADERS, "10.0.0.1") is None


JSON_HEADERS = [(b"content-type", b"application/json")]


def look(admission: Admission, *more: tuple[bytes, bytes], address: str = "10.0.0.1") -> Any:
    return admission.look(b"POST", b"/v1/completions", [*JSON_HEADERS, *more], address)


def test_clients_are_judged_apart() -> None:
    engine = FakeEngine(max_num_queued_reqs=2)
    service = create_app(engine).state.service
    admission = Admission(service, PATHS)
    for _ in range(2):
        look(admission).arrive()
    assert isinstance(look(admission), BusyResponse)
    assert look(admission, (b"x-forwarded-for", b"10.0.0.2")) is None, "a proxy's client"
    look(admission, address="10.0.0.2").arrive()
    engine.is_draining = True
    assert look(admission) is None, "the application says that it is a drain"
    assert engine.ledger.num_entering == 3


def test_keys_tell_clients_apart_and_none_is_the_applications() -> None:
    engine = FakeEngine(max_num_queued_reqs=1)
    service = create_app(engine, api_keys=[ApiKey("a", "a"), ApiKey("b", "b")]).state.service
    admission = Admission(service, PATHS)
    look(admission, (b"authorization", b"Bearer a")).arrive()
    assert isinstance(look(admission, (b"x-api-key", b"a")), BusyResponse)
    assert isinstance(look(admission, (b"authorization", b"bearer b")), Entry)
    assert look(admission) is None and look(admission, (b"x-api-key", b"c")) is None, "401"


def test_heads_without_bodies_are_no_work(port: int, engine: FakeEngine) -> None:
    engine.ledger = Ledger(resolved_config(max_num_queued_reqs=1))
    clients = [connect(port) for _ in range(60)]
    for client in clients:
        client.sendall(HEAD + b"Content-Length: 60\r\n\r\n")
    with connect(port) as other:
        for _ in range(20):
            other.sendall(post())
            assert read_answer(other).startswith(b"HTTP/1.1 200")
    for client in clients:
        client.close()


@pytest.mark.parametrize("text", [post(), post(n=0), HEAD + b"Content-Length: 1\r\n\r\n{"])
def test_nothing_is_left_of_a_request_on_its_way_in(
    port: int, engine: FakeEngine, text: bytes
) -> None:
    ledger = engine.ledger
    with connect(port) as client:
        client.sendall(text)
        read_answer(client)
        assert ledger.num_entering == ledger.num_waiting == 0
    engine.delay = 5.0
    with connect(port) as client:
        client.sendall(post())
        until(lambda: ledger.num_waiting == 1 and ledger.num_entering == 0, 10)
    until(lambda: ledger.num_waiting == 0, 10)
