"""Responses that are kept for a while, so that others can go on from them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

Owner = Hashable  # whose key has come with the request; None where no key is asked for


@dataclass(slots=True)
class Kept:
    """One response.

    Attributes:
        response: its JSON.
        messages: JSON of the conversation that it ends; empty while it is being made, or where it
            has failed.
        background: it is made while nobody waits for it.
        task: what makes it, None once it is there.
    """

    response: bytes
    messages: bytes = b""
    background: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Keeps what was used last, apart for each owner.

    When there is too much, whoever has the most bytes loses what they have not used for longest: so
    nobody can drive out what belongs to somebody who keeps little.

    Args:
        most: responses that are kept; 0 keeps none.
        most_bytes: of them and their conversations.

    Attributes:
        count, num_bytes: what is kept.
    """

    def __init__(self, most: int, most_bytes: int):
        self._most, self._most_bytes = most, most_bytes
        self._kept: dict[Owner, OrderedDict[str, Kept]] = {}
        self._bytes: dict[Owner, int] = {}

    @property
    def count(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def put(self, owner: Owner, name: str, kept: Kept) -> bool:
        """Keep a response, in place of an earlier one of the same name; whether there was room."""
        self.remove(owner, name)
        if self._most < 1 or kept.num_bytes > self._most_bytes:
            return False
        self._kept.setdefault(owner, OrderedDict())[name] = kept
        self._bytes[owner] = self._bytes.get(owner, 0) + kept.num_bytes
        while self.count > self._most or self.num_bytes > self._most_bytes:
            if not self._drop_oldest():
                self.remove(owner, name)
                return False
        return self.peek(owner, name) is kept

    def get(self, owner: Owner, name: str) -> Kept | None:
        """A response of the owner's, which is used by this; None: there is none."""
        kept = self.peek(owner, name)
        if kept is not None:
            self._kept[owner].move_to_end(name)
        return kept

    def peek(self, owner: Owner, name: str) -> Kept | None:
        """A response of the owner's; None: there is none."""
        mine = self._kept.get(owner)
        return None if mine is None else mine.get(name)

    def remove(self, owner: Owner, name: str) -> Kept | None:
        """Let go of a response; None: there is none."""
        kept = self.peek(owner, name)
        if kept is not None:
            del self._kept[owner][name]
            self._bytes[owner] -= kept.num_bytes
            if not self._kept[owner]:
                del self._kept[owner], self._bytes[owner]
        return kept

    async def close(self) -> None:
        """End what is still being made."""
        tasks = [one.task for kept in self._kept.values() for one in kept.values() if one.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop_oldest(self) -> bool:
        """Let go of one that is there, of whoever has the most; False: all are being made."""
        for owner in sorted(self._bytes, key=lambda one: self._bytes[one], reverse=True):
            for name, kept in self._kept[owner].items():
                if kept.task is None or kept.task.done():
                    self.remove(owner, name)
                    return True
        return False
