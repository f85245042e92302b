"""Messages that wait for what features have begun: the engine goes on with the others meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from jaxserve.messages import AddGroup


class _Waiting(NamedTuple):
    """A message, and by feature what it waits for."""

    asked: AddGroup
    begun: Mapping[str, Future[Any]]

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.begun.values())


class Ready(NamedTuple):
    """A message that may be queued, with those of its sequences that have ended before."""

    asked: AddGroup
    begun: Mapping[str, Future[Any]]
    aborted: list[str]


class Waiting:
    """What is not queued yet. Used by the engine's thread."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._aborted: dict[str, bool] = {}  # by sequence that waits

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, asked: AddGroup, begun: Mapping[str, Future[Any]]) -> None:
        """Have a message wait until all that was begun for it is done."""
        self._waiting.append(_Waiting(asked, begun))
        self._aborted.update(dict.fromkeys(asked.sequence_ids, False))

    def abort(self, sequence_id: str) -> bool:
        """End a sequence that waits; False if it does not."""
        if sequence_id not in self._aborted:
            return False
        self._aborted[sequence_id] = True
        return True

    def take(self, seconds: float = 0.0) -> list[Ready]:
        """The messages that need not wait any longer; waits for the first of them for so long."""
        if seconds:
            futures = [future for one in self._waiting for future in one.begun.values()]
            wait([one for one in futures if not one.done()], seconds, FIRST_COMPLETED)
        waiting, self._waiting = self._waiting, []
        ready = []
        for one in waiting:
            if one.is_done:
                ids = one.asked.sequence_ids
                ready.append(Ready(*one, [name for name in ids if self._aborted.pop(name)]))
            else:
                self._waiting.append(one)
        return ready

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        self._aborted.clear()
