"""`GET /` and its files: a page to chat with the model and to watch the engine."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# In which order they are loaded does not matter: the modules import each other.
_NAMES = sorted(one.name for one in files("server.page").iterdir())
FILES = [name for name in _NAMES if name != INDEX and name.rpartition(".")[2] in TYPES]
# Scripts and styles are files of this server and nothing else; what a model writes is text, and a
# browser that knows trusted types refuses to make markup of any.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # those that go along with a message
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
    """A file of the page, which is kept in memory.

    Args:
        name: in the package `server.page`.
    """

    def __init__(self, name: str):
        self._data = files("server.page").joinpath(name).read_bytes()
        self._media_type = TYPES[name.rpartition(".")[2]]
        self._headers = {**HEADERS, "ETag": f'"{hashlib.sha256(self._data).hexdigest()[:32]}"'}

    async def __call__(self, request: Request) -> Response:
        if self._headers["ETag"] in _tags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._data, media_type=self._media_type, headers=self._headers)


def page_routes() -> list[Route]:
    """The routes of the page, whose files are read now."""
    paths = {"/": INDEX} | {f"/page/{name}": name for name in FILES}
    return [Route(path, _File(name).__call__, methods=["GET"]) for path, name in paths.items()]


def _tags(header: str) -> list[str]:
    """The entity tags of an If-None-Match header, compared weakly."""
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]
