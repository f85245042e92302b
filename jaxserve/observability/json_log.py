"""Log lines as JSON objects, one a line, with the id of the request that they are of."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

TEXT, JSON = "text", "json"
ACCESS = "uvicorn.access"
ACCESS_FIELDS = ("client", "method", "path", "http_version", "status")


class JsonFormatter(logging.Formatter):
    """Writes `time` (UTC), `level`, `logger` and `message`, and what else is known.

    A line of an access log has its fields in the place of a message; `request_id` is there where a
    line is of a request, `exception` where there is one.

    Args:
        request_id: returns the id of the request that is being served; None outside of one, and
            where there are none.
    """

    def __init__(self, request_id: Callable[[], str | None] = lambda: None):
        super().__init__()
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if record.name == ACCESS and isinstance(record.args, tuple):
            line |= dict(zip(ACCESS_FIELDS, record.args))
        else:
            line["message"] = record.getMessage()
        request_id = self._request_id()
        if request_id is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
