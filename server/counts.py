"""What the processes of a server count against its limits; here of a server that is one process."""

from __future__ import annotations

import contextlib
from enum import IntEnum
from typing import Protocol


class Cell(IntEnum):
    """What each process counts: first what is there now, then what only grows."""

    BODY_BYTES = 0  # being read, parsed or tokenised
    UNREAD_BYTES = 1  # of answers
    CONNECTIONS = 2
    RUNNING = 3  # requests for the model's work that are being answered
    TURNS = 4  # that the event loop of a front has been seen to take, 0 before the first
    TEXT_S = 5
    HTTP_S = 6
    REFUSED_REQUESTS = 7  # by max_num_queued_reqs
    REFUSED_TOKENS = 8  # by max_num_queued_tokens
    REFUSED_BYTES = 9  # by max_media_bytes
    REFUSED_WAITS = 10  # by max_queue_wait


NOW = (Cell.BODY_BYTES, Cell.UNREAD_BYTES, Cell.CONNECTIONS, Cell.RUNNING, Cell.TURNS)
REFUSED = {
    "max_num_queued_reqs": Cell.REFUSED_REQUESTS,
    "max_num_queued_tokens": Cell.REFUSED_TOKENS,
    "max_media_bytes": Cell.REFUSED_BYTES,
    "max_queue_wait": Cell.REFUSED_WAITS,
}


class Numbers(Protocol):
    """Numbers by their places, as a list or shared memory has them."""

    def __getitem__(self, place: int, /) -> float: ...

    def __setitem__(self, place: int, value: float, /) -> None: ...


class Counts:
    """The counts of a server that is one process.

    Args:
        processes: that share the limits of the server.
        own: a number for each `Cell`; None: all are 0.
    """

    def __init__(self, processes: int = 1, own: Numbers | None = None):
        self.processes = processes
        self._own: Numbers = [0.0] * len(Cell) if own is None else own

    def own(self, cell: Cell) -> float:
        """What this process counts."""
        return self._own[cell]

    def total(self, cell: Cell) -> float:
        """What all processes count."""
        return self._own[cell]

    def add(self, cell: Cell, change: float) -> None:
        """Count so much more here."""
        self._own[cell] += change

    def put(self, cell: Cell, value: float) -> None:
        """It is so much here now."""
        self._own[cell] = value

    def quota(self, place: int) -> Numbers:
        """The two numbers of a `Bucket`, 0 at first; each place is another one's."""
        return [0.0, 0.0]

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Within, no other process uses quotas."""
        return contextlib.nullcontext()
