"""Reports of the engine's load on responses (ORCA), for balancers that choose a server by them."""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.boundary.messages import EngineStats

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"


class LoadReportMiddleware:
    """Tells the load in a header of the response, where a header of the request names a format.

    Args:
        stats: gives the engine's newest snapshot.
    """

    def __init__(self, app: ASGIApp, stats: Callable[[], EngineStats]) -> None:
        self.app = app
        self._stats = stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope).get(ASKED) if scope["type"] == "http" else None
        if asked is None:
            await self.app(scope, receive, send)
            return

        async def send_with_report(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = report(asked, self._stats())
                if told is not None:
                    MutableHeaders(scope=message)[TOLD] = told
            await send(message)

        await self.app(scope, receive, send_with_report)


def report(form: str, stats: EngineStats) -> str | None:
    """The header's value in the format "TEXT" or "JSON", under vLLM's names; None of any other."""
    named = {
        "kv_cache_usage_perc": stats.page_usage,
        "num_requests_waiting": float(stats.num_waiting),
    }
    match form.upper():
        case "TEXT":
            parts = (f"named_metrics.{name}={value}" for name, value in named.items())
            return f"TEXT {', '.join(parts)}"
        case "JSON":
            return f"JSON {json.dumps({'named_metrics': named})}"
        case _:
            return None
