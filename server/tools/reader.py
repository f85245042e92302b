"""How parsers read text: character by character, so that it does not matter how it was cut.

A parser is a generator that is sent one character after the other and None at the end, and says
what it has found as soon as nothing that may follow could change it.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

from server.tools.deltas import CallArguments, CallBegin, Content, Delta, Reasoning

Steps = Generator[None, str | None, None]
Finding = Generator[None, str | None, str | None]


class Reader(ABC):
    """Reads one text.

    Attributes:
        char: the next character, None at the end of the text.
    """

    def __init__(self) -> None:
        self.char: str | None = ""
        # what was found since the last call: what it is, and its text in pieces
        self._found: list[tuple[Delta, list[str]]] = []
        self._space: list[str] = []  # that is dropped if a call follows
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

    def finish(self) -> list[Delta]:
        """What is left when no more text comes."""
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
        if not self._num_calls and self._space:
            self._add(Content(""), "".join(self._space))

    def _take(self) -> list[Delta]:
        found, self._found = self._found, []
        return [_whole(delta, pieces) for delta, pieces in found]

    def _add(self, delta: Delta, text: str) -> None:
        """Text of what `delta`, which has none yet, is of."""
        if self._found and self._found[-1][0] == delta:
            self._found[-1][1].append(text)
        else:
            self._found.append((delta, [text]))

    # -- for parsers ----------------------------------------------------------------------------

    def next(self) -> Steps:
        """Go to the next character."""
        self.char = yield

    def say(self, text: str) -> None:
        """Text for the user. Space before and behind calls is none."""
        for char in text:
            self._space.append(char)
            if not char.isspace():
                self._add(Content(""), "".join(self._space))
                self._space.clear()

    def think(self, text: str) -> None:
        """Text that is not for the user."""
        self._add(Reasoning(""), text)

    def begin_call(self, name: str) -> int:
        """A call begins; its index."""
        self._space.clear()
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

    def say_until(self, markers: Sequence[str]) -> Finding:
        """Say what comes before one of the markers, and go behind it; None at the end."""
        held = ""
        while self.char is not None:
            held += self.char
            yield from self.next()
            while held and not any(marker.startswith(held) for marker in markers):
                self.say(held[0])
                held = held[1:]
            if held in markers:
                return held
        self.say(held)
        return None

    def expect(self, text: str) -> Finding:
        """Go behind a text if it comes now: None. Else what was read in vain."""
        read = ""
        for wanted in text:
            if self.char != wanted:
                return read
            read += wanted
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


class ToolParser(Reader):
    """A reader of one model family's notation of calls."""

    @staticmethod
    def new_id() -> str:
        """An id for a call."""
        return f"call_{secrets.token_hex(12)}"
