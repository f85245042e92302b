"""One client's connection: uvicorn's, with our error body and bounds on a request's head."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import ApiError

MAX_HEAD_BYTES = 2**16  # request line and headers
HEAD_TIMEOUT_S = 60.0


class Connection(HttpToolsProtocol):
    """Refuses what is no HTTP (400), a head too long (431) and one that does not come (408)."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head_bytes: int | None = 0  # None while a body is read
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_long_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_bytes is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._head_is_over()
        # of the bytes received, some may be the body's or the next request's
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse_long_head()
            raise HttpParserError("the head is too long")  # what follows is not parsed
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser gives up."""
        self._refuse(400, msg)

    def _wait_for_head(self) -> None:
        self._head_bytes = 0
        late = f"the headers did not arrive in {HEAD_TIMEOUT_S:.0f} s"
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, 408, late)

    def _head_is_over(self) -> None:
        self._head_bytes = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_long_head(self) -> None:
        self._refuse(431, f"request line and headers are longer than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        self._head_is_over()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(ApiError(status, message).body()).encode()
            head = [STATUS_LINE[status]]
            head += [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
            head.append(b"content-type: application/json\r\nconnection: close\r\n")
            head.append(b"content-length: %d\r\n\r\n" % len(body))
            self.transport.write(b"".join([*head, body]))
        self.transport.close()
