"""Responses that are kept for a while, so that others can go on from them."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

Owner = Hashable  # the client whose key has come with the request; None where there are no keys


@dataclass(slots=True)
class StoredResponse:
    """One response.

    Attributes:
        response: its JSON without `tools` and the last brace.
        tools: their JSON, which an owner's responses with the same tools have in common.
        messages: JSON of the conversation that it ends; empty while it is being made, or where it
            has failed.
        needed: bytes of what it is made of, while it is being made.
        background: it is made while no client waits for it.
        task: what makes it, None once it is there.
    """

    response: bytes
    tools: bytes = b"[]"
    messages: bytes = b""
    needed: int = 0
    background: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_made(self) -> bool:
        return self.task is None or self.task.done()

    @property
    def num_bytes(self) -> int:
        """Of what is its own."""
        return len(self.response) + len(self.messages) + self.needed

    @property
    def pieces(self) -> tuple[bytes, bytes, bytes, bytes]:
        """The response as it is told."""
        return with_tools(self.response, self.tools)


class _Shelf:
    """What one owner has: the newest last, tools once."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0
        self._tools: dict[bytes, bytes] = {}  # what is equal -> the one that is kept
        self._uses = Counter[bytes]()

    def put(self, name: str, kept: StoredResponse) -> None:
        kept.tools = self._tools.setdefault(kept.tools, kept.tools)
        if not self._uses[kept.tools]:
            self.num_bytes += len(kept.tools)
        self._uses[kept.tools] += 1
        self.kept[name] = kept
        self.num_bytes += kept.num_bytes

    def remove(self, name: str) -> StoredResponse:
        kept = self.kept.pop(name)
        self.num_bytes -= kept.num_bytes
        self._uses[kept.tools] -= 1
        if not self._uses[kept.tools]:
            self.num_bytes -= len(kept.tools)
            del self._uses[kept.tools], self._tools[kept.tools]
        return kept

    def in_the_making(self) -> tuple[int, int]:
        """How many responses are being made, and their bytes, each with its tools."""
        making = [one for one in self.kept.values() if not one.is_made]
        tools = {one.tools for one in making}
        return len(making), sum(one.num_bytes for one in making) + sum(map(len, tools))

    def oldest_made(self) -> str | None:
        return next((name for name, kept in self.kept.items() if kept.is_made), None)


class ResponseStore:
    """Keeps what was used last, apart for each owner.

    Each owner has a share, which no other can take: the store divided by the number of owners. What
    others leave free may be used beyond it, until an owner within its share needs the room. Where
    there is none, an owner beyond its share loses what it has not used for longest: the one that
    asks, if it is beyond its own. What is being made cannot be dropped, so of that an owner may
    have as much as its share.

    Args:
        most: responses that are kept; 0 keeps none.
        most_bytes: of them, their tools and their conversations.
        owners: among which the store is divided.

    Attributes:
        count, num_bytes: what is kept.
        share, share_bytes: responses and bytes of one owner.
    """

    def __init__(self, most: int, most_bytes: int, owners: int = 1):
        self._most, self._most_bytes = most, most_bytes
        self.share = min(most, max(1, most // owners))
        self.share_bytes = most_bytes // owners
        self._shelves: dict[Owner, _Shelf] = {}

    @property
    def count(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def put(self, owner: Owner, name: str, kept: StoredResponse) -> bool:
        """Keep a response, in place of an earlier one of the same name; whether there was room."""
        self.remove(owner, name)
        if self._most < 1:
            return False
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.put(name, kept)
        count, num_bytes = shelf.in_the_making()
        has_room = kept.is_made or (count <= self.share and num_bytes <= self.share_bytes)
        if not has_room or not self._make_room(owner, name):
            self.remove(owner, name)
            return False
        return True

    def get(self, owner: Owner, name: str) -> StoredResponse | None:
        """A response of the owner's, which is used by this; None: there is none."""
        kept = self.peek(owner, name)
        if kept is not None:
            self._shelves[owner].kept.move_to_end(name)
        return kept

    def peek(self, owner: Owner, name: str) -> StoredResponse | None:
        """A response of the owner's; None: there is none."""
        shelf = self._shelves.get(owner)
        return None if shelf is None else shelf.kept.get(name)

    def remove(self, owner: Owner, name: str) -> StoredResponse | None:
        """Let go of a response; None: there is none."""
        if self.peek(owner, name) is None:
            return None
        shelf = self._shelves[owner]
        kept = shelf.remove(name)
        if not shelf.kept:
            del self._shelves[owner]
        return kept

    async def close(self) -> None:
        """End what is still being made."""
        kept = [one for shelf in self._shelves.values() for one in shelf.kept.values()]
        tasks = [one.task for one in kept if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_room(self, owner: Owner, name: str) -> bool:
        """Drop what a new response needs; False: it has no room."""
        while self.count > self._most:
            if not self._drop_one(owner, name, lambda shelf: len(shelf.kept) - self.share):
                return False
        while self.num_bytes > self._most_bytes:
            if not self._drop_one(owner, name, lambda shelf: shelf.num_bytes - self.share_bytes):
                return False
        return True

    def _drop_one(self, owner: Owner, name: str, beyond: Callable[[_Shelf], int]) -> bool:
        """Drop the oldest of an owner beyond its share, of the one that asks if it is.

        Args:
            owner, name: of the response that needs the room.
            beyond: how much an owner has beyond its share.
        """
        loser = owner
        if beyond(self._shelves[owner]) <= 0:
            loser = max(self._shelves, key=lambda one: beyond(self._shelves[one]))
            if beyond(self._shelves[loser]) <= 0:
                return False
        oldest = self._shelves[loser].oldest_made()
        if oldest is None or (loser == owner and oldest == name):
            return False
        self.remove(loser, oldest)
        return True


def with_tools(response: bytes, tools: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """The JSON of a response as pieces, of which its tools are one; nothing is copied."""
    return response, b',"tools":', tools, b"}"
