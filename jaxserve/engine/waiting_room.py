"""Messages that wait for what features have begun: the engine goes on with the others meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import compress
from typing import Any, NamedTuple

from jaxserve.boundary.messages import AddGroup


class WaitingGroup(NamedTuple):
    """A message, by feature what it waits for, and those of its sequences that have ended."""

    asked: AddGroup
    begun: Mapping[str, Future[Any]]
    aborted: set[str]

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.begun.values())


class WaitingRoom:
    """What is not queued yet. Used by the engine's thread."""

    def __init__(self) -> None:
        self._waiting: list[WaitingGroup] = []
        self._by_sequence: dict[str, WaitingGroup] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, asked: AddGroup, begun: Mapping[str, Future[Any]]) -> None:
        """Have a message wait until all that was begun for it is done."""
        group = WaitingGroup(asked, begun, set())
        self._waiting.append(group)
        self._by_sequence.update(dict.fromkeys(asked.sequence_ids, group))

    def abort(self, sequence_id: str) -> bool:
        """End a sequence that waits; False if it does not."""
        group = self._by_sequence.get(sequence_id)
        if group is not None:
            group.aborted.add(sequence_id)
        return group is not None

    def take(self, seconds: float = 0.0) -> list[WaitingGroup]:
        """The messages that need not wait any longer; waits for the first of them for so long."""
        if seconds:
            futures = [future for one in self._waiting for future in one.begun.values()]
            wait([one for one in futures if not one.done()], seconds, FIRST_COMPLETED)
        done = [one.is_done for one in self._waiting]
        ready = [*compress(self._waiting, done)]
        self._waiting = [one for one, is_done in zip(self._waiting, done) if not is_done]
        for one in ready:
            for name in one.asked.sequence_ids:
                del self._by_sequence[name]
        return ready

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        self._by_sequence.clear()
