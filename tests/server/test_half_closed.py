"""A client that has ended its side of the connection: it waits for its answer, or is gone."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from server.app import create_app
from server.client_limits import Limits
from server.connection import Connection
from tests.server.fake_engine import FakeEngine
from tests.server.test_connection import HEAD, serving
from tests.server.test_many_connections import connect, post
from tests.waiting import until

openai = pytest.importorskip("openai", reason="needs the extra `test`")
LIMITS = Limits(keep_alive_interval=0.2)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.delay = 0.05  # each of five tokens
    return engine


@pytest.fixture
def port(engine: FakeEngine) -> Iterator[int]:
    with serving(create_app(engine), Connection.limited(LIMITS)) as port:
        yield port


def rest(client: socket.socket) -> bytes:
    received = b""
    while piece := client.recv(65536):
        received += piece
    return received


@pytest.mark.parametrize("stream", [False, True])
def test_it_gets_its_answer_and_the_connection_ends(
    port: int, engine: FakeEngine, stream: bool
) -> None:
    with connect(port) as client:
        client.sendall(post(stream=stream))
        client.shutdown(socket.SHUT_WR)
        received = rest(client)
    interim, _, answer = received.partition(b"HTTP/1.1 200 ")
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n" * interim.count(b"100") != b""
    assert b"100 Continue" not in answer
    assert answer.count(b"data: ") == 6 if stream else json.loads(answer.split(b"\r\n\r\n")[1])
    assert engine.finished and not engine.aborted


def test_requests_in_line_are_answered_too(port: int) -> None:
    with connect(port) as client:
        client.sendall(post() * 3)
        client.shutdown(socket.SHUT_WR)
        assert rest(client).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_one_that_is_gone_is_noticed_at_once(
    port: int, engine: FakeEngine, stream: bool, requests: int
) -> None:
    engine.delay = 60
    with connect(port) as client:
        client.sendall(post(stream=stream) * requests)
        until(lambda: engine.started)
        time.sleep(0.1)
        assert not engine.aborted
    until(lambda: engine.aborted, 5)


@pytest.mark.parametrize("reads", [False, True])
def test_one_that_waits_and_then_goes_is_noticed(
    port: int, engine: FakeEngine, reads: bool
) -> None:
    engine.delay = 60
    with connect(port) as client:
        client.sendall(post())
        client.shutdown(socket.SHUT_WR)
        if reads:
            client.recv(1000)
        until(lambda: engine.started)
        assert not engine.aborted
    until(lambda: engine.aborted, 5)


def test_where_it_cannot_be_told_it_is_gone(port: int, engine: FakeEngine) -> None:
    """HTTP/1.0 has no answer before the answer."""
    with connect(port) as client:
        client.sendall(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        client.shutdown(socket.SHUT_WR)
        assert rest(client) == b""
    if engine.started:
        until(lambda: engine.aborted, 5)
    assert not engine.finished


def test_half_a_request_is_none(port: int, engine: FakeEngine) -> None:
    with connect(port) as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        client.shutdown(socket.SHUT_WR)
        assert rest(client) == b""
    assert not engine.started


@contextmanager
def half_closing(port: int) -> Iterator[int]:
    """A relay that ends its side to the server behind each client's first request."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def relay() -> None:
        with listener.accept()[0] as client, connect(port) as server:
            request = b""
            while b"\r\n\r\n" not in request:
                request += client.recv(65536)
            head, _, body = request.partition(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < size:
                body += client.recv(65536)
            server.sendall(head + b"\r\n\r\n" + body)
            server.shutdown(socket.SHUT_WR)
            while piece := server.recv(65536):
                seen.append(piece)
                client.sendall(piece)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    thread.join(10)
    listener.close()
    assert seen and seen[0].startswith(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
def test_clients_pass_over_what_is_written_before_the_answer(port: int, stream: bool) -> None:
    body = json.dumps({"prompt": "a", "stream": stream})
    headers = {"content-type": "application/json"}
    with half_closing(port) as relay:
        client = http.client.HTTPConnection("127.0.0.1", relay, timeout=10)
        client.request("POST", "/v1/completions", body, headers)
        answer = client.getresponse()
        assert answer.status == 200 and b"cmpl-" in answer.read()
    with (
        half_closing(port) as relay,
        openai.OpenAI(base_url=f"http://127.0.0.1:{relay}/v1", api_key="a", timeout=10) as client,
    ):
        told = client.completions.create(model="/models/fake", prompt="a", stream=stream)
        text = "".join(one.choices[0].text for one in told) if stream else told.choices[0].text
        assert text == "hello"
