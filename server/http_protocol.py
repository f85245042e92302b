"""Which class speaks HTTP: ours, which is built on a private class of uvicorn, or uvicorn's own."""

from __future__ import annotations

import asyncio
import logging

import uvicorn

from server.admission import Admission
from server.limits import Limits

logger = logging.getLogger("jaxserve.server")

# The methods of uvicorn's class that `Connection` overrides, each because uvicorn calls it.
HOOKS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "on_response_complete",
    "timeout_keep_alive_handler",
    "pause_writing",
    "resume_writing",
    "send_400_response",
)


def http_protocol(
    limits: Limits, admission: Admission | None = None
) -> type[asyncio.Protocol] | str:
    """`Connection` with these limits, and what refuses before the application is asked.

    "auto", uvicorn's own choice, where uvicorn has changed, which is logged.
    """
    try:
        from server.connection import Connection, HttpToolsProtocol
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "httptools"):
            raise
        return _without(str(error))
    missing = [name for name in HOOKS if not hasattr(HttpToolsProtocol, name)]
    return (
        _without(f"its class has no {', '.join(missing)}")
        if missing
        else Connection.limited(limits, admission)
    )


def _without(reason: str) -> str:
    logger.warning(
        "uvicorn %s is not as this jaxserve knows it (%s): the server runs without bounds on "
        "connections, their number, time and heads, and malformed HTTP gets uvicorn's own answer",
        uvicorn.__version__,
        reason,
    )
    return "auto"
