"""The server's logging: uvicorn's and our messages in one form, as text or as JSON."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection
from contextvars import ContextVar
from typing import Any

from uvicorn.config import LOGGING_CONFIG

from jaxserve.observability.json_log import ACCESS, JSON, JsonFormatter
from jaxserve.observability.repeated import RepeatedFilter

_PATH = 2  # among the arguments of a line of uvicorn's access log

# Of the request that the current task serves.
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


class PathFilter(logging.Filter):
    """Leaves out of an access log what probes and scrapers ask for.

    Args:
        paths: that are left out, whatever their query.
    """

    def __init__(self, paths: Collection[str]):
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) <= _PATH:
            return True
        return str(arguments[_PATH]).partition("?")[0] not in self._paths


def log_config(level: str, form: str, unlogged: Collection[str]) -> dict[str, Any]:
    """uvicorn's configuration of logging, and the engine's and the server's messages in its form.

    Args:
        level: of uvicorn.
        form: "text" or "json".
        unlogged: paths of which the access log says nothing.
    """
    config = copy.deepcopy(LOGGING_CONFIG)
    config["filters"] = {
        "repeated": {"()": RepeatedFilter},
        "paths": {"()": PathFilter, "paths": unlogged},
    }
    config["handlers"]["default"]["filters"] = ["repeated"]
    config["handlers"]["access"]["filters"] = ["paths"]
    if form == JSON:
        formatter = {"()": JsonFormatter, "request_id": REQUEST_ID.get}
        config["formatters"] = {"default": formatter, "access": formatter}
    config["loggers"]["jaxserve"] = {
        "handlers": ["default"],
        "level": "DEBUG" if level in ("debug", "trace") else level.upper(),
        "propagate": False,
    }
    assert ACCESS in config["loggers"]
    return config
