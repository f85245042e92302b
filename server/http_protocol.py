"""Which class speaks HTTP: ours, where the private class of uvicorn is as it was tested."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import uvicorn

from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from server.connection import Connection

# Of uvicorn, first and last: those whose bounds were tested. For a newer one run
# tests/server/test_connection.py, test_half_closed.py and test_many_connections.py with it, then
# raise this and the bound in pyproject.toml.
TESTED = ((0, 30), (0, 54))
OWN = "make_room"  # the public method of `Connection` that uvicorn does not call
# What `Connection` reads that uvicorn makes as a connection or a request begins, ...
READ = (
    *("loop", "transport", "flow", "scheme", "parser", "pipeline", "connections", "server_state"),
    *("url", "headers", "scope", "cycle", "access_log", "access_logger"),
    *("timeout_keep_alive", "timeout_keep_alive_task"),
)
# ... and of the answer to a request.
READ_OF_CYCLE = (
    *("scope", "disconnected", "keep_alive", "message_event", "waiting_for_100_continue"),
    *("response_started", "response_complete", "chunked_encoding", "expected_content_length"),
)


def connection_class() -> type[Connection]:
    """`Connection`, where uvicorn is as it knows it.

    Raises:
        ValidationError: uvicorn has changed: what clients may hold would not be bounded.
    """
    version = tuple(int(part) for part in uvicorn.__version__.split(".")[:2] if part.isdigit())
    if not TESTED[0] <= version <= TESTED[1]:
        raise _changed("another version")
    try:
        from server.connection import Connection, HttpToolsProtocol, RequestResponseCycle
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "httptools"):
            raise
        raise _changed(str(error)) from error
    for name in hooks(Connection):
        theirs = getattr(HttpToolsProtocol, name, None)
        if theirs is None:
            raise _changed(f"its class has no {name}")
        if _parameters(theirs) != _parameters(getattr(Connection, name)):
            raise _changed(f"its {name} has other parameters")
    made = _names(HttpToolsProtocol.__init__) | _names(HttpToolsProtocol.on_message_begin)
    missing = sorted(set(READ) - made)
    missing += sorted(set(READ_OF_CYCLE) - _names(RequestResponseCycle.__init__))
    if missing:
        raise _changed(f"its class does not make {', '.join(missing)}")
    return Connection


def hooks(connection: type[Connection]) -> list[str]:
    """The methods of uvicorn's class that `Connection` overrides, each because uvicorn calls it."""
    methods = [name for name, one in vars(connection).items() if inspect.isfunction(one)]
    public = [name for name in methods if not name.startswith("_") and name != OWN]
    return ["_unsupported_upgrade_warning", *public]


def _parameters(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


def _names(method: Any) -> set[str]:
    return set(method.__code__.co_names)


def _changed(how: str) -> ValidationError:
    (_, first), (_, last) = TESTED
    allowed = f"0.{first} to 0.{last}, on whose private class bounds on clients are built"
    return ValidationError("uvicorn", f"{uvicorn.__version__} ({how})", allowed)
