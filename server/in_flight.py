"""How long a request would take to be answered, by what is being answered and how fast."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Telling = Callable[[], AbstractContextManager[None]]
WINDOW_S = 2.0
LEAST_ANSWERS = 16  # in the window, before which nothing is predicted


class InFlight:
    """Counts sequences that were let in and not answered yet, and how many are in a second.

    The engine knows what waits for its steps; where the event loop is the slower one, requests wait
    for that. By Little's law what is in flight beyond the engine's slots waits as long as it takes
    to answer as many, whatever they wait for.

    Args:
        clock: seconds.

    Attributes:
        count: sequences in flight.
        entering: requests that were let in and are not counted yet: of many that come at a time,
            the last has to know of the first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.count = self.entering = 0
        self._clock = clock
        self._answered: deque[tuple[float, int]] = deque()
        self._num_answered = 0

    def enter(self) -> Entry:
        """A request is let in."""
        return Entry(self)

    @contextmanager
    def one(self, sequences: int) -> Iterator[Telling]:
        """A request is in flight within the block.

        Yields:
            a context in which it waits for its reader and not for the server: it does not count.
        """

        @contextmanager
        def telling() -> Iterator[None]:
            self.count -= sequences
            try:
                yield
            finally:
                self.count += sequences

        self.count += sequences
        try:
            yield telling
        finally:
            self.count -= sequences
            self._answered.append((self._clock(), sequences))
            self._num_answered += sequences
            self._forget()

    def wait(self, slots: int) -> float:
        """Predicted seconds that a request waits; 0 where too little is known.

        Args:
            slots: sequences that the engine runs at once.
        """
        self._forget()
        count = self.count + self.entering
        if count < slots or self._num_answered < LEAST_ANSWERS:
            return 0.0
        return (count - slots) * WINDOW_S / self._num_answered

    def _forget(self) -> None:
        since = self._clock() - WINDOW_S
        while self._answered and self._answered[0][0] < since:
            self._num_answered -= self._answered.popleft()[1]


class Entry:
    """A request that is let in, until its sequences are counted or it is answered otherwise."""

    def __init__(self, flight: InFlight):
        self._flight: InFlight | None = flight
        flight.entering += 1

    def leave(self) -> None:
        """It does not enter any more; a second time changes nothing."""
        if self._flight is not None:
            self._flight.entering -= 1
            self._flight = None
