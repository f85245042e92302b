"""An answer as parts, one after the other: thoughts, texts and calls.

APIs that tell an answer as a list of items or blocks make them of these, whole and in a stream by
the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from server.tools.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from server.tools.message import MessageReader


class Kind(Enum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class AnswerPart:
    """One part.

    Attributes:
        kind: what it is.
        index: its place in the answer.
        name, call_id: of the function that is called.
        pieces: its text so far; of a call its arguments, JSON as the model has written it.
        whole: False: the answer was cut off within it.
    """

    kind: Kind
    index: int
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    whole: bool = True

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begun(self) -> AnswerPart:
        """The part without its text: what is told where it begins, for all of it follows."""
        return AnswerPart(self.kind, self.index, self.name, self.call_id)


@dataclass(frozen=True, slots=True)
class PartBegin:
    part: AnswerPart


@dataclass(frozen=True, slots=True)
class PartGrowth:
    part: AnswerPart
    text: str


@dataclass(frozen=True, slots=True)
class PartEnd:
    part: AnswerPart


Step = PartBegin | PartGrowth | PartEnd


class AnswerParts:
    """Makes parts of one answer's text.

    Args:
        reader: finds thoughts and calls in it.

    Attributes:
        parts: those that have begun.
    """

    def __init__(self, reader: MessageReader):
        self._reader = reader
        self.parts: list[AnswerPart] = []
        self._open: AnswerPart | None = None

    def feed(self, text: str, *, last: bool, cut: bool = False) -> list[Step]:
        """What more text does.

        An answer has a part at least: an empty text where the model has said nothing.

        Args:
            text: more of it.
            last: no more comes.
            cut: it ends before the model has ended it; said of the last part, too.
        """
        steps: list[Step] = []
        for delta in self._reader.find(text, last=last, cut=cut):
            self._add(delta, steps)
        if last:
            if not self.parts:
                self._begin(AnswerPart(Kind.TEXT, 0), steps)
            self.parts[-1].whole = not cut
            self._end(steps)
        return steps

    def _add(self, delta: Delta, steps: list[Step]) -> None:
        match delta:
            case CallBegin(_, name):
                call_id = self._reader.new_call_id()
                self._begin(AnswerPart(Kind.CALL, len(self.parts), name, call_id), steps)
            case CallArguments(_, text):
                self._grow(text, steps)
            case Content(text):
                self._say(Kind.TEXT, text, steps)
            case Reasoning(text):
                self._say(Kind.THOUGHT, text, steps)

    def _say(self, kind: Kind, text: str, steps: list[Step]) -> None:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            self._begin(AnswerPart(kind, len(self.parts)), steps)
        self._grow(text, steps)

    def _begin(self, part: AnswerPart, steps: list[Step]) -> None:
        self._end(steps)
        self.parts.append(part)
        self._open = part
        steps.append(PartBegin(part))

    def _grow(self, text: str, steps: list[Step]) -> None:
        assert self._open is not None
        self._open.pieces.append(text)
        steps.append(PartGrowth(self._open, text))

    def _end(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(PartEnd(self._open))
            self._open = None
