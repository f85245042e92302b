"""Says what a start is doing while it lasts: a first one compiles for a minute or more.

Lines are told from the third second on, one every few seconds, so that a quick start is silent. On
a terminal they are one line that is kept up to date.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

from jaxserve.observability.json_log import JsonFormatter

logger = logging.getLogger(__name__)

FIRST_S, EVERY_S = 3.0, 5.0
TERMINAL_S = 0.5  # from one state of a terminal's line to the next
GB = 1e9

# how much is done, and of how much
Told = Callable[[int, int], None]


def unheard(done: int, total: int) -> None:
    """Takes no notice."""


class _Phase(NamedTuple):
    doing: str
    counted: str  # what is counted: "bytes", or the name of things
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        if not self.total:
            return self.doing
        if self.counted == "bytes":
            return f"{self.doing}: {self.done / GB:.2f} of {self.total / GB:.2f} GB"
        return f"{self.doing}: {self.done} of {self.total} {self.counted} done"


class LoadProgress:
    """Tells on standard error what a start does; a context manager that ends the telling.

    Where the logger `jaxserve` writes messages of level INFO, lines are messages of it, in its
    form. A logger `jaxserve` that was given a higher level is respected: no line is told.

    Args:
        say: takes a line when a part of a start is done.
        shown: False: tell nothing in between.
    """

    def __init__(self, say: Callable[[str], Any], *, shown: bool = True):
        self._say = say
        self._tell = _teller()
        self._on_terminal = _is_plain_terminal()
        self._began = time.monotonic()
        self._phase = _Phase("starting", "")
        self._line: Any = None  # of a terminal, written over
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if shown and self._tell is not None:
            self._thread = threading.Thread(
                target=self._watch, name="jaxserve-progress", daemon=True
            )

    def __enter__(self) -> LoadProgress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, text: str) -> None:
        """A part of the start is done."""
        with self._writing:
            if self._line is not None:
                self._line.clear()
            self._say(text)

    @contextmanager
    def phase(self, doing: str, counted: str = "bytes") -> Iterator[Told]:
        """Within, a start does this; yields what is told how much of it is done.

        Args:
            doing: in words.
            counted: "bytes", or the name of the things that are counted.
        """
        before, own = self._phase, _Phase(doing, counted)
        self._phase = own

        def told(done: int, total: int) -> None:
            self._phase = own._replace(done=done, total=total)

        try:
            yield told
        finally:
            self._phase = before

    def __str__(self) -> str:
        return f"{self._phase} ({time.monotonic() - self._began:.0f} s so far)"

    def _watch(self) -> None:
        assert self._tell is not None
        wait = FIRST_S
        while not self._ended.wait(wait):
            if not self._on_terminal:
                self._tell(str(self))
                wait = EVERY_S
                continue
            with self._writing:
                if self._line is None:
                    self._line = tqdm(bar_format="{desc}", leave=False)
                self._line.set_description_str(str(self))
            wait = TERMINAL_S
        if self._line is not None:
            self._line.close()


def _teller() -> Callable[[str], Any] | None:
    """What takes lines; None where they are not wanted."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        return logger.info
    if logging.getLogger("jaxserve").level != logging.NOTSET:
        return None
    return lambda line: print(f"jaxserve: {line}", file=sys.stderr, flush=True)


def _is_plain_terminal() -> bool:
    """Whether a line of standard error may be written over: not where lines are JSON."""
    handlers = logging.getLogger("jaxserve").handlers
    writes_json = any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)
    return sys.stderr.isatty() and not writes_json
