"""The messages between the server's process, which has the client of the engine, and its fronts.

A front sends requests as a client sends them to its engine. The server sends back `StepOutput`s
that hold the front's sequences alone. Each of these messages is of one model, see `AboutModel`.
Beside that the server answers HTTP requests that a front hands over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxserve.boundary.messages import AddGroup, Body
from jaxserve.config.engine_config import EngineConfig


@dataclass(frozen=True, slots=True)
class FrontStart:
    """The first message to a front: what it answers, and how.

    Attributes:
        configs: what the user asked for of the engine of each model, the default one first.
        flags: the values of the flags of `jaxserve serve`, checked, as each model has them; those
            of the server are the first one's.
        keys: the fields of each API key.
        name: of the front, unique for the life of the server; its sequence ids begin with it.
        row: the front's own on the board that all processes count on.
        rows: of that board.
        board: its file, by the descriptor that the front inherits.
        listener: the socket that clients connect to, likewise.
        created: when the models of the server were made, in seconds of the epoch.
    """

    kind: ClassVar[str] = "front_start"
    configs: list[EngineConfig]
    flags: list[dict[str, Any]]
    keys: list[dict[str, Any]]
    name: str
    row: int
    rows: int
    board: int
    listener: int
    created: int


@dataclass(frozen=True, slots=True)
class FrontReady:
    """A front answers from now on."""

    kind: ClassVar[str] = "front_ready"


@dataclass(frozen=True, slots=True)
class AboutModel:
    """A message that a front and the client of one model's engine have for each other.

    Attributes:
        model: the first of the model's names.
        message: what is said.
    """

    kind: ClassVar[str] = "about_model"
    model: str
    message: Body


@dataclass(frozen=True, slots=True)
class EngineStanding:
    """Whether the engine serves, and how full it is, when either has changed.

    Attributes:
        word: "ok", or why it does not: loading, restarting, paused, silent or dead.
        text: the same for people.
        num_waiting: requests that wait for their first step, of all fronts.
        page_usage: share of KV pages that requests own, 0 to 1.
    """

    kind: ClassVar[str] = "standing"
    word: str
    text: str = ""
    num_waiting: int = 0
    page_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class AddCall:
    """The requests of one call: all of them are admitted, or none.

    Attributes:
        request_ids: one for each request.
        groups: what the engine is sent of each.
        keys: of the full pages of each prompt, see `PreparedRequest`.
    """

    kind: ClassVar[str] = "call"
    request_ids: list[str]
    groups: list[AddGroup]
    keys: list[list[bytes]]


@dataclass(frozen=True, slots=True)
class Stopped:
    """Sequences met a stop string in the front, or ended with an error there."""

    kind: ClassVar[str] = "stopped"
    sequence_ids: list[str]


@dataclass(frozen=True, slots=True)
class Left:
    """The caller of a request has gone."""

    kind: ClassVar[str] = "left"
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request is ended where it is, with the tokens that it has: it is aborted or timed out.

    Attributes:
        why: the stop_reason of its unfinished sequences.
    """

    kind: ClassVar[str] = "request_end"
    request_id: str
    why: str | None


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request was refused, or ends with an error.

    Attributes:
        error: the name of its class in `jaxserve.errors`.
        text: what it says.
        limit, seconds: of a `QueueFullError` its limit and when to come again.
        client: of a `QueueFullError` that any request of this client would get; else None.
        field, value, allowed: of a `ValidationError`.
    """

    kind: ClassVar[str] = "request_failure"
    request_id: str
    error: str
    text: str = ""
    limit: str = ""
    seconds: float = 0.0
    client: str | None = None
    field: str = ""
    value: str = ""
    allowed: str = ""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that the server answers, since what it is about is there once.

    Attributes:
        number: of the request; everything about its answer repeats it.
        scope: what ASGI says of it, plain data alone.
        body: all of it.
    """

    kind: ClassVar[str] = "http_request"
    number: int
    scope: dict[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The next ASGI message of an answer; an empty one: it is broken off."""

    kind: ClassVar[str] = "http_answer"
    number: int
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HttpTaken:
    """The connection has taken the last message of an answer.

    Attributes:
        gone: the client has left.
    """

    kind: ClassVar[str] = "http_taken"
    number: int
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Let in no more requests; the front answers with the same once it has none.

    Attributes:
        seconds: that running requests may take.
    """

    kind: ClassVar[str] = "drain"
    seconds: float


@dataclass(frozen=True, slots=True)
class FrontClose:
    """End the process once its connections have ended."""

    kind: ClassVar[str] = "front_close"


FRONT_BODIES = (
    *(FrontStart, FrontReady, AboutModel, EngineStanding, AddCall, Stopped, Left, RequestEnd),
    *(RequestFailure, HttpRequest, HttpAnswer, HttpTaken, Drain, FrontClose),
)
