"""How many tokens of thoughts one sequence may have, and what ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxserve.grammars.thoughts import Phase
from jaxserve.params.structured_outputs_params import Thoughts

if TYPE_CHECKING:
    from jaxserve.tokenization.tokenizer import Tokenizer


class ThoughtBudget:
    """Follows the output of one sequence; when its thoughts are as long as they may be, they end.

    A copy (`copy.copy`) follows another sequence that has begun as this one.

    Tokens of the tags do not count. Tags are told by their text, whatever tokens it has. A closing
    tag that the model has begun with the tokens that would be forced is completed, not repeated.

    Args:
        thoughts: the tags.
        most: tokens of thoughts.
        end_tokens: of the closing tag.
        token_bytes: what a token adds to the text.
    """

    def __init__(
        self,
        thoughts: Thoughts,
        most: int,
        end_tokens: list[int],
        token_bytes: Callable[[int], bytes],
    ):
        self._begin, self._ends = thoughts.begin.encode(), thoughts.ends
        self._most, self._end_tokens, self._token_bytes = most, end_tokens, token_bytes
        self._phase = Phase.THOUGHTS if thoughts.is_open else Phase.FIRST
        self._text = b""  # what a tag may lie in
        self._last: tuple[int, ...] = ()  # tokens of the thoughts that the closing tag may begin in
        self._count = self._num_ending = self._num_seen = 0

    @classmethod
    def of(cls, thoughts: Thoughts, most: int, tokenizer: Tokenizer) -> ThoughtBudget:
        """That of a sequence without output."""
        end = tokenizer.encode(thoughts.end, add_special_tokens=False)
        return cls(thoughts, most, end, tokenizer.byte_table.__getitem__)

    @property
    def is_over(self) -> bool:
        """Whether thoughts are over, or there are none."""
        return self._phase is Phase.ANSWER

    def take(self, output: list[int]) -> None:
        """Take in the tokens so far; they have only grown since the last call."""
        new, self._num_seen = output[self._num_seen :], len(output)
        for token in new:
            if self.is_over:
                return
            self._take_token(token)

    def waits(self, pending: int) -> bool:
        """Whether the next token may be one too many, so that the host has to see those before.

        Args:
            pending: tokens that it has not seen.
        """
        return not (self.is_over or self._count + pending < self._most)

    def forced(self, output: list[int]) -> int | None:
        """The token that must follow the output; None: any may."""
        self.take(output)
        if self._phase is not Phase.THOUGHTS or self._count < self._most:
            return None
        return self._end_tokens[self._num_ending]

    def _take_token(self, token: int) -> None:
        is_forced = self._phase is Phase.THOUGHTS and self._count >= self._most
        self._text += self._token_bytes(token)
        if self._phase is Phase.FIRST:
            text = self._text.lstrip()
            if not text.startswith(self._begin):
                if not self._begin.startswith(text):
                    self._phase = Phase.ANSWER
                return
            self._phase, self._text = Phase.THOUGHTS, text[len(self._begin) :]
        else:
            self._count += not is_forced
            self._last = (*self._last, token)[-len(self._end_tokens) :]
            self._num_ending = num_begun(self._last, self._end_tokens)
        is_said = any(end in self._text for end in self._ends)
        if is_said or self._num_ending == len(self._end_tokens):
            self._phase = Phase.ANSWER
        self._text = self._text[-max(map(len, self._ends)) :]


def num_begun(tokens: Sequence[int], tag: Sequence[int]) -> int:
    """How many tokens of a tag are there already: the longest end of `tokens` that begins it."""
    longest = min(len(tokens), len(tag))
    return next(n for n in range(longest, -1, -1) if [*tokens[len(tokens) - n :]] == [*tag[:n]])
