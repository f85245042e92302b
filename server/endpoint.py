"""How an endpoint that reads a body and answers it goes: admitted, read, checked, answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from server.event_stream import until_disconnect
from server.keys import client_name
from server.protocol.requests import ModelRequest
from server.service import Service, entry_of


class Answerable(Protocol):
    """What `answer` needs of an answer.

    Attributes:
        body: the request, which can `forget_prompt`.
    """

    body: Any

    async def check_and_prepare(self) -> None: ...

    async def respond(self, request: Request) -> Response: ...


# What makes the answer to a body of the type that goes with it.
Kind = Callable[[Service, Any, Request], Answerable]


async def answer(request: Request, body_type: type[ModelRequest], kind: Kind) -> Response:
    """The response of an endpoint.

    Args:
        body_type: its body.
        kind: the answer to one.

    Raises:
        ApiError, ValidationError: the request cannot be served.
        QueueFullError: too much waits already.
    """
    return await answer_as(request, lambda service, given: (body_type, kind))


async def answer_as(
    request: Request,
    choose: Callable[[Service, Mapping[str, Any]], tuple[type[ModelRequest], Kind]],
) -> Response:
    """The response of an endpoint whose body says what is asked for.

    Raises:
        ApiError, ValidationError: the request cannot be served.
        QueueFullError: too much waits already.
    """
    async with given_body(request, _let_in) as (service, given):
        body_type, kind = choose(service, given)
        body = await service.bodies.made(request, partial(_checked, body_type, given))
        del given
        made = kind(service, body, request)
        await until_disconnect(request.receive, made.check_and_prepare())
    made.body.forget_prompt()
    return await made.respond(request)


@asynccontextmanager
async def given_body(
    request: Request, let_in: Callable[[Service, Request], None] | None = None
) -> AsyncIterator[tuple[Service, dict[str, Any]]]:
    """The body as an object, with the service of the model that it names, which serves.

    Args:
        let_in: raises where a model takes no such request now; of a server's only model before the
            body is read: what would be refused whatever it is need not be.

    Raises:
        ApiError, ValidationError: see `BodyReader.json`, `Service.require_ready`.
    """
    service = Service.of(request)

    def check() -> None:
        service.require_ready()
        if let_in is not None:
            let_in(service, request)

    is_only = len(service.models) == 1
    if is_only:
        check()
    async with service.bodies.json(request) as given:
        if not is_only:
            name = given.get("model")
            service = service.of_model(name)
            if isinstance(name, str):
                service.resolve_model(name)
            check()
        yield service, given


def _let_in(service: Service, request: Request) -> None:
    if entry_of(request) is None:
        service.engine.check_room(client_name(request.scope))


def _checked(body_type: type[ModelRequest], given: Mapping[str, Any]) -> ModelRequest:
    body = body_type.model_validate(given)
    body.check()
    return body
