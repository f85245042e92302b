"""OpenAI's batch files: each line is a request, answered as if it had come by HTTP.

Nothing listens: requests are given to the application within the process, so they are checked,
answered and refused as those of a server are.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic_core import from_json
from starlette.types import ASGIApp, Message

from jaxserve.errors import ValidationError
from server.protocol.responses import dumps

if TYPE_CHECKING:
    # only a type here: importing it takes long
    from jaxserve.config.resolved_config import ResolvedConfig

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
    *("/v1/score", "/v1/rerank", "/score", "/rerank", "/v2/rerank"),
)
MAX_ID = 512  # characters of a custom_id
MOST_TRIES = 60  # of a line that may be sent again later
# Of each slot of the engine, so that the next request is there when one ends.
REQUESTS_A_SLOT = 2
# The batch's user is the only client: a response may show what it likes of its prompts.
MAX_RESPONSE_ENTRIES = 2**20


def at_a_time(config: ResolvedConfig) -> int:
    """Requests that a batch has in an engine: no more than may wait, so that none is refused."""
    most = config.scheduler.max_num_seqs * REQUESTS_A_SLOT
    return min(most, config.asked.max_num_queued_reqs or most)


class BadLine(Exception):
    """A line of the input that is no request.

    Attributes:
        custom_id: its own, None: it has none.
    """

    def __init__(self, text: str, custom_id: str | None = None):
        super().__init__(text)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input.

    Attributes:
        number: counted from 1.
        raw: its bytes; None: it is too long.
    """

    number: int
    raw: bytes | None

    @property
    def name(self) -> str:
        """The id of its answer, by which an answer is found again."""
        return f"batch_req_{self.number}"


def read_lines(file: BinaryIO, most: int) -> Iterator[Line]:
    """Lines with something in them; of one with more than `most` bytes nothing is kept."""
    number = 0
    while piece := file.readline(most + 1):
        number += 1
        too_long = len(piece) > most and not piece.endswith(b"\n")
        while too_long and piece and not piece.endswith(b"\n"):
            piece = file.readline(most)
        if too_long:
            yield Line(number, None)
        elif piece.strip():
            yield Line(number, piece)


def finished_lines(path: Path) -> dict[str, Any]:
    """What an output has already: id of an answer -> `custom_id`.

    The piece of a line that an interruption has left at its end is cut off.

    Raises:
        ValidationError: it is no output of a batch.
    """
    found: dict[str, Any] = {}
    whole = 0
    with path.open("r+b") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                file.truncate(whole)
                break
            whole += len(raw)
            try:
                answer = json.loads(raw)
                found[answer["id"]] = answer["custom_id"]
            except (ValueError, TypeError, KeyError) as error:
                allowed = "a new file, or the output of the same batch"
                raise ValidationError("--output-file", str(path), allowed) from error
    return found


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What a line asks for."""

    custom_id: str
    url: str
    body: bytes


def parse(line: Line) -> LineRequest:
    """What a line asks for.

    Raises:
        BadLine: says what is wrong.
    """
    if line.raw is None:
        raise BadLine("the line is longer than a body may be")
    try:
        given = from_json(line.raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadLine(f"invalid JSON: {str(error)[:200]}") from error
    if not isinstance(given, dict):
        raise BadLine("a JSON object is expected")
    custom_id, url, body = (given.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise BadLine(f"custom_id must be text of 1 to {MAX_ID} characters")
    if given.get("method", "POST") != "POST":
        raise BadLine("method must be POST", custom_id)
    if url not in URLS:
        raise BadLine(f"url must be one of {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise BadLine("body must be a JSON object", custom_id)
    if body.get("stream"):
        raise BadLine("body.stream must be false: a line has one answer", custom_id)
    return LineRequest(custom_id, url, dumps(body).encode())


async def call(app: ASGIApp, asked: LineRequest) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of what an application answers."""
    sent = False
    forever = asyncio.Event()
    status, headers, pieces = 0, dict[str, str](), list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await forever.wait()  # the client never leaves
        sent = True
        return {"type": "http.request", "body": asked.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update((k.decode(), v.decode()) for k, v in message["headers"])
        else:
            pieces.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": asked.url,
        "raw_path": asked.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {},
    }
    await app(scope, receive, send)
    return status, headers, json.loads(b"".join(pieces))


