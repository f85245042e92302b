"""Calls that the request demands: a grammar holds the text, and says how it is read."""

from __future__ import annotations

from functools import partial

from server.tools.json_text import read_call, read_value
from server.tools.reader import Reader, Steps


class ListParser(Reader):
    """`tool_choice` "required": a JSON list of calls, of which the last may be cut off."""

    def say(self, text: str) -> None:
        """Nothing: what is no call yet is none that the user could read."""

    def read(self) -> Steps:
        yield from self.skip_space()
        while self.char is not None and self.char in "[,":
            yield from self.next()
            yield from self.skip_space()
            if self.char != "{" or not (yield from read_call(self, ("parameters",))):
                return
            yield from self.skip_space()
        if self.char == "]":
            yield from self.next()


class ArgumentsParser(Reader):
    """A function that is named: the text is its arguments."""

    def __init__(self, name: str):
        self._name = name
        super().__init__()

    def read(self) -> Steps:
        yield from self.skip_space()
        if self.char is None:
            return
        index = self.begin_call(self._name)
        yield from read_value(self, partial(self.add_arguments, index))
