"""What is no HTTP at all: one error body, then the connection is closed, and the server goes on."""

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

from server import connection
from server.app import create_app
from server.connection import MAX_HEAD_BYTES, MAX_HEADERS, Connection
from tests.server.fake_engine import FakeEngine


@contextmanager
def serving(app: Any, protocol: type[Connection] = Connection) -> Iterator[int]:
    """A server's port."""
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(app, http=protocol, ws="none", log_level="critical")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
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


def test_garbage_behind_a_streams_request_only_closes(port):
    """An error in the middle of a response would be read as part of it."""
    body = b'{"prompt": "a", "max_tokens": 5, "stream": true}'
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request)
        received = client.recv(65536)
        client.sendall(b"\x00\xff garbage\r\n\r\n")
        while piece := client.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400" not in received and b"[DONE]" not in received
