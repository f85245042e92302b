"""Reading a request body: bounded in size, time and depth, then validated."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, ClientDisconnected

DEFAULT_MAX_BODY_BYTES = 32 * 2**20
READ_TIMEOUT_S = 60.0

BodyModel = TypeVar("BodyModel", bound=BaseModel)


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The whole body; `request.state.arrival_time` becomes the moment when it is complete.

    Raises:
        ApiError: wrong content type (400), too slow (408), too large (413).
        ClientDisconnected: the client left before its body was complete.
    """
    _check_content_type(request)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive in {READ_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    request.state.arrival_time = time.monotonic()
    return bytes(body)


async def read_body(request: Request, model: type[BodyModel], max_bytes: int) -> BodyModel:
    """The body as an instance of `model`.

    The parser refuses nesting deeper than about 200 levels and numbers that are out of range.

    Raises:
        ApiError: see `read_bytes`.
        pydantic.ValidationError: no JSON object, or fields of wrong types.
    """
    return model.model_validate_json(await read_bytes(request, max_bytes))


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type")
    if given is None:
        return
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"Content-Type must be application/json, got {kind[:100]!r}")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {max_bytes} bytes")
