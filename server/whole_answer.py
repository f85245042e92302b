"""Whole answers that are large: encoded beside the event loop, sent as they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.protocol.responses import dumped_in_pieces
from server.unread_answers import PIECE_BYTES, unread_of

JSON = "application/json"
BATCH_BYTES = 2**18  # that are encoded before others have their turn


class WholeResponse(Response):
    """JSON in pieces, which its connection gets one after the other.

    Args:
        pieces: its text; one may come several times.
    """

    def __init__(self, pieces: Sequence[bytes]):
        length = sum(map(len, pieces))
        super().__init__(media_type=JSON, headers={"content-length": str(length)})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def whole_response(request: Request, make: Callable[[], Any]) -> WholeResponse:
    """The response of what `make` makes, which runs in a thread.

    Raises:
        ApiError: it is larger than all answers may be that are not read.
    """
    unread, pieces, counted = unread_of(request), list[bytes](), set[int]()
    texts = coalesced(_encoded(make))
    while batch := await asyncio.to_thread(_batch, texts):
        pieces += batch
        new = {id(piece): len(piece) for piece in batch if id(piece) not in counted}
        counted.update(new)
        unread.keep(sum(new.values()))
    return WholeResponse(pieces)


def coalesced(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes; small pieces are put together, and large ones stay the objects they are."""
    small, size = list[bytes](), 0
    for piece in pieces:
        is_large = len(piece) >= PIECE_BYTES // 4
        if small and (is_large or size >= PIECE_BYTES):
            yield b"".join(small)
            small, size = [], 0
        if is_large:
            yield piece
        else:
            small.append(piece)
            size += len(piece)
    if small:
        yield b"".join(small)


def _encoded(make: Callable[[], Any]) -> Iterator[bytes]:
    yield from dumped_in_pieces(make())


def _batch(pieces: Iterator[bytes]) -> list[bytes]:
    """The next pieces; none at the end."""
    batch, size = list[bytes](), 0
    while size < BATCH_BYTES and (piece := next(pieces, None)) is not None:
        batch.append(piece)
        size += len(piece)
    return batch
