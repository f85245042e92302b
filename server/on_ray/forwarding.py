"""A request on its way from the front to a replica, and the answer on its way back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import shown
from server.body_reader import BodyReader
from server.client_limits import Limits
from server.errors import ApiError, ClientDisconnected
from server.event_stream import failed_event, until_disconnect
from server.protocol.anthropic_errors import is_anthropic
from server.protocol.responses import ChunkWriter, dumps

RESPONSES = "/v1/responses"
# Replicas that a request is given to, one after the other, where nothing was answered yet.
MOST_TRIES = 3


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Forwarded:
    """A request, as the front sends it; equal to itself alone.

    Attributes:
        scope: what ASGI says of it, plain data alone.
        body: all of it.
    """

    scope: dict[str, Any]
    body: bytes


class Replicas(Protocol):
    """Ray's handle of them: `method_name` and `stream` are set."""

    def remote(self, asked: Forwarded) -> Any:
        """Messages of the answer, one after the other; `cancel` ends it."""


class Front:
    """The ASGI application of the front.

    Args:
        replicas: that answer.
        limits: on the bytes of bodies, which count until their answers begin.
    """

    def __init__(self, replicas: Replicas, limits: Limits) -> None:
        self._replicas, self._bodies = replicas, BodyReader(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = Answering(scope, receive, send)
        async with contextlib.AsyncExitStack() as held:
            try:
                whole = self._bodies.whole(Request(scope, receive))
                sent.keep(bytes(await held.enter_async_context(whole)), held.aclose)
            except ApiError as error:
                await error.response(scope["path"])(scope, receive, send)
                return
            except ClientDisconnected:
                return
            with contextlib.suppress(ClientDisconnected):
                await until_disconnect(receive, self._answer(sent))

    async def _answer(self, sent: Answering) -> None:
        # imported here: the application is built, and tested, without Ray
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        for _ in range(MOST_TRIES):
            messages = self._replicas.remote(sent.asked)
            try:
                async for message in messages:
                    await sent.send(message)
                return
            except (RayError, RayServeException) as error:
                failure = error
            finally:
                messages.cancel()  # of one that has ended nothing
            if sent.has_begun or not _is_lost(failure):
                break
        await sent.fail(failure)


class Answering:
    """What has been sent of an answer.

    Args:
        scope, receive, send: the request's.

    Attributes:
        asked: the request, until its answer begins: no other replica gets it after that.
        has_begun: whether it has.
    """

    asked: Forwarded

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.has_begun = False
        self._is_stream = False
        self._last = b""

    def keep(self, body: bytes, let_go: Callable[[], Awaitable[None]]) -> None:
        """Keep the request for replicas; `let_go` is called once it is kept no more."""
        self.asked, self._let_go = Forwarded(plain(self._scope), body), let_go

    async def send(self, message: Message) -> None:
        """Send the next message on."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            del self.asked
            await self._let_go()
            kinds = (value for name, value in message["headers"] if name == b"content-type")
            self._is_stream = next(kinds, b"").startswith(b"text/event-stream")
        self._last = message.get("body") or self._last
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Tell the client that nothing more will come, as far as what was sent allows."""
        path = self._scope["path"]
        told = as_client_error(error)
        if not self.has_begun:
            await told.response(path)(self._scope, self._receive, self._send)
        elif self._is_stream:
            gap = b"" if self._last.endswith(b"\n\n") else b"\n\n"  # it may have ended in an event
            data = gap + failed_events(path, told)
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            raise error  # half of a body was sent: the connection is cut


def failed_events(path: str, error: ApiError) -> bytes:
    """The last events of a stream that has failed, in the form of its API."""
    if is_anthropic(path):
        return f"event: error\ndata: {dumps(error.body(path))}\n\n".encode()
    if path.startswith(RESPONSES):
        told = {"type": "error", "code": str(error.status), "message": error.message, "param": None}
        return f"event: error\ndata: {dumps(told)}\n\n".encode()
    return failed_event(error) + ChunkWriter.DONE


def as_client_error(error: Exception) -> ApiError:
    """What the client is told about an error of Ray's."""
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    again = {"Retry-After": "1"}
    if isinstance(error, BackPressureError):
        text = "all replicas are full, and so is the queue before them; try again later"
        return ApiError(503, text, headers=again)
    if isinstance(error, DeploymentUnavailableError):
        return ApiError(503, "the model could not be deployed; Ray's status has the reason")
    if _is_lost(error):
        text = "the replica that had this request has ended; it was not completed"
        return ApiError(503, text, headers=again)
    return ApiError(500, f"internal error: {shown(type(error).__name__)}")


async def messages_of(
    app: ASGIApp, asked: Forwarded, state: dict[str, Any] | None = None
) -> AsyncGenerator[Message, None]:
    """The messages of an application's answer; closing this is the client's leaving.

    Args:
        app: answers.
        asked: the request, which is not kept: the application has its body.
        state: of the request's scope; None: an empty one.
    """
    queue = asyncio.Queue[Message | None](1)
    forever = asyncio.Event()
    scope, bodies = asked.scope | {"state": state or {}}, [asked.body]
    del asked

    async def receive() -> Message:
        if not bodies:
            await forever.wait()  # a client that leaves cancels
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def run() -> None:
        try:
            await app(scope, receive, queue.put)
        except Exception:
            await queue.put(None)
            raise
        await queue.put(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await queue.get()) is not None:
            yield message
        await task  # raises what it raised
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # what the request has made is freed


def _is_lost(error: Exception) -> bool:
    """Whether a replica has ended under a request, which another may answer."""
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import ReplicaUnavailableError

    return isinstance(error, (RayActorError, ReplicaUnavailableError))


def plain(scope: Scope) -> dict[str, Any]:
    """What of a scope can be sent to another process."""
    names = (
        *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
        *("query_string", "headers", "client", "server"),
    )
    return {name: scope[name] for name in names if name in scope}


async def _live(receive: Receive, send: Send) -> None:
    """The front has nothing to start and nothing to end."""
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
