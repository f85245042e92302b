"""Thoughts between two tags, such as `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from jaxserve.params.structured_outputs_params import Thoughts
from server.tools.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class Tags:
    """How a model marks its thoughts.

    Attributes:
        begin, end: the tags; a template may have written the first.
        other_begins, other_ends: what the model may write in their places.
        calls: what begins a call of a tool, and so ends thoughts that the model has not closed.
        starts_open: the model thinks without saying so: all is thought up to the end.
        may_come_late: text may come before the thoughts, and a last tag without a first is none.
    """

    begin: str
    end: str
    other_begins: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    starts_open: bool = False
    may_come_late: bool = False

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin, *self.other_begins)

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *self.other_ends)

    def are_open(self, prompt: str) -> bool:
        """Whether an answer begins with thoughts, since the prompt ends behind the first tag."""
        return self.starts_open or prompt.rstrip().endswith(self.begins)

    def are_closed(self, prompt: str) -> bool:
        """Whether an answer has no thoughts, since the prompt ends behind the last tag."""
        return prompt.rstrip().endswith(self.ends)

    def thoughts(self, prompt: str) -> Thoughts:
        """The same as the engine needs it, of an answer to a prompt."""
        return Thoughts(self.begin, self.end, self.are_open(prompt), self.other_ends)

    def reader(self, prompt: str) -> Reader:
        """What tells the thoughts of an answer to a prompt."""
        return ReasoningParser(self, self.are_open(prompt))


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
        missed = yield from self.expect(*self._tags.begins)
        if missed is not None and not self._is_open:
            self.say(space)
            if not self._tags.may_come_late:
                self.say(missed)
                return
            if not (yield from self._begins_late(missed)):
                return
            missed = None
        if missed is None:
            yield from self.skip_space()
        else:
            self.think(space)
        held = missed or ""
        end = yield from self.until((*self._tags.ends, *self._tags.calls), self.think, held=held)
        if end in self._tags.calls:
            self.say(end)
        elif end is not None:
            yield from self.skip_space()

    def _begins_late(self, held: str) -> Generator[None, str | None, bool]:
        """Text of the answer, up to the first tag; whether thoughts begin there."""
        tags = (*self._tags.begins, *self._tags.ends, *self._tags.calls)
        while True:
            tag = yield from self.until(tags, self.say, held=held)
            if tag in self._tags.calls:  # what is in a call is none
                self.say(tag)
            if tag is None or tag not in self._tags.ends:
                return tag in self._tags.begins
            held = ""
