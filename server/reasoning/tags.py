"""Thoughts between two tags, such as `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from typing import NamedTuple

from server.tools.reader import Reader, Steps


class Tags(NamedTuple):
    """How a model marks its thoughts.

    Attributes:
        begin, end: the tags; a template may have written the first.
        starts_open: the model thinks without saying so: all is thought up to the end.
    """

    begin: str
    end: str
    starts_open: bool = False

    def are_open(self, prompt: str) -> bool:
        """Whether an answer begins with thoughts, since the prompt ends behind the first tag."""
        return self.starts_open or prompt.rstrip().endswith(self.begin)


class ReasoningParser(Reader):
    """Reads thoughts and answer. An answer without tags is an answer.

    Args:
        tags: around thoughts.
        is_open: the answer begins in the middle of thoughts.
    """

    def __init__(self, tags: Tags, is_open: bool):
        self._tags, self._is_open = tags, is_open
        super().__init__()

    def read(self) -> Steps:
        space = yield from self.skip_space()
        missed = yield from self.expect(self._tags.begin)
        if missed is not None and not self._is_open:
            self.say(space + missed)
            return
        held = space + missed if missed else ""
        if missed is None:
            yield from self.skip_space()
        end = self._tags.end
        while True:
            # what may be the closing tag is kept until it is known not to be
            while held and not end.startswith(held):
                self.think(held[0])
                held = held[1:]
            if held == end:
                yield from self.skip_space()
                return
            if self.char is None:
                if held:
                    self.think(held)
                return
            held += self.char
            yield from self.next()
