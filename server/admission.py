"""What connections ask of the ledger: refusals before a body is read, and requests on their way in.

Where more comes than can be served, most of what a server does is to refuse. An application that is
asked costs twenty times what a refusal takes here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxserve.scheduling.ledger import Entry
from server.keys import address_name
from server.protocol.requests import is_request_id
from server.service import Service

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
        service: whose requests they are.
        paths: whose requests wait for the engine, see `engine_paths`.
    """

    def __init__(self, service: Service, paths: Mapping[bytes, str]):
        self._service, self._paths = service, paths

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
        service = self._service
        if len(service.models) > 1:
            return None  # which of them is asked, the body says
        if not service.serves():
            return None  # the application says why
        if service.keys is None:
            client = address_name(address)
        else:
            found = service.keys.find(headers)
            if found is None:
                return None  # a 401
            client = found.queue_name
        error = service.refusal(client)
        if error is None:
            return service.engine.ledger.enter(client)
        body = json.dumps(error.body(path), separators=(",", ":")).encode()
        lines = [b"%b: %b\r\n" % (n.lower().encode(), v.encode()) for n, v in error.headers.items()]
        is_harmless = given and is_request_id(given.decode("latin-1"))
        lines.append(
            b"x-request-id: %b\r\n" % (given if is_harmless else secrets.token_hex(16).encode())
        )
        return BusyResponse(b"".join(lines), body)
