"""Reading a request body: bounded in size, time and depth, then validated."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from jaxserve.errors import ValidationError
from jaxserve.params.sampling_rules import MAX_BIAS_ENTRIES
from server.client_limits import Limits
from server.counts import Cell, Counts
from server.errors import ApiError, ClientDisconnected

READ_TIMEOUT_S = 60.0
QUICK_BYTES = 2**16  # of a body that is parsed and checked in the event loop
# What a larger body may hold, in numbers: the parser holds the interpreter, 45 ns for each, three
# times as long for a text and seven times for a key that it has not seen before.
MAX_WEIGHT = 2**19  # a comma, a bracket or a quote is one
KEY = 4  # more than its quotes and comma
LONG = 8  # 20 digits of a number
LONG_NUMBER = b"0" * 20
MAX_CONTAINERS = 2**16  # lists and objects
COUNTED_AT_A_TIME = 2**16  # bytes, between which other threads may have the interpreter
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
# Elements of a list or object, each of which is looked at by more than the parser.
LONGEST = {"messages": 2048, "logit_bias": MAX_BIAS_ENTRIES}

BodyModel = TypeVar("BodyModel", bound=BaseModel)
Made = TypeVar("Made")


class BodyReader:
    """Reads the bodies of one server, which share a bound.

    Args:
        limits: those on bytes are read.
        counts: of the server; None: of no other.
    """

    def __init__(self, limits: Limits, counts: Counts | None = None):
        self._limits = limits
        self._counts = counts or Counts()
        self._beside = ThreadPoolExecutor(1, "jaxserve-bodies")

    @property
    def pending(self) -> int:
        """Bytes of bodies that are being read, parsed or tokenised here."""
        return int(self._counts.own(Cell.BODY_BYTES))

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
                (413), compressed (415), too much at a time (503).
            ValidationError: a list is too long.
            ClientDisconnected: the client left before its body was complete.
        """
        _check_headers(request)
        async with self.whole(request) as body:
            request.state.arrival_time = time.monotonic()
            request.state.body_bytes = len(body)
            yield await self.made(request, partial(_parsed, bytes(body)))

    @asynccontextmanager
    async def whole(self, request: Request) -> AsyncIterator[bytearray]:
        """The body as it is; its bytes count until the end of the block.

        Raises:
            ApiError: too slow (408), too large (413), too much at a time (503).
            ClientDisconnected: the client left before its body was complete.
        """
        body = bytearray()
        try:
            await self._read_in_time(request, body)
            yield body
        finally:
            self._counts.add(Cell.BODY_BYTES, -len(body))

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
            self._counts.add(Cell.BODY_BYTES, len(piece))
            if len(body) > most:
                raise ApiError(413, f"the request body is larger than {most} bytes")
            if self._counts.total(Cell.BODY_BYTES) > most_pending:
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
    if len(raw) > QUICK_BYTES:  # a smaller one cannot hold too much
        _check_weight(raw)
    try:
        # of many texts that differ, remembering them would cost more than making them
        parsed = from_json(raw, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"request body: invalid JSON: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "request body: a JSON object is expected")
    for name, most in LONGEST.items():
        given = parsed.get(name)
        if isinstance(given, list | dict) and len(given) > most:
            raise ValidationError(name, f"{len(given)} elements", f"at most {most}")
    for name, value in parsed.items():
        # these are told back as they are; a number alone is judged by its own field
        if isinstance(value, dict | list) and not _is_finite(value):
            allowed = "numbers of JSON, neither NaN nor Infinity"
            raise ValidationError(name, "a number that is not finite", allowed)
    return parsed


def _check_weight(raw: bytes) -> None:
    """Refuse what would hold the interpreter for long, by what is outside of texts.

    Raises:
        ApiError: 400.
    """
    weight = containers = at = 0
    in_text = False
    while at < len(raw):
        piece = raw[at : at + COUNTED_AT_A_TIME]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what it escapes belongs to it
            piece = raw[at : at + COUNTED_AT_A_TIME + 1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b'"'.join(parts[in_text::2])
        in_text ^= len(parts) % 2 == 0
        opened = outside.count(b"[") + outside.count(b"{")
        containers += opened
        weight += opened + outside.count(b",") + len(parts) - 1
        weight += KEY * outside.count(b":")
        weight += LONG * outside.translate(_DIGITS).count(LONG_NUMBER)
        if weight > MAX_WEIGHT or containers > MAX_CONTAINERS:
            raise ApiError(
                400,
                f"request body: {MAX_CONTAINERS} lists and objects, or a weight of {MAX_WEIGHT}, "
                f"are exceeded (a number is 1, a text 3, a key {KEY + 2}, 20 digits {LONG})",
            )


def _is_finite(parsed: dict[str, Any] | list[Any]) -> bool:
    """Whether each number in it is; step by step, so that other threads go on meanwhile."""
    left: list[Any] = [parsed]
    while left:
        one = left.pop()
        for value in one.values() if type(one) is dict else one:
            kind = type(value)
            if kind is list or kind is dict:
                left.append(value)
            elif kind is float and not math.isfinite(value):
                return False
    return True


def _check_headers(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"Content-Type must be application/json, got {kind[:100]!r}")
    packed = request.headers.get("content-encoding", "").strip().lower()
    if packed not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding must be identity, got {packed[:100]!r}")
