"""Bytes that are no HTTP: one error body, then the connection is closed; the server goes on."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from jaxserve.errors import QueueFullError
from server import connection
from server.admission import Admission
from server.app import create_app
from server.client_limits import Limits
from server.connection import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, Connection
from server.engine_route import engine_paths
from tests.server.fake_engine import FakeEngine
from tests.waiting import until


@contextmanager
def serving(app: Any, protocol: type[Connection] = Connection) -> Iterator[int]:
    """A server's port."""
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(app, http=protocol, ws="none", log_level="critical")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    engine = FakeEngine()
    engine.delay = 0.02
    with serving(create_app(engine)) as port:
        yield port


def answer(port: int, *pieces: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has closed already
        received = b""
        try:
            while piece := client.recv(65536):
                received += piece
        except ConnectionResetError:
            pass  # it closed while we were still sending
        return received


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MALFORMED = {
    "bytes": bytes(range(256)),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "version": b"GET /health HTTP/9.9\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\nX: a\x00b\r\n\r\n",
    "chunk size": CHUNKED + b"zz\r\n",
    "negative chunk size": CHUNKED + b"-5\r\nabc",
    "huge chunk size": CHUNKED + b"f" * 30 + b"\r\n",
    "chunk longer than its size": CHUNKED + b"2\r\nabcdef\r\n",
    "negative length": HEAD + b"Content-Length: -4\r\n\r\nabcd",
    "two lengths": HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
}


def check_error(received: bytes, status: int) -> str:
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), received
    assert b"\r\nconnection: close" in head and b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return error["message"]


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_malformed_http_gets_the_one_error(port, sent):
    check_error(answer(port, sent), 400)
    good = answer(port, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert good.startswith(b"HTTP/1.1 200 ")


def test_a_head_without_end_is_refused(port):
    message = check_error(answer(port, b"GET / HTTP/1.1\r\nX: ", *[b"a" * 2**16] * 20), 431)
    assert str(MAX_HEAD_BYTES) in message


@pytest.mark.parametrize("length", [MAX_HEAD_BYTES + 1, 200_000])
@pytest.mark.parametrize("behind", [b"", b"GET /health HTTP/1.1\r\n\r\n", b"body"])
def test_a_long_head_is_refused_however_it_arrives(port, length, behind):
    one_header = b"POST /tokenize HTTP/1.1\r\nX: " + b"a" * length
    many = b"POST /tokenize HTTP/1.1\r\n" + b"X: aaaa\r\n" * (length // 9 + 1)
    for head in (one_header + b"\r\n", many, b"GET /" + b"a" * length + b" HTTP/1.1\r\n"):
        check_error(answer(port, head + b"Content-Length: 4\r\n\r\n" + behind), 431)


@pytest.mark.parametrize("is_complete", [True, False])
def test_more_headers_than_are_kept_are_refused(port, is_complete):
    head = b"GET /health HTTP/1.1\r\n" + b"aa: bb\r\n" * MAX_HEADERS
    assert answer(port, head + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    given = head + b"aa: bb\r\n" * 2 + (b"\r\n" if is_complete else b"")
    check_error(answer(port, given), 431)
    head = b"GET /health HTTP/1.1\r\n" + b"aa: bb\r\n" * (MAX_HEADERS - 1)
    assert answer(port, head + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_the_longest_head_is_served_on_every_request_of_a_client(port):
    fill = b"a" * (MAX_HEAD_BYTES - 200)
    request = b"GET /health HTTP/1.1\r\nX: %b\r\n" % fill
    received = answer(port, request + b"\r\n", request + b"Connection: close\r\n\r\n")
    assert received.count(b"HTTP/1.1 200 ") == 2


def test_a_large_body_is_no_head(port):
    """What comes after the headers counts against another limit, on every request of a client."""
    body = b" " * (2 * MAX_HEAD_BYTES) + b'{"prompt": "a", "max_tokens": 1}'
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert answer(port, request, last).count(b"HTTP/1.1 200 ") == 2


def test_headers_that_do_not_come_are_not_waited_for(port, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    check_error(answer(port, b"GET /health HTTP/1.1\r\nX: a"), 408)


STREAM = b'{"prompt": "a", "max_tokens": 5, "stream": true}'
MANY = b"GET /health HTTP/1.1\r\n\r\n" * (MAX_PIPELINED + 5)


@pytest.mark.parametrize(
    ("sent", "others"),
    [
        (b"\x00\xff garbage\r\n\r\n", 0),
        (MANY, MAX_PIPELINED),
        (b"GET /health HTTP/1.1\r\n\r\n" + CHUNKED + b"zz\r\n", 1),
    ],
)
def test_a_refusal_waits_until_the_requests_before_it_are_answered(port, sent, others):
    """An error in the middle of a response would be read as part of it."""
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request)
        received = client.recv(65536)
        client.sendall(sent)
        while piece := client.recv(65536):
            received += piece
    stream, *answers, refusal = received.split(b"HTTP/1.1 ")[1:]
    assert stream.startswith(b"200 ") and stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(answers) == others and all(one.startswith(b"200 ") for one in answers)
    check_error(b"HTTP/1.1 " + refusal, 400)


def test_a_request_that_was_refused_early_is_not_answered_twice():
    with refusing() as port:
        received = answer(port, CHUNKED + b"zz\r\n")
        assert received.startswith(b"HTTP/1.1 503 ") and received.count(b"HTTP/1.1 ") == 1
        received = answer(port, HEAD + b"Content-Length: 3\r\n\r\nabc\x00 zz\r\n")
    assert [one[:3] for one in received.split(b"HTTP/1.1 ")] == [b"", b"503", b"400"]


@pytest.mark.parametrize("kept", [b"", b"Connection: close\r\n"])
def test_who_still_sends_what_was_refused_sees_why(kept):
    """Before the connection is closed the rest is dropped, of which there is a bounded amount."""
    most = Limits(max_body_bytes=2**23)
    with refusing(most) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(10)
        client.sendall(HEAD + kept + b"Content-Length: 8000000\r\n\r\n")
        time.sleep(0.05)
        for _ in range(80):
            client.sendall(b" " * 100_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("kept", [b"", b"Connection: close\r\n"])
def test_what_is_dropped_behind_a_refusal_is_bounded(kept, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 60.0)
    most = Limits(max_body_bytes=2**20)
    with refusing(most) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(10)
        client.sendall(CHUNKED.replace(b"\r\n\r\n", b"\r\n" + kept + b"\r\n"))
        with pytest.raises(OSError, match=r"reset|pipe"):
            for _ in range(500):  # 32 MiB
                client.sendall(b"ffff\r\n" + b" " * 0xFFFF + b"\r\n")


@contextmanager
def refusing(limits: Limits = Limits()) -> Iterator[int]:  # noqa: B008
    """A server whose queue is full."""
    engine = FakeEngine()
    engine.room_error = QueueFullError("max_num_queued_reqs", "full", 1.0)
    app = create_app(engine, limits=limits)
    service = app.state.service
    admission = Admission(service, engine_paths(app.routes))
    with serving(app, Connection.limited(limits, admission)) as port:
        yield port


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_that_asks_nothing_is_closed_without_a_word(port, sent, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    assert answer(port, sent) == b""


def test_the_time_for_a_head_begins_with_its_first_byte(port, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    request = b"GET /health HTTP/1.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.4)  # it may be idle for longer than that
        client.sendall(request)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.sendall(request[:5])
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "header", [b"", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"]
)
def test_a_stream_to_old_http_ends_with_its_connection(port, header):
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + header
    received = answer(port, head + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head and b"connection: keep-alive" not in head
    assert body.startswith(b"data: {") and body.endswith(b"\n\ndata: [DONE]\n\n")


def test_old_http_is_told_lengths_and_nothing_of_a_body_where_there_is_none(port):
    for method, length in (b"GET", True), (b"HEAD", False):
        received = answer(port, method + b" /version HTTP/1.0\r\n\r\n")
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"content-length: " in head and b"transfer-encoding" not in head
        assert bool(body) == length
