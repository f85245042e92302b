"""Messages as bytes, and the socket that carries them.

A frame is its length (four bytes, big endian) and MessagePack of number, kind and body. A body
travels as the list of its fields, in their order; the annotations of its class say how it is put
together again. Nothing but plain data can be written so, and reading makes no object but those of
messages.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack

from jaxserve.boundary.front_messages import FRONT_BODIES, AboutModel
from jaxserve.boundary.grammar_verdicts import GrammarTokens, SlowGrammar, TryGrammar, Verdict
from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.boundary.messages import (
    Abort,
    AddGroup,
    Body,
    Control,
    FirstSteps,
    StepEstimate,
    StepOutput,
)
from jaxserve.boundary.process_messages import PROCESS_BODIES
from jaxserve.boundary.reports import REPORTS
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import MessageError
from jaxserve.params.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 1 << 30
RECEIVE_BYTES = 1 << 18

_LENGTH = struct.Struct(">I")

Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to an engine's process: what it is to load.

    Attributes:
        config: what the user asked for.
        log_level: the level of the logger `jaxserve`.
        log_format: "text" or "json".
    """

    kind: ClassVar[str] = "start"
    config: EngineConfig
    log_level: int
    log_format: str = "text"


class ModelSizes(NamedTuple):
    """What a client has to know of a model, see `ModelFacts`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...]
    labels: tuple[str, ...]
    matryoshka: tuple[int, ...] | None
    images: ImageFacts | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is warmed up.

    Attributes:
        config: the resolved configuration.
        model: what clients have to know of the model.
        model_folder, tokenizer_folder: where they were found.
        page_bytes: bytes of one KV page over all layers and devices.
    """

    kind: ClassVar[str] = "ready"
    config: ResolvedConfig
    model: ModelSizes
    model_folder: str
    tokenizer_folder: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class StartRefusal:
    """The engine cannot be loaded, as it is configured; the text is for people."""

    kind: ClassVar[str] = "refused"
    text: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Comes back as it is: whatever was sent before has been done, and its outputs came first."""

    kind: ClassVar[str] = "sync"


BODIES = (
    *(
        AddGroup,
        Abort,
        Control,
        StepOutput,
        FirstSteps,
        StepEstimate,
        Start,
        Ready,
        StartRefusal,
        Sync,
    ),
    *(GrammarTokens, TryGrammar, SlowGrammar, Verdict),
    *FRONT_BODIES,
    *PROCESS_BODIES,
)


def encode(body: Body, number: int = 0) -> bytes:
    """The frame of a message.

    Raises:
        MessageError: it is longer than MAX_MESSAGE_BYTES, or something in it cannot be written: an
            integer of more than 64 bits, text that is no Unicode, what is no plain data.
    """
    kind = body.kind
    try:
        data: bytes = msgpack.packb((number, kind, body), default=_plain)
    except (ValueError, TypeError, OverflowError) as error:
        raise MessageError(f"a message of kind {kind} cannot be written: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"a message of kind {kind} has {len(data)} bytes, {MAX_MESSAGE_BYTES} may"
        )
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes | bytearray | memoryview, number: int = 0) -> Body:
    """The message of a frame, its length left out.

    Raises:
        MessageError: it is none, or has another number: one was lost or came twice.
    """
    try:
        found, kind, fields = msgpack.unpackb(data, strict_map_key=False)
        body: Body = _READERS[kind](fields)
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise MessageError(f"{len(data)} bytes are no message: {error!r}") from error
    if found != number:
        raise MessageError(f"message {found} of kind {kind} instead of message {number}")
    return body


class Channel:
    """One end of a stream socket that carries messages; each direction is used by one thread.

    Each direction numbers what it carries: 0, 1, 2, ...
    """

    def __init__(self, stream: socket.socket):
        self._socket = stream
        self._received = bytearray()
        self._num_framed = self._num_received = 0

    def send(self, body: Body) -> None:
        """Write a message; waits while the other side does not read.

        Raises:
            MessageError: see `encode`.
            OSError: the other side has gone.
        """
        self.send_frame(self.frame(body))

    def frame(self, body: Body) -> bytes:
        """The next message, for `send_frame`. Raises MessageError, see `encode`."""
        frame = encode(body, self._num_framed)
        self._num_framed += 1
        return frame

    def send_frame(self, frame: bytes) -> None:
        """Write what `frame` gave, in that order. Raises OSError if the other side has gone."""
        self._socket.sendall(frame)

    def receive(self) -> Body | None:
        """The next message, which is waited for; None once the other side has gone.

        Raises:
            MessageError: what came is no message, or not the next one.
        """
        while (body := self._next()) is None:
            if not self._read(0):
                return None
        return body

    def arrived(self) -> Iterator[Body]:
        """The messages that are there already.

        Raises:
            EOFError: the other side has gone.
            MessageError: what came is no message, or not the next one.
        """
        while True:
            while (body := self._next()) is not None:
                yield body
            try:
                if not self._read(socket.MSG_DONTWAIT):
                    raise EOFError("the other side has gone")
            except BlockingIOError:
                return

    def has_ended(self) -> bool:
        """Whether the other side has gone, and all that it sent was received; waits for nothing."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Wakes a thread that waits for a message; the other side reads to the end."""
        with suppress(OSError):  # the other side has gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, flags: int) -> bool:
        try:
            data = self._socket.recv(RECEIVE_BYTES, flags)
        except ConnectionError:
            return False
        self._received += data
        return bool(data)

    def _next(self) -> Body | None:
        found = self._received
        if len(found) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(found)
        if length > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message of {length} bytes, {MAX_MESSAGE_BYTES} may")
        end = _LENGTH.size + length
        if len(found) < end:
            return None
        with memoryview(found) as view:
            body = decode(view[_LENGTH.size : end], self._num_received)
        del found[:end]
        self._num_received += 1
        return body


