"""What surrounds every request: its id, the API key, and the last line of error handling."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, ClientDisconnected, as_api_error
from server.protocol.requests import is_request_id

# Probes and scrapers carry no key; everything else does.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})


class RequestIdMiddleware:
    """Gives each response an `X-Request-Id`: the client's own if it is harmless, else a new one.

    The client's id is kept in `scope["state"]["client_request_id"]` (None when there is none). An
    id with other characters (line breaks, quotes, megabytes) is replaced, never repeated in a log
    or header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id")
        client_id = given if given is not None and is_request_id(given) else None
        scope.setdefault("state", {})["client_request_id"] = client_id
        shown = client_id or secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = shown
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Refuses requests without a valid `Authorization: Bearer <key>`, except on OPEN_PATHS.

    Keys are compared by digest, all of them, in constant time. The path is the one that routing
    uses, never one rebuilt from the Host header.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allows(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(401, "a valid API key is required", headers={"WWW-Authenticate": "Bearer"})
        await error.response()(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1", "replace"))
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class ErrorMiddleware:
    """Turns any exception of a route into an error body; the server goes on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watching_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watching_send)
        except ClientDisconnected:
            return
        except Exception as error:
            if started:
                # Half a response is out: only breaking the connection tells the client.
                raise
            await as_api_error(error).response()(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
