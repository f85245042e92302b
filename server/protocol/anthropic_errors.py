"""Errors in the shape of Anthropic's API, for the paths that are its own."""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
# field -> the code by which Anthropic's clients go on without it
_CODES = {"thread": "thread_unsupported_request"}


def is_anthropic(path: str) -> bool:
    """Whether a path's errors have this shape."""
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error of a field (`param`) or of the whole, or the data of an error event."""
    error: dict[str, Any] = {"type": _TYPES.get(status, "api_error"), "message": message}
    if param in _CODES:
        error["details"] = {"error_code": _CODES[param]}
    return {"type": "error", "error": error}
