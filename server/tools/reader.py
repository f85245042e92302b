"""How parsers read text: character by character, so that it does not matter how it was cut.

A parser is a generator that is sent one character after the other and None at the end, and says
what it has found as soon as nothing that may follow could change it.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

from server.tools.deltas import CallArguments, CallBegin, Content, Delta, Reasoning

Steps = Generator[None, str | None, None]
Finding = Generator[None, str | None, str | None]


class Reader(ABC):
    """Reads one text.

    Attributes:
        char: the next character, None at the end of the text.
        is_cut: at its end, whether the model has not ended it: it may be a part of a call.
    """

    def __init__(self) -> None:
        self.char: str | None = ""
        self.is_cut = False
        # what was found since the last call: what it is, and its text in pieces
        self._found: list[tuple[Delta, list[str]]] = []
        self._held: list[str] = []  # space and tags, dropped if a call follows
        self._num_calls = 0
        self._steps = self._run()
        next(self._steps)

    @abstractmethod
    def read(self) -> Steps:
        """Read from `self.char` to the end; `yield from self.next()` goes to the next character."""

    def feed(self, text: str) -> list[Delta]:
        """What more text says."""
        for char in text:
            self._steps.send(char)
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What is left when no more text comes; `cut`: see `is_cut`."""
        self.is_cut = cut
        try:
            self._steps.send(None)
        except StopIteration:
            return self._take()
        raise AssertionError("a parser reads on behind the end of its text")

    def _run(self) -> Steps:
        yield from self.next()
        yield from self.read()
        while self.char is not None:
            self.say(self.char)
            yield from self.next()
        if not self._num_calls and self._held:
            self._add(Content(""), "".join(self._held))

    def _take(self) -> list[Delta]:
        found, self._found = self._found, []
        return [_whole(delta, pieces) for delta, pieces in found]

    def _add(self, delta: Delta, text: str) -> None:
        """Text of what `delta`, which has none yet, is of."""
        if self._found and self._found[-1][0] == delta:
            self._found[-1][1].append(text)
        else:
            self._found.append((delta, [text]))

    def new_id(self) -> str:
        """An id for a call that was found."""
        return f"call_{secrets.token_hex(12)}"

    # -- for parsers ----------------------------------------------------------------------------

    def next(self) -> Steps:
        """Go to the next character."""
        self.char = yield

    def hold(self, tag: str) -> None:
        """A tag around calls. Where no call follows, the user reads it before what does follow."""
        self._held.append(tag)

    def say(self, text: str) -> None:
        """Text for the user. Space before and behind calls is none."""
        for char in text:
            self._held.append(char)
            if not char.isspace():
                self._add(Content(""), "".join(self._held))
                self._held.clear()

    def think(self, text: str) -> None:
        """Text that is not for the user."""
        if text:
            self._add(Reasoning(""), text)

    def begin_call(self, name: str) -> int:
        """A call begins; its index."""
        self._held.clear()
        index = self._num_calls
        self._num_calls += 1
        self._add(CallBegin(index, name), "")
        return index

    def add_arguments(self, index: int, text: str) -> None:
        """More of the arguments of a call."""
        if text:
            self._add(CallArguments(index, ""), text)

    def skip_space(self) -> Generator[None, str | None, str]:
        """Go to the next character that is no space; what was skipped."""
        skipped = ""
        while self.char is not None and self.char.isspace():
            skipped += self.char
            yield from self.next()
        return skipped

    def until(
        self,
        tags: Sequence[str],
        take: Callable[[str], None],
        *,
        held: str = "",
        stop: str = "",
        most: int | None = None,
    ) -> Finding:
        """Read what comes before one of the tags, and go behind it.

        Args:
            tags: none of them begins with another.
            take: told of each character that is of no tag.
            held: was read before and may be the begin of a tag; no longer than one.
            stop: a character that ends the text too, and stays the current one.
            most: characters that are read at most; None: any number.

        Returns:
            The tag or `stop`; None: neither has come.
        """
        firsts = {tag[0] for tag in tags}
        while True:
            while held and not any(tag.startswith(held) for tag in tags):
                take(held[0])
                held = held[1:]
            if held and held in tags:
                return held
            if stop and not held and self.char == stop:
                return stop
            if self.char is None or most == 0:
                for char in held:
                    take(char)
                return None
            if held or self.char in firsts:
                held += self.char
            else:
                take(self.char)
            most = None if most is None else most - 1
            yield from self.next()

    def expect(self, *texts: str) -> Finding:
        """Go behind one of the texts if it comes now: None. Else what was read in vain."""
        read = ""
        while read not in texts:
            wanted = read + (self.char or "")
            if self.char is None or not any(text.startswith(wanted) for text in texts):
                return read
            read = wanted
            yield from self.next()
        return None


def _whole(delta: Delta, pieces: list[str]) -> Delta:
    match delta:
        case CallBegin():
            return delta
        case CallArguments(index):
            return CallArguments(index, "".join(pieces))
        case _:
            return type(delta)("".join(pieces))
