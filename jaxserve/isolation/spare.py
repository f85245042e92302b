"""A process that has imported what an engine needs and waits to be told what to load.

Imports are most of what a restart takes where programs come from the compilation cache.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from jaxserve.errors import EngineDeadError
from jaxserve.isolation.engine_process import EngineProcess

logger = logging.getLogger(__name__)

DELAY_S = 5.0  # first the engine that has just begun gets the processor


class Spare:
    """Keeps one process ready to take over.

    Args:
        make: starts a process, which takes a moment.
    """

    def __init__(self, make: Callable[[], EngineProcess]):
        self._make = make
        self._thread: threading.Thread | None = None
        self._process: EngineProcess | None = None
        self._closing = False
        self._is_wanted = threading.Event()  # now, or never again

    def prepare(self) -> None:
        """Start one beside the caller and a little later, where there is none."""
        if self._thread is None and not self._closing:
            self._is_wanted.clear()
            self._thread = threading.Thread(target=self._start, name="jaxserve-spare", daemon=True)
            self._thread.start()

    def take(self) -> EngineProcess | None:
        """The process, which is the caller's from now on; None: there is none, or it has died."""
        self._is_wanted.set()
        if self._thread is not None:
            self._thread.join()
        process, self._process, self._thread = self._process, None, None
        if process is None or process.is_alive:
            return process
        logger.warning("the spare process for an engine %s", process.wait(0))
        return None

    def close(self) -> None:
        """End it."""
        self._closing = True
        process = self.take()
        if process is not None:
            process.kill()
            process.wait(0)

    def _start(self) -> None:
        if self._is_wanted.wait(DELAY_S):
            return  # the caller of `take` starts one as fast
        try:
            self._process = self._make()
        except EngineDeadError as error:
            logger.warning("no spare process for an engine: %s", error)
