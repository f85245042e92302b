"""Errors that jaxserve raises on purpose; the server maps each to one HTTP status."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

MAX_SHOWN = 200  # characters of a value in a message
_NO_MEMORY = ("failed to map segment", "annot allocate memory")  # of a library, or the system


class _Shown(Repr):
    """`repr` that looks at no more of a value than is shown: a request's may have megabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 8
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 50
        self.maxother = self.maxlong = 10**4

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: MAX_SHOWN + 1])

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # not sorted, as `repr` has it
        first = list(zip(range(self.maxdict), x.items())) if level > 0 else []
        pairs = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for _, (k, v) in first]
        return "{" + ", ".join([*pairs, *(["..."] if len(first) < len(x) else [])]) + "}"


def shown(value: Any) -> str:
    """A value for a message: its `repr`, cut to MAX_SHOWN characters."""
    text = _Shown().repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def lacks_memory(error: BaseException | None) -> str | None:
    """What an error says where it, or its cause, is that this process gets no more memory.

    A limit such as `ulimit -v` may keep a library from being loaded at all.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, MemoryError):
            return text or "an allocation failed"
        if isinstance(error, ImportError | OSError) and any(word in text for word in _NO_MEMORY):
            return text
        error = error.__cause__ or error.__context__
    return None


class JaxServeError(Exception):
    """Base class of every error that jaxserve raises on purpose."""


class ValidationError(JaxServeError, ValueError):
    """A parameter has a value that is not allowed; names the field, the value and what is allowed.

    Attributes:
        field: name of the offending parameter, as the user wrote it.
        value: the value that was refused.
        allowed: what would have been accepted, in words.
    """

    text = "{field}={value} is not supported: {allowed}"

    def __init__(self, field: str, value: Any, allowed: str):
        super().__init__(self.text.format(field=field, value=shown(value), allowed=allowed))
        self.field = field
        self.value = value
        self.allowed = allowed


class TemplateRefusal(ValidationError):
    """A chat template refuses what it is given, or fails; its own words come first."""

    text = "{allowed} (the chat template, of {field}={value})"


class Verbatim(str):
    """Text that errors show as it is: the `repr` of a value that is elsewhere."""

    __repr__ = str.__str__


class UnsupportedModelError(ValidationError):
    """The model's config asks for an architecture or option that jaxserve does not implement."""


class HubError(JaxServeError):
    """A model or a tokenizer cannot be fetched from the hub; says why in one line."""


class EngineDeadError(JaxServeError):
    """The engine was closed, or a step failed and the KV cache is lost: only a new one serves."""


class ShutdownError(EngineDeadError):
    """The engine was told to end before a request had finished; it may be sent to another one."""


class QueueFullError(JaxServeError):
    """A request was refused because too much waits already; it may be sent again later.

    Attributes:
        limit: the setting that refused it.
        retry_after: predicted seconds until what waits now has begun.
    """

    def __init__(self, limit: str, message: str, retry_after: float):
        super().__init__(f"{message} ({limit}); try again later")
        self.limit = limit
        self.retry_after = retry_after


class CompilerBusyError(JaxServeError):
    """A constraint was not begun to be compiled in time, for no fault of its own.

    Attributes:
        retry_after: seconds after which the request may be sent again.
    """

    def __init__(self, field: str, retry_after: float):
        super().__init__(f"{field} could not be compiled yet: the server is busy; try again later")
        self.retry_after = retry_after


class PausedError(JaxServeError):
    """A request was refused or ended because the engine was told to pause, or to sleep.

    Attributes:
        retry_after: seconds after which the request may be sent again.
    """

    retry_after = 5.0


class RowError(JaxServeError):
    """The rows of one request cannot be packed; those of others can.

    Attributes:
        request_id: of the sequence.
    """

    def __init__(self, request_id: str):
        super().__init__(f"a row of request {request_id} cannot be packed")
        self.request_id = request_id


class MessageError(JaxServeError):
    """A message between client and engine was lost, came twice or is not whole."""
