"""Thoughts between two tags, such as `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from typing import ClassVar

from server.tools.reader import Reader, Steps


class ReasoningParser(Reader):
    """Reads thoughts and answer.

    Args:
        is_open: the prompt ends in the middle of thoughts, because a template has opened them.
    """

    begin: ClassVar[str]
    end: ClassVar[str]
    starts_open: ClassVar[bool] = False  # the model thinks without saying so

    def __init__(self, is_open: bool):
        self._is_open = is_open or self.starts_open
        super().__init__()

    @classmethod
    def leaves_open(cls, prompt: str) -> bool:
        """Whether a prompt ends behind an opening tag that nothing closes."""
        return prompt.rstrip().endswith(cls.begin)

    def read(self) -> Steps:
        space = yield from self.skip_space()
        missed = yield from self.expect(self.begin)
        if missed is not None and not self._is_open:
            self.say(space + missed)
            return
        held = space + missed if missed else ""
        if missed is None:
            yield from self.skip_space()
        while True:
            # what may be the closing tag is kept until it is known not to be
            while held and not self.end.startswith(held):
                self.think(held[0])
                held = held[1:]
            if held == self.end:
                yield from self.skip_space()
                return
            if self.char is None:
                if held:
                    self.think(held)
                return
            held += self.char
            yield from self.next()
