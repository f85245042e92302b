"""A plain server with OpenAI's API that behaves as other engines do, or badly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from tests.http_serving import QuietHandler, answering

KEY = "secret"


def event(fields: dict[str, Any], end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(fields, ensure_ascii=False)}{end}".encode()


def text(piece: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}], "error": None}


# what is answered to a prompt, piece by piece; the prompt chooses
STREAMS: dict[str, list[bytes]] = {
    # no usage, several tokens a piece, CRLF, comments, no [DONE], separators that are no line ends
    "other": [
        b": hello\r\n\r\n",
        event(text("one two\u2028"), "\r\n\r\n"),
        event(text("three\u0085 "), "\r\n\r\n")[:20],
        event(text("three\u0085 "), "\r\n\r\n")[20:],
        event(text("", "stop"), "\r\n\r\n"),
    ],
    "counted": [
        event(text("a b")),
        event(text("c", "length") | {"usage": None}),
        event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}),
        b"data: [DONE]\n\n",
    ],
    "bare": [event(text("a")), event({"choices": [], "usage": {}}), b"data: [DONE]\n\n"],
    "error": [event(text("a")), event({"error": {"message": "out of\nmemory"}})],
    "cut": [event(text("a"))],
    "garbage": [event(text("a")), b"data: {oops\n\n"],
    "list": [event(text("a")), b"data: [1]\n\n"],
    "silence": [b"data: [DONE]\n\n"],
}


class Handler(QuietHandler):
    protocol_version = "HTTP/1.0"  # the end of a stream is the end of the connection

    def do_GET(self) -> None:
        if self.path == "/v1/models" and self.server.lists_models:
            if self.headers.get("Authorization") != f"Bearer {KEY}":
                self.answer(401, b'{"error": "Unauthorized"}')
            else:
                self.answer(200, b'{"data": [{"id": "fake"}]}')
        elif self.path == "/metrics":
            self.answer(200, b"<html>{not metrics</html>")
        else:
            self.answer(404, b"nothing here")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        prompt = body["prompt"]
        if prompt == "refused":
            self.answer(400, b'{"error": {"message": "no\n\n such thing"}}')
        elif prompt == "whole":
            self.answer(200, b'{"choices": [{"text": "not streamed"}]}')
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for piece in STREAMS[prompt]:
                self.wfile.write(piece)
                self.wfile.flush()

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class FakeServer(ThreadingHTTPServer):
    """`seen` holds path, headers and body of every request that was sent to be answered."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lists_models = True
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    with answering(server):
        yield server
