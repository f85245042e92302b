"""Whether pages and slots are owned by exactly the requests that should own them."""

from __future__ import annotations

import logging
import time

from jaxserve.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 60.0  # least time between two checks


class Integrity:
    """Checks a scheduler that has nothing to do, where that holds up no request.

    Attributes:
        num_failures: checks that found something wrong.
    """

    def __init__(self, scheduler: Scheduler):
        self.num_failures = 0
        self._scheduler, self._next = scheduler, 0.0

    def check(self) -> None:
        """See that no page and no slot got lost, unless that was done just before."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + CHECK_INTERVAL_S
        try:
            self._scheduler.check_integrity()
        except AssertionError:
            self.num_failures += 1
            logger.exception("pages or slots of the KV cache are lost, or owned twice")
