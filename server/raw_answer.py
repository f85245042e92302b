"""Answers that a connection writes by itself, without the application."""

from __future__ import annotations

import json
from collections.abc import Iterable
from http import HTTPStatus

from server.errors import ApiError

_JSON = b"content-type: application/json\r\n"
Headers = Iterable[tuple[bytes, bytes]]


def raw_answer(status: int, default: Headers, lines: bytes, body: bytes, *, ends: bool) -> bytes:
    """An answer in JSON.

    Args:
        default: headers of every answer.
        lines: more headers, each with its line's end.
        ends: whether the connection ends behind it.
    """
    head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()]
    head += [*(b"%b: %b\r\n" % header for header in default), lines, _JSON]
    head.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*head, b"connection: close\r\n\r\n" if ends else b"\r\n", body])


def raw_error(error: ApiError, default: Headers) -> bytes:
    """An error behind which the connection ends."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    body = json.dumps(error.body()).encode()
    return raw_answer(error.status, default, lines.encode(), body, ends=True)
