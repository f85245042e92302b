"""Server-sent events and the rule that a client which leaves takes its request with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.outputs import RequestOutput
from server.errors import ApiError, ClientDisconnected, as_api_error
from server.protocol.responses import ChunkWriter, dumps

Result = TypeVar("Result")

MOST_MERGED = 64  # outputs of several streams that wait for their reader
FIRST_COMMENT_S = 1.0  # after which a stream without news gets its headers and a comment
# A comment ends with the piece that follows it: clients that strip each piece they read, as that of
# `vllm bench serve` does, would lose its end, and with it the event behind it.
COMMENT, COMMENT_END = b": keep-alive", b".\n\n"

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
        task.cancel()
        watcher.cancel()
        # The task's own clean-up (the abort) must be over before the connection is given up.
        await asyncio.gather(task, watcher, return_exceptions=True)
        # an error that leaves here knows this frame, and the task knows the error: of all that a
        # refused request has made, nothing would be freed before a collection
        del task, watcher


async def _disconnect(receive: Receive) -> None:
    message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several requests as they come, each with the position of its request.

    Closing the generator closes all streams; an error of one ends them all and is raised.
    """
    # bounded: what a slow reader leaves waits in its stream, which puts it together
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(MOST_MERGED)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]):
            async for output in streams[0]:
                yield 0, output
        return
    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def failed_event(error: ApiError) -> bytes:
    """The event of an error in OpenAI's form."""
    return f"data: {dumps(error.body())}\n\n".encode()


class EventStream(Response):
    """A response whose body is a generator of server-sent events.

    The first event is awaited before the headers are sent, so that an error which the engine raises
    at once still gets its own HTTP status. A stream that has nothing to say for a second, since it
    waits in the queue, gets its headers and a comment, and then one from time to time, so that
    no proxy on the way takes it for dead. A later error becomes an event, the last one.

    Args:
        events: the events.
        interval: seconds without an event after which a comment is sent.
        failed: the event of an error.
        end: what follows the last event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        interval: float,
        *,
        failed: Callable[[ApiError], bytes] = failed_event,
        end: bytes = ChunkWriter.DONE,
    ) -> None:
        super().__init__()
        self._failed, self._end = failed, end
        self._events = events
        self._interval = interval
        self._has_begun = False
        self._num_events = 0
        self._in_comment = False  # the last piece that was written was one
        self._writing = asyncio.Lock()  # an event may be sent in pieces: no comment comes between

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Errors before the first event belong to the caller's error handling.
        await until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        comments: list[asyncio.Task[None]] = []

        def begin_comments() -> None:
            comments.append(asyncio.ensure_future(self._comment(send)))

        # most streams never need the task
        timer = asyncio.get_running_loop().call_later(FIRST_COMMENT_S, begin_comments)
        try:
            async with contextlib.aclosing(self._events) as events:
                try:
                    async for event in events:
                        self._num_events += 1
                        await self._write(send, event)
                except Exception as error:
                    if not self._has_begun:
                        raise
                    await self._write(send, self._failed(as_api_error(error)))
        finally:
            timer.cancel()
            for task in comments:
                task.cancel()
            await asyncio.gather(*comments, return_exceptions=True)
        await self._write(send, self._end, is_last=True)

    async def _write(
        self, send: Send, piece: bytes, *, is_comment: bool = False, is_last: bool = False
    ) -> None:
        async with self._writing:
            if not self._has_begun:  # nothing is written before the headers, so this does not wait
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            if self._in_comment:
                piece = COMMENT_END + piece
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
            self._in_comment = is_comment  # not where a comment that waited has been cancelled

    async def _comment(self, send: Send) -> None:
        told = 0
        while True:
            if told == self._num_events and not self._writing.locked():
                await self._write(send, COMMENT, is_comment=True)
            told = self._num_events
            await asyncio.sleep(self._interval)
