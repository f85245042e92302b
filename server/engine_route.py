"""Routes whose requests wait for the engine, as they declare themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.routing import BaseRoute, Route


class EngineRoute(Route):
    """A `POST` that has the engine work: its requests are judged by their heads, if need be.

    Args:
        path: of the route, without a root path.
        endpoint: reads the body.
    """

    def __init__(self, path: str, endpoint: Any) -> None:
        super().__init__(path, endpoint, methods=["POST"])


def engine_paths(routes: Iterable[BaseRoute], root_path: str = "") -> dict[bytes, str]:
    """The path of each of them, by what a client may send for it.

    Args:
        routes: of the application, others among them.
        root_path: what a proxy may put before every path.
    """
    found = [route.path for route in routes if isinstance(route, EngineRoute)]
    return {f"{root}{path}".encode(): path for path in found for root in ("", root_path)}