class Batch:
    """Runs the lines of one input.

    Args:
        app: the application, whose engine is ready.
        at_a_time: requests that are in the engine.
        told: called after each answer with whether it is a good one.
        check: called before an answer of status 500 or above is kept; raises if the engine has
            ended, which answers no line any more.
    """

    def __init__(
        self,
        app: ASGIApp,
        at_a_time: int,
        told: Callable[[bool], None],
        check: Callable[[], None] = lambda: None,
    ):
        self._app, self._told, self._check = app, told, check
        self._room = asyncio.Semaphore(at_a_time)

    async def run(self, lines: Iterator[Line], done: dict[str, Any], output: int) -> None:
        """Answer what has no answer yet.

        Args:
            lines: of the input, read as there is room for them.
            done: see `finished_lines`.
            output: descriptor of the output, open for appending. An answer is one write.

        Raises:
            ValidationError: an answer that is there belongs to another line.
            OSError: an answer cannot be written.
            Whatever `check` raises: lines without an answer are left for the next run.
        """
        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._with_room(lines, done):
                    group.create_task(self._answer(line, output))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _with_room(self, lines: Iterator[Line], done: dict[str, Any]) -> AsyncIterator[Line]:
        for line in lines:
            if line.name in done:
                check_same(line, done[line.name])
                continue
            await self._room.acquire()
            yield line

    async def _answer(self, line: Line, output: int) -> None:
        try:
            answer = await self.answer_of(line)
            write_whole(output, f"{dumps(answer)}\n".encode())
            self._told(answer["error"] is None)
        finally:
            self._room.release()

    async def answers_of(self, lines: Sequence[Line]) -> list[dict[str, Any]]:
        """The answers to lines, in their order, which are asked as there is room for them."""

        async def answer(line: Line) -> dict[str, Any]:
            async with self._room:
                return await self.answer_of(line)

        return await asyncio.gather(*map(answer, lines))

    async def answer_of(self, line: Line) -> dict[str, Any]:
        """The answer to a line, as the output has it; of one that is refused its `error` is set."""
        answer: dict[str, Any] = {"id": line.name, "custom_id": None, "response": None}
        try:
            asked = parse(line)
        except BadLine as bad:
            error = {"code": "invalid_request", "message": f"line {line.number}: {bad}"}
            return answer | {"custom_id": bad.custom_id, "error": error}
        status, headers, body = await call(self._app, asked)
        for _ in range(MOST_TRIES):
            if status >= 500:
                self._check()
            if status != 503:
                break
            await asyncio.sleep(float(headers.get("retry-after", "1")))
            status, headers, body = await call(self._app, asked)
        failure: dict[str, str] | None = None
        if status != 200:
            told = body["error"]
            failure = {"code": str(told["code"]), "message": told["message"]}
        request_id = headers.get("x-request-id", "")
        response = {"status_code": status, "request_id": request_id, "body": body}
        return answer | {"custom_id": asked.custom_id, "response": response, "error": failure}


def write_whole(descriptor: int, data: bytes) -> None:
    """Append all of a line or, where that fails, nothing of it.

    Raises:
        OSError: the disk is full, or fails.
    """
    before = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def check_same(line: Line, custom_id: Any) -> None:
    """Raises ValidationError: the answer of this name that is there is of another `custom_id`."""
    try:
        asked: str | None = parse(line).custom_id
    except BadLine as bad:
        asked = bad.custom_id
    if asked != custom_id:
        allowed = f"the output of this input: its answer to line {line.number} is of {asked!r}"
        raise ValidationError("--output-file", f"an answer to {custom_id!r}", allowed)
