"""Requests that were in the step in which an engine died: each runs alone before it joins others.

One of them may be why it died. If so, it dies alone the second time, and the others go on.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import fields

from jaxserve.boundary.messages import AddGroup

# Steps in flight when an engine dies, and the one whose output it had not sent.
STEPS = 3
MOST_DEATHS = 2  # of a request: it is resumed once
MOST_GUILTY = 256  # requests that are remembered
WHO_ASKS = frozenset({"sequence_ids", "seeds", "queueing", "cache_salt", "output_token_ids"})


class Suspects:
    """The requests that have to run alone, and the one that does; by request ids."""

    def __init__(self) -> None:
        self._deaths = Counter[str]()  # of live requests: steps that they died in
        self._queue: deque[str] = deque()
        self._wanted = 0  # times that sequences of the one on trial still have to get tokens
        self.on_trial: str | None = None
        self._guilty: dict[bytes, None] = {}  # fingerprints, the newest last

    def convict(self, group: AddGroup) -> None:
        """It was alone when an engine died: what asks for the same is not tried again.

        Those that were in a step with it before are no longer suspected of that.
        """
        self._deaths.clear()
        self._guilty[_fingerprint(group)] = None
        if len(self._guilty) > MOST_GUILTY:
            del self._guilty[next(iter(self._guilty))]

    def is_guilty(self, group: AddGroup) -> bool:
        """Whether one like it has ended two engines."""
        return bool(self._guilty) and _fingerprint(group) in self._guilty

    def is_suspected(self, request: str) -> bool:
        """Whether a live request was in the last steps of an engine that has died."""
        return self._deaths[request] > 0

    def __bool__(self) -> bool:
        """True while a request is, or is to be, on trial."""
        return self.on_trial is not None or bool(self._queue)

    def died(self, requests: Iterable[str], live: Collection[str]) -> list[str]:
        """The engine has died with these in its last steps; those that are not tried again.

        Requests that are not `live` any more are not tried either.
        """
        ended = []
        again = [] if self.on_trial is None else [self.on_trial]
        again += self._queue
        self.on_trial = None
        for name in requests:
            self._deaths[name] += 1
            if self._deaths[name] >= MOST_DEATHS:
                ended.append(name)
            elif name not in again:
                again.append(name)
        self._queue = deque(name for name in again if name in live and name not in ended)
        return ended

    def next(self) -> str | None:
        """The next one to run alone; None: all that are left may run together."""
        self.on_trial = self._queue.popleft() if self._queue else None
        return self.on_trial

    def begin(self, num_sequences: int) -> None:
        """The one on trial is sent to the engine."""
        self._wanted = STEPS * num_sequences

    def got(self, num_sequences: int) -> bool:
        """So many sequences of the one on trial got tokens; True once that is enough."""
        self._wanted -= num_sequences
        return self._wanted <= 0

    def forget(self, request: str) -> None:
        """It has ended."""
        self._deaths.pop(request, None)
        if request in self._queue:
            self._queue.remove(request)


def _fingerprint(group: AddGroup) -> bytes:
    """A digest of what is asked for, without the client, the time and the seeds."""
    asked = [getattr(group, one.name) for one in fields(group) if one.name not in WHO_ASKS]
    return hashlib.sha256(repr(asked).encode()).digest()
