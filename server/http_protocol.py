"""Which class speaks HTTP: ours, which is built on a private class of uvicorn, or uvicorn's own."""

from __future__ import annotations

import asyncio
import logging

import uvicorn

logger = logging.getLogger("jaxserve.server")

# The methods of uvicorn's class that `Connection` overrides, each because uvicorn calls it.
HOOKS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_headers_complete",
    "send_400_response",
)


def http_protocol() -> type[asyncio.Protocol] | str:
    """`Connection`; "auto", uvicorn's own choice, where uvicorn has changed, which is logged."""
    try:
        from server.connection import Connection, HttpToolsProtocol
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "httptools"):
            raise
        return _without(str(error))
    missing = [name for name in HOOKS if not hasattr(HttpToolsProtocol, name)]
    return _without(f"its class has no {', '.join(missing)}") if missing else Connection


def _without(reason: str) -> str:
    logger.warning(
        "uvicorn %s is not as this jaxserve knows it (%s): the server runs without bounds on the "
        "head of a request, in length and in time, and malformed HTTP gets uvicorn's own answer",
        uvicorn.__version__,
        reason,
    )
    return "auto"
