"""`GET /` and its files: a page to chat with the model and to watch the engine."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Their order does not matter: the modules import each other.
FILES = {
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "conversations.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "engine.js": "text/javascript; charset=utf-8",
    "load.js": "text/javascript; charset=utf-8",
    "markdown.js": "text/javascript; charset=utf-8",
    "pagemap.js": "text/javascript; charset=utf-8",
    "sampling.js": "text/javascript; charset=utf-8",
    "snippets.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "tokens.js": "text/javascript; charset=utf-8",
}
INDEX = "text/html; charset=utf-8"
# Scripts and styles are files of this server and nothing else; what a model writes is text, and a
# browser that knows trusted types refuses to make markup of any.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and mostly answered with 304
}
# The page asks for a key itself, where the server wants one, and shows nothing before.
OPEN_PATHS = frozenset({"/", *(f"/page/{name}" for name in FILES)})


class _File:
    """A file of the page, kept in memory.

    Args:
        name: file name in the package `server.page`.
        media_type: value of its Content-Type header.
    """

    def __init__(self, name: str, media_type: str):
        self._data = files("server.page").joinpath(name).read_bytes()
        self._media_type = media_type
        self._headers = {**HEADERS, "ETag": f'"{hashlib.sha256(self._data).hexdigest()[:32]}"'}

    async def __call__(self, request: Request) -> Response:
        if self._headers["ETag"] in _tags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._data, media_type=self._media_type, headers=self._headers)


def page_routes() -> list[Route]:
    """The routes of the page; reads its files."""
    routes = [_route("/", "index.html", INDEX)]
    return routes + [_route(f"/page/{name}", name, kind) for name, kind in FILES.items()]


def _route(path: str, name: str, media_type: str) -> Route:
    return Route(path, _File(name, media_type).__call__, methods=["GET"])


def _tags(header: str) -> list[str]:
    """The entity tags of an If-None-Match header, compared weakly."""
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]
