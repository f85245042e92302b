"""Reading a request body: bounded in size, time and depth, then validated."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from json import dumps
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from jaxserve.errors import ValidationError
from server.errors import ApiError, ClientDisconnected
from server.limits import Limits

READ_TIMEOUT_S = 60.0
# what a number that no response could tell is written with
_NOT_FINITE = re.compile(rb"NaN|Infinity|[eE][+]?[0-9]{3}|[0-9]{200}")
QUICK_BYTES = 2**16  # of a body that is parsed and checked in the event loop
# Lists and objects, and values, that a body may have: each costs more than its bytes. Brackets and
# commas are counted, those in texts too, since telling them apart would cost as much as parsing.
MAX_CONTAINERS = 2**16
MAX_VALUES = 2**19
# Elements of a list, each of which is looked at by more than the parser.
LONGEST = {"messages": 2048}

BodyModel = TypeVar("BodyModel", bound=BaseModel)
Made = TypeVar("Made")


class BodyReader:
    """Reads the bodies of one server, which share a bound.

    Args:
        limits: those on bytes are read.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self.pending = 0  # bytes of bodies that are being read, parsed or tokenised
        self._beside = ThreadPoolExecutor(1, "jaxserve-bodies")

    @asynccontextmanager
    async def reading(self, request: Request, model: type[BodyModel]) -> AsyncIterator[BodyModel]:
        """The body as an instance of `model`; its bytes count until the end of the block.

        Raises:
            ApiError: see `json`.
            ValidationError: a list is too long.
            pydantic.ValidationError: fields of wrong types.
        """
        async with self.json(request) as parsed:
            yield await self.made(request, partial(model.model_validate, parsed))

    @asynccontextmanager
    async def json(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The body as an object; `request.state.arrival_time` becomes the time when it was there.

        The parser refuses nesting deeper than about 200 levels.

        Raises:
            ApiError: no JSON object, or of another content type (400), too slow (408), too large
                (413), too much at a time (503).
            ValidationError: a list is too long.
            ClientDisconnected: the client left before its body was complete.
        """
        _check_content_type(request)
        body = bytearray()
        try:
            await self._read_in_time(request, body)
            request.state.arrival_time = time.monotonic()
            request.state.body_bytes = len(body)
            yield await self.made(request, partial(_parsed, bytes(body)))
        finally:
            self.pending -= len(body)

    async def made(self, request: Request, make: Callable[[], Made]) -> Made:
        """What `make` makes of a body that was read: beside the event loop if it is large.

        One at a time, so that a burst of large bodies leaves the loop its turns between them.
        """
        if request.state.body_bytes <= QUICK_BYTES:
            return make()
        work = partial(contextvars.copy_context().run, _without_collections, make)
        return await asyncio.get_running_loop().run_in_executor(self._beside, work)

    async def _read_in_time(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await self._read(request, body)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive in {READ_TIMEOUT_S:.0f} s") from error
        except ClientDisconnect as error:
            raise ClientDisconnected from error

    async def _read(self, request: Request, body: bytearray) -> None:
        most, most_pending = self._limits.max_body_bytes, self._limits.max_pending_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > most:
            raise ApiError(413, f"the request body is larger than {most} bytes")
        async for piece in request.stream():
            body += piece
            self.pending += len(piece)
            if len(body) > most:
                raise ApiError(413, f"the request body is larger than {most} bytes")
            if self.pending > most_pending:
                text = f"request bodies of more than {most_pending} bytes are being read"
                raise ApiError(503, f"{text}; try again later", headers={"Retry-After": "1"})


def _without_collections(make: Callable[[], Made]) -> Made:
    """A body is up to half a million objects, none of them garbage: looking for some costs most."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return make()
    finally:
        if was_enabled:
            gc.enable()


def _parsed(raw: bytes) -> dict[str, Any]:
    containers = raw.count(b"[") + raw.count(b"{")
    values = containers + raw.count(b",")
    if containers > MAX_CONTAINERS or values > MAX_VALUES:
        raise ApiError(
            400,
            f"request body: {containers} brackets and {values - containers} commas are more than "
            f"{MAX_CONTAINERS} or {MAX_VALUES}",
        )
    try:
        parsed = from_json(raw)
    except ValueError as error:
        raise ApiError(400, f"request body: invalid JSON: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "request body: a JSON object is expected")
    for name, most in LONGEST.items():
        given = parsed.get(name)
        if isinstance(given, list) and len(given) > most:
            raise ValidationError(name, f"{len(given)} elements", f"at most {most}")
    if _NOT_FINITE.search(raw):
        _check_finite(parsed)
    return parsed


def _check_finite(parsed: dict[str, Any]) -> None:
    """Objects and lists are told back as they are; a number alone is judged by its own field."""
    for name, value in parsed.items():
        if isinstance(value, dict | list):
            try:
                dumps(value, allow_nan=False)
            except ValueError as error:
                allowed = "numbers of JSON, neither NaN nor Infinity"
                raise ValidationError(name, "a number that is not finite", allowed) from error


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"Content-Type must be application/json, got {kind[:100]!r}")
