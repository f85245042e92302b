"""What surrounds every request: its id, the API key, and the last line of error handling."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.counts import Cell, Counts
from server.errors import ApiError, ClientDisconnected, as_api_error
from server.keys import KeyRing
from server.logs import REQUEST_ID
from server.protocol.requests import is_request_id

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::\d{1,5})?")
# Probes carry no key, and scrapers need none unless they are told to; everything else does.
PROBE_PATHS = frozenset({"/health", "/ping"})
OPEN_PATHS = PROBE_PATHS | {"/version", "/metrics"}


class DoorMiddleware:
    """Refuses what no route serves: websockets, and hosts that this server is not.

    A page of the web can have a browser call a server of its machine under a name of the page's own
    (DNS rebinding); the Host header then holds that name.

    Args:
        allowed_hosts: names without their ports; empty means any.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str]) -> None:
        self.app = app
        self._hosts = frozenset(host.strip("[]").lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and self._hosts:
            given = [value for name, value in scope["headers"] if name == b"host"]
            # none at all is no browser
            if len(given) > 1 or not all(_host_name(one) in self._hosts for one in given):
                error = ApiError(400, "this server has another name; see --allowed-hosts")
                await error.response(scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


class RequestIdMiddleware:
    """Gives each response an `X-Request-Id`: the client's own if it is harmless, else a new one.

    The client's id is kept in `scope["state"]["client_request_id"]` (None when there is none). An
    id with other characters (line breaks, quotes, megabytes) is replaced, never repeated in a log
    or header.

    Args:
        tells: whether responses have the header at all.
    """

    def __init__(self, app: ASGIApp, tells: bool = True) -> None:
        self.app = app
        self._tells = tells

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id")
        client_id = given if given is not None and is_request_id(given) else None
        scope.setdefault("state", {})["client_request_id"] = client_id
        shown = client_id or secrets.token_hex(16)
        REQUEST_ID.set(shown)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = shown
                if scope["path"].endswith(ANTHROPIC_PATHS):
                    headers["request-id"] = shown
            await send(message)

        await self.app(scope, receive, send_with_id if self._tells else send)


# Anthropic's clients look for the id under their own name
ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")


class RootPathMiddleware:
    """Lets a proxy put a path before every route, whether or not it takes it away again.

    Whatever comes after it, keys and routes alike, sees the path of the route alone.

    Args:
        root_path: the path, such as "/api".
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = self._root_path
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{root}/"):
            scope = {**scope, "path": scope["path"][len(root) :] or "/"}
        await self.app(scope, receive, send)


class Load:
    """How many requests for the model's work are being answered.

    Args:
        counts: of the server; None: of no other.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        self._counts = counts or Counts()

    @property
    def num_running(self) -> int:
        """In all processes of the server."""
        return int(self._counts.total(Cell.RUNNING))

    def count(self, change: int) -> None:
        """So many more are being answered here."""
        self._counts.add(Cell.RUNNING, change)


class LoadMiddleware:
    """Counts requests of routes that ask for the model's work, until their answers are complete.

    Args:
        load: is told of them.
        paths: of those routes.
    """

    def __init__(self, app: ASGIApp, load: Load, paths: Collection[str]) -> None:
        self.app = app
        self._load, self._paths = load, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http" and scope["method"] == "POST"
        if not counts or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        self._load.count(1)
        try:
            await self.app(scope, receive, send)
        finally:
            self._load.count(-1)


class ApiKeyMiddleware:
    """Refuses requests without a valid `Authorization: Bearer <key>`, except on open paths.

    `x-api-key: <key>` will do as well, which is what Anthropic's clients send. The path is the one
    that routing uses, never one rebuilt from the Host header. A request of a client who has used up
    a minute's quota is refused with 429; `scope["state"]["client"]` is the client.

    Args:
        keys: of which a request must bring one.
        open_paths: that carry no key.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self.app = app
        self._open_paths, self._keys = open_paths, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self.app(scope, receive, send)
            return
        client = self._keys.find(scope["headers"])
        refusal = None if client is None else client.refusal()
        if client is None:
            headers = {"WWW-Authenticate": "Bearer"}
            error = ApiError(401, "a valid API key is required", headers=headers)
        elif refusal is not None:
            text, seconds = refusal
            error = ApiError(429, f"{text}; try again later", headers={"Retry-After": str(seconds)})
        else:
            scope.setdefault("state", {})["client"] = client
            await self.app(scope, receive, send)
            return
        await error.response(scope["path"])(scope, receive, send)


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
            await as_api_error(error).response(scope["path"])(scope, receive, send)


def _host_name(header: bytes) -> str:
    """The name in a Host header: without its port, brackets and case; "" if it is none."""
    match = _HOST.fullmatch(header.decode("latin-1"))
    return (match[1] or match[2]).lower() if match else ""
