"""The other side of a connection: whether it is gone, also while its bytes are not read."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Between two looks, after the first.
LOOK_S = 1.0
FIRST_LOOK_S = 0.02  # then twice as long, and so on
_CAN_LOOK = hasattr(select, "POLLRDHUP")  # on Linux


@dataclass(eq=False, slots=True)
class PeerWatch:
    """Ends a connection whose client is gone, where its bytes are not read, or not for now.

    Args:
        transport: of the connection.
        interval: seconds between two probes.
        is_needed: whether there is still something to look for.
        is_told_by_probes: whether a probe is passed over by the client that is answered.
        begins: whether nothing of that answer is written yet, so that a probe may be.
    """

    transport: asyncio.Transport
    interval: float
    is_needed: Callable[[], bool]
    is_told_by_probes: Callable[[], bool]
    begins: Callable[[], bool]
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _timer: asyncio.TimerHandle | None = None
    _after: float = FIRST_LOOK_S
    _probe_at: float = 0.0  # the event loop's time

    @property
    def is_on(self) -> bool:
        return self._timer is not None

    def can_probe(self) -> bool:
        """Whether a client that has ended its side can be told from one that is gone."""
        return _CAN_LOOK and self.is_told_by_probes()

    def look(self) -> None:
        """Look now, and again and again while it is needed."""
        self.stop()
        if not self.is_needed() or self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        has_ended = _has_ended(connection)
        if has_ended and not self.can_probe():
            self.transport.abort()
            return
        if has_ended and self._loop.time() >= self._probe_at:
            self._probe()
        if _is_gone(connection):
            self.transport.abort()
            return
        self._timer = self._loop.call_later(self._after, self.look)
        self._after = min(2 * self._after, LOOK_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self) -> None:
        """Write what a client passes over; from one that is gone comes a reset."""
        self._probe_at = self._loop.time() + self.interval
        if self.begins():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _has_ended(connection: Any) -> bool:
    """Whether the peer has ended its side, also where bytes of it are still to be read."""
    return _CAN_LOOK and _polled(connection, select.POLLRDHUP) != 0


def _is_gone(connection: Any) -> bool:
    """Whether the peer has closed both sides, as far as this side has been told."""
    return _CAN_LOOK and _polled(connection, 0) != 0


def _polled(connection: Any, events: int) -> int:
    poll = select.poll()
    poll.register(connection.fileno(), events)  # what is wrong is told unasked
    return sum(told for _, told in poll.poll(0))
