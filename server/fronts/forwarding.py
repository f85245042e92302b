"""What a front does not answer itself: the server does, and the front passes on its answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.boundary.front_messages import HttpAnswer, HttpRequest, HttpTaken
from jaxserve.boundary.messages import Body
from server.errors import ApiError, ClientDisconnected
from server.event_stream import until_disconnect
from server.on_ray.forwarding import plain
from server.service import Service

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # methods of requests without a body


class BrokenOff(Exception):
    """The server has broken an answer off: the connection ends where it is."""


class Forwarding:
    """An application that hands over to the server what is not of some paths.

    Args:
        app: answers the others.
        paths: of those.
        service: of the front.
        send: sends a message to the server.
    """

    def __init__(
        self, app: ASGIApp, paths: Collection[str], service: Service, send: Callable[[Body], None]
    ):
        self._app, self._paths, self._service, self._send = app, paths, service, send
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Queue[Message]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_own(scope):
            await self._app(scope, receive, send)
            return
        number = next(self._numbers)
        try:
            async with self._service.bodies.whole(Request(scope, receive)) as body:
                asked = HttpRequest(number, plain(scope), bytes(body))
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        except ClientDisconnected:
            return
        self._answers[number], is_over = asyncio.Queue(), False
        self._send(asked)
        del asked
        try:
            await until_disconnect(receive, self._pass_on(number, send))
            is_over = True
        except ClientDisconnected:
            pass
        finally:
            del self._answers[number]
            if not is_over:
                self._send(HttpTaken(number, gone=True))

    def take(self, told: HttpAnswer) -> None:
        """Take in the next message of an answer."""
        queue = self._answers.get(told.number)
        if queue is not None:
            queue.put_nowait(told.message)

    def _is_own(self, scope: Scope) -> bool:
        path, root = scope["path"], self._service.options.root_path
        if root and f"{path}/".startswith(f"{root}/"):
            path = path[len(root) :]
        if path in self._paths:
            return True
        # of a stranger no body is read: the front's own application refuses it
        keys = self._service.keys
        is_read = scope["method"] not in SAFE
        return is_read and keys is not None and keys.find(scope["headers"]) is None

    async def _pass_on(self, number: int, send: Send) -> None:
        queue, is_over = self._answers[number], False
        while not is_over:
            message = await queue.get()
            if not message:
                raise BrokenOff
            await send(message)
            is_over = is_last(message)
            if not is_over:
                self._send(HttpTaken(number))


def is_last(message: Message) -> bool:
    """Whether it is the last message of an answer."""
    return message["type"] == "http.response.body" and not message.get("more_body")
