"""Where the thoughts before a constrained text end, token by token."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from jaxserve.params.structured_outputs_params import Thoughts

if TYPE_CHECKING:
    from jaxserve.tokenization.tokenizer import Tokenizer


class Phase(Enum):
    """What the next token belongs to."""

    FIRST = "the model may begin to think, or answer"
    THOUGHTS = "thoughts"
    ANSWER = "the constrained text"


class ThoughtTracker:
    """Follows one sequence up to its answer; a copy follows another that has begun as this one.

    Args:
        thoughts: the tags.
        begin: the token that is the opening tag; None: there is none, so thoughts must be open.
        token_bytes: what a token adds to the text.

    Attributes:
        phase: what the next token belongs to.
        begin: the token that begins thoughts.
    """

    def __init__(self, thoughts: Thoughts, begin: int | None, token_bytes: Callable[[int], bytes]):
        self._ends = thoughts.ends
        self._token_bytes = token_bytes
        self._tail = b""
        self.begin = begin
        if thoughts.is_open:
            self.phase = Phase.THOUGHTS
        else:
            self.phase = Phase.ANSWER if begin is None else Phase.FIRST

    @classmethod
    def of(cls, thoughts: Thoughts, tokenizer: Tokenizer) -> ThoughtTracker:
        """That of a sequence without output."""
        added = {text: token for token, text in tokenizer.added_tokens.items()}
        return cls(thoughts, added.get(thoughts.begin), tokenizer.byte_table.__getitem__)

    def answer(self, tokens: list[int]) -> list[int] | None:
        """Those of further tokens that are of the answer; None: one begins in the closing tag."""
        for place, token in enumerate(tokens):
            if self.phase is Phase.ANSWER:
                return tokens[place:]
            if self.phase is Phase.FIRST:
                if token != self.begin:
                    self.phase = Phase.ANSWER
                    return tokens[place:]
                self.phase = Phase.THOUGHTS
                continue
            text = self._tail + self._token_bytes(token)
            found = [text.find(end) + len(end) for end in self._ends if end in text]
            if not found:
                self._tail = text[-max(map(len, self._ends)) :]
                continue
            self.phase = Phase.ANSWER
            if text[min(found) :].strip():
                return None
        return []
