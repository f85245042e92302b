"""How far the event loop is behind: what waits in sockets is in no queue that admission knows."""

from __future__ import annotations

import asyncio

LOOK_S = 0.05


class LoopLag:
    """Measures how late the loop's timers are.

    Attributes:
        seconds: how late the last one was, which is about how long a request has waited that is
            read now.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure, from within the loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_S, self._look, loop, loop.time() + LOOK_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.seconds = 0.0

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self.seconds = max(0.0, now - due)
        self._timer = loop.call_later(LOOK_S, self._look, loop, now + LOOK_S)
