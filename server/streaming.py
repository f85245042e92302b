"""Server-sent events and the rule that a client which leaves takes its request with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.outputs import RequestOutput
from server.errors import ClientDisconnected, as_api_error
from server.protocol.responses import ChunkWriter

Result = TypeVar("Result")

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Tells buffering reverse proxies to pass each event on at once.
    (b"x-accel-buffering", b"no"),
]


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, but cancel it as soon as the client disconnects.

    Args:
        receive: ASGI channel of a request whose body has been read completely.
        work: what to await; its cancellation aborts the request in the engine.

    Raises:
        ClientDisconnected: the client left first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watcher.result()
            raise ClientDisconnected
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        # The task's own clean-up (the abort) must be over before the connection is given up.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(
    streams: Sequence[AsyncIterator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several requests as they come, each with the position of its request.

    Closing the generator closes all streams; an error of one ends them all and is raised.
    """
    queue: asyncio.Queue[tuple[int, RequestOutput | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with _closing(stream):
                async for output in stream:
                    queue.put_nowait((index, output))
        finally:
            queue.put_nowait((index, None))

    if len(streams) == 1:
        async with _closing(streams[0]):
            async for output in streams[0]:
                yield 0, output
        return
    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is not None:
                yield index, item
                continue
            running -= 1
            await tasks[index]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _closing(stream: AsyncIterator[RequestOutput]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


class EventStream(Response):
    """A response whose body is a generator of server-sent events.

    The first event is awaited before the headers are sent, so that an error which the engine raises
    at once still gets its own HTTP status. A later error becomes an error event and then `[DONE]`.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Errors before the first event belong to the caller's error handling.
        await until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            await _send_piece(send, first)
            try:
                async for event in events:
                    await _send_piece(send, event)
            except Exception as error:
                await _send_piece(send, ChunkWriter.error(as_api_error(error).body()))
            await send({"type": "http.response.body", "body": ChunkWriter.DONE})


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
