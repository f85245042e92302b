"""Log lines of one of several engines."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class NumberedLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines say which engine they are about.

    Args:
        logger: that writes them.
        number: of the engine.
    """

    def __init__(self, logger: logging.Logger, number: int):
        super().__init__(logger, {})
        self._number = number

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"engine {self._number}: {msg}", kwargs


Log = logging.Logger | NumberedLog
