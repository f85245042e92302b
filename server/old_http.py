"""Answers to HTTP/1.0, which knows no chunks: the end of the connection is the end of the body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def end_with_connection(cycle: RequestResponseCycle) -> None:
    """Have an answer written as it is, with its length where it has one; uvicorn would chunk it.

    Args:
        cycle: of a request that has not begun; uvicorn closes the connection behind its answer.
    """
    write = cycle.send
    cycle.waiting_for_100_continue = False  # which is of HTTP/1.1

    async def send(message: Any) -> None:
        cycle.chunked_encoding = False
        # uvicorn counts the body down to 0, and has not been told its length
        cycle.expected_content_length = len(message.get("body", b""))
        await write(message)

    cycle.send = send  # type: ignore[method-assign]
