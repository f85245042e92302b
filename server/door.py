"""Refusals before anything of a request is read but its head: the cheapest thing a server does.

Where more comes than can be served, most of what a server does is to refuse. An application that is
asked costs twenty times what a refusal takes here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable

from server.errors import ApiError
from server.in_flight import Entry, InFlight
from server.protocol.requests import is_request_id

# Whose requests wait for the engine.
PATHS = frozenset(
    {b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/v1/embeddings"}
)
# A request with one of these is answered by the application, which knows what to say to it.
OTHERS = frozenset({b"expect", b"origin", b"upgrade"})

Refusal = Callable[[], ApiError | None]


class Door:
    """Refuses requests that would be refused whatever they are.

    Args:
        refusal: what a request is told that comes now; None lets it in.
        flight: counts those that are let in.
        serves: whether any is; if not, the application says why.
    """

    def __init__(
        self, refusal: Refusal, flight: InFlight, serves: Callable[[], bool] = lambda: True
    ):
        self._refusal, self._flight, self._serves = refusal, flight, serves

    def answer(
        self, method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[bytes, bytes] | Entry | None:
        """Headers, each with its line's end, and body of a 503; or that it may come in.

        None: the application decides.

        Args:
            method, url: of the request.
            headers: names in lower case.
        """
        if method != b"POST" or url.partition(b"?")[0] not in PATHS:
            return None
        given = b""
        for name, value in headers:
            if name in OTHERS:
                return None
            if name == b"x-request-id":
                given = value
        if not self._serves():
            return None
        error = self._refusal()
        if error is None:
            return self._flight.enter()
        body = json.dumps(error.body(), separators=(",", ":")).encode()
        lines = [b"%b: %b\r\n" % (n.lower().encode(), v.encode()) for n, v in error.headers.items()]
        is_harmless = given and is_request_id(given.decode("latin-1"))
        lines.append(
            b"x-request-id: %b\r\n" % (given if is_harmless else secrets.token_hex(16).encode())
        )
        return b"".join(lines), body
