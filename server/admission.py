"""What connections ask of the ledger: refusals before a body is read, and requests on their way in.

Where more comes than can be served, most of what a server does is to refuse. An application that is
asked costs twenty times what a refusal takes here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxserve.scheduling.ledger import Entry
from server.errors import ApiError
from server.keys import KeyRing, address_name
from server.protocol.requests import is_request_id

# A request with one of these is answered by the application, which knows what to say to it, or
# whose it is.
OTHERS = frozenset({b"expect", b"origin", b"upgrade", b"x-forwarded-for"})


class BusyResponse(NamedTuple):
    """The headers of a 503, each with its line's end, and its body."""

    head: bytes
    body: bytes


class Admission:
    """Judges requests by their heads.

    Args:
        refusal: what the next request of a client is told; None lets it in.
        enter: lets a request of a client in.
        paths: whose requests wait for the engine, see `engine_paths`.
        keys: tell clients apart; None: their addresses do.
        serves: whether any request is let in; if not, the application says why.
    """

    def __init__(
        self,
        refusal: Callable[[str], ApiError | None],
        enter: Callable[[str], Entry],
        paths: Mapping[bytes, str],
        keys: KeyRing | None = None,
        serves: Callable[[], bool] = lambda: True,
    ):
        self._refusal, self._serves, self._keys = refusal, serves, keys
        self._enter, self._paths = enter, paths

    def look(
        self, method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]], address: str
    ) -> BusyResponse | Entry | None:
        """Why a request is refused, or that it is let in; None: the application decides.

        Args:
            method, url: of the request.
            headers: names in lower case.
            address: of the client; "" of a Unix socket.
        """
        path = self._paths.get(url.partition(b"?")[0]) if method == b"POST" else None
        if path is None:
            return None
        headers, given = list(headers), b""
        for name, value in headers:
            if name in OTHERS:
                return None
            if name == b"x-request-id":
                given = value
        if not self._serves():
            return None
        if self._keys is None:
            client = address_name(address)
        else:
            found = self._keys.find(headers)
            if found is None:
                return None  # a 401
            client = found.queue_name
        error = self._refusal(client)
        if error is None:
            return self._enter(client)
        body = json.dumps(error.body(path), separators=(",", ":")).encode()
        lines = [b"%b: %b\r\n" % (n.lower().encode(), v.encode()) for n, v in error.headers.items()]
        is_harmless = given and is_request_id(given.decode("latin-1"))
        lines.append(
            b"x-request-id: %b\r\n" % (given if is_harmless else secrets.token_hex(16).encode())
        )
        return BusyResponse(b"".join(lines), body)
