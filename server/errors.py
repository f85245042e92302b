"""Every error leaves the server as `{"error": {"message", "type", "param", "code"}}`.

`code` is always the HTTP status. Those of Anthropic's API have its own shape.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError as BodyError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import (
    CompilerBusyError,
    EngineDeadError,
    PausedError,
    QueueFullError,
    ShutdownError,
    ValidationError,
    shown,
)
from server.protocol.anthropic_errors import anthropic_error, is_anthropic

logger = logging.getLogger("jaxserve.server")

MAX_LISTED_ERRORS = 10
MAX_SHOWN_INPUT = 200
MAX_RETRY_AFTER_S = 60

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    429: "RateLimitError",
    413: "RequestTooLargeError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(Exception):
    """An error with its HTTP status.

    Attributes:
        status: the HTTP status, also the `code` of the body.
        message: what is wrong, for the client.
        param: the request field at fault, or None.
        headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON body of the response, in the shape that clients of a path expect.

        That of OpenAI's is also the one of an error event in a stream.
        """
        if is_anthropic(path):
            return anthropic_error(self.status, self.message, self.param)
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "InvalidRequestError"),
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self, path: str = "") -> Response:
        """The response, in the shape that clients of a path expect."""
        return JSONResponse(self.body(path), status_code=self.status, headers=self.headers)


class ClientDisconnected(Exception):
    """The client has gone: whatever is being computed for it is to be aborted."""


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about any exception.

    Unforeseen exceptions are logged with their traceback; the client gets no detail of them,
    because messages may hold paths and addresses.
    """
    match error:
        case ApiError():
            return error
        case ValidationError():
            return ApiError(400, str(error), param=error.field)
        case BodyError():
            return _body_error(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case QueueFullError() | CompilerBusyError() | PausedError():
            seconds = min(max(1, math.ceil(error.retry_after)), MAX_RETRY_AFTER_S)
            return ApiError(503, str(error), headers={"Retry-After": str(seconds)})
        case ShutdownError():
            return ApiError(503, "the server shuts down; this request was not completed")
        case EngineDeadError():
            return ApiError(500, "the engine has stopped; this request cannot be completed")
        case _:
            logger.error("internal error", exc_info=error)
            return ApiError(500, "internal error; the server's log has the details")


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Routing errors (unknown route, wrong method) in the same shape as all others."""
    path = request.url.path
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        route = f"{request.method} {path}"[:MAX_SHOWN_INPUT]
        text = "no such route" if error.status_code == 404 else "this route has other methods"
        return ApiError(error.status_code, f"{text}: {route}", headers=error.headers).response(path)
    return as_api_error(error).response(path)


def _body_error(error: BodyError) -> ApiError:
    """A short account of what pydantic found: bounded whatever the body holds."""
    details = error.errors(include_url=False, include_context=False)
    lines = [_detail(detail) for detail in details[:MAX_LISTED_ERRORS]]
    if len(details) > MAX_LISTED_ERRORS:
        lines.append(f"and {len(details) - MAX_LISTED_ERRORS} more")
    first = details[0]["loc"]
    return ApiError(400, "; ".join(lines), param=str(first[0]) if first else None)


def _detail(detail: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in detail["loc"])[:MAX_SHOWN_INPUT]
    if not path:
        # The whole body is at fault: its text is not repeated.
        return f"request body: {detail['msg']}"[: 2 * MAX_SHOWN_INPUT]
    if detail["type"] == "missing":
        return f"{path}: field required"
    return f"{path}: {detail['msg']} ({detail['type']}), got {_shown(detail['input'])}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    return shown(value)