def _plain(value: Any) -> Any:
    """What msgpack does not know: dataclasses, sets, enums, mappings."""
    if isinstance(value, AboutModel):
        return [value.model, [value.message.kind, value.message]]
    names = _FIELDS.get(type(value))
    if names is not None:
        return [getattr(value, name) for name in names]
    if isinstance(value, frozenset):
        return list(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def _reader(kind: Any) -> Reader | None:
    """How a value of an annotated type is made of what msgpack read; None: it is one."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        others = [one for one in arguments if one is not NoneType]
        readers = [_reader(one) for one in others]
        if not any(readers):
            return None
        (read,) = readers  # of two kinds of objects the bytes do not say which one came
        assert read is not None
        return lambda value: None if value is None else read(value)
    if origin is list:
        read_item = _reader(arguments[0])
        if read_item is None:
            return None
        return lambda value: [read_item(item) for item in value]
    if origin is dict:
        read_value = _reader(arguments[1])
        if read_value is None:
            return None
        return lambda value: {key: read_value(item) for key, item in value.items()}
    if origin in (tuple, frozenset):
        read_one = _reader(arguments[0]) if arguments[1:] == (...,) else None
        if read_one is not None:
            return lambda value: origin(map(read_one, value))
        assert not any(map(_reader, (one for one in arguments if one is not ...)))
        return origin
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return _object_reader(kind)
    return None


def _object_reader(kind: Any) -> Reader:
    """How a dataclass or a named tuple is made of the list of its fields."""
    make: Callable[..., Any] = _restored if kind is SamplingParams else kind
    names: tuple[str, ...] = getattr(kind, "_fields", ())
    if not names:
        names = tuple(one.name for one in dataclasses.fields(kind) if one.init)
        _FIELDS[kind] = names
    hints = get_type_hints(kind)
    readers = [(place, _reader(hints[name])) for place, name in enumerate(names)]
    if kind is StepOutput:
        readers.append((names.index("reports"), _reports))
    if kind is AboutModel:
        readers.append((names.index("message"), _message))
    converted = [(place, convert) for place, convert in readers if convert is not None]

    def read(values: list[Any]) -> Any:
        if len(values) != len(names):
            raise ValueError(f"{len(values)} fields of {kind.__name__}, which has {len(names)}")
        for place, convert in converted:
            values[place] = convert(values[place])
        return make(**dict(zip(names, values)))

    return read


def _reports(value: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What features tell, by their names; features of the operator's own tell plain data."""
    return {name: _REPORT_READERS.get(name, dict)(told) for name, told in value.items()}


def _message(value: list[Any]) -> Body:
    """A message within another one, which travels behind its kind."""
    kind, fields = value
    body: Body = _READERS[kind](fields)
    return body


def _restored(**values: Any) -> SamplingParams:
    """Sampling parameters as they were; checking lists of the vocabulary's length takes long."""
    params = object.__new__(SamplingParams)
    for name, value in values.items():
        setattr(params, name, value)
    return params


_FIELDS: dict[type, tuple[str, ...]] = {}  # what travels of each dataclass
_REPORT_READERS = {name: _reader(of) or dict for name, of in REPORTS.items()}
_READERS = {body.kind: _object_reader(body) for body in BODIES}
