"""Log lines that a client can cause at will: a few a minute, then how many were left out."""

from __future__ import annotations

import logging
import time

PERIOD_S = 60.0
MOST_A_PERIOD = 10
MOST_KINDS = 1000  # of lines that are remembered


class RepeatedFilter(logging.Filter):
    """Lets through a few warnings and errors of one kind in a minute; lesser lines always.

    A kind is the place in the code that a line comes from. The first line of the next minute says
    how many were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int], tuple[float, int]] = {}  # start, lines since then

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = (record.pathname, record.lineno)
        now = time.monotonic()
        start, count = self._kinds.get(kind, (now, 0))
        if now - start >= PERIOD_S:
            left_out = count - MOST_A_PERIOD
            if left_out > 0:
                record.msg = f"{record.getMessage()} (and {left_out} such lines before)"
                record.args = None
            start, count = now, 0
        if len(self._kinds) >= MOST_KINDS and kind not in self._kinds:
            self._kinds.clear()
        self._kinds[kind] = (start, count + 1)
        return count < MOST_A_PERIOD
