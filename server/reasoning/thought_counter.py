"""How many of the generated tokens are thoughts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from server.reasoning.tags import Tags


class ThoughtCounter:
    """Counts tokens between the tags of one choice, as its tokens come.

    Args:
        tags: around thoughts.
        is_open: the answer begins in the middle of thoughts.
        token_text: what a token adds to the text.
    """

    def __init__(self, tags: Tags, is_open: bool, token_text: Callable[[int], str]):
        self._tags = tags
        self._token_text, self._is_open = token_text, is_open
        self._has_begun = self._is_over = False
        self._text = ""  # what the next tag may begin in
        self._held: list[int] = []  # where tokens begin that may be part of a tag
        self._counted = 0

    @property
    def count(self) -> int:
        """Tokens of thoughts so far, those of the tags left out."""
        return self._counted + (len(self._held) if self._has_begun and not self._is_over else 0)

    def feed(self, tokens: Iterable[int]) -> None:
        """Take in what has come."""
        for token in tokens:
            if self._is_over:
                return
            self._held.append(len(self._text))
            self._text += self._token_text(token)
            if not self._has_begun:
                self._look_for_begin()
            if self._has_begun and not self._is_over:
                self._look_for_end()

    def _look_for_begin(self) -> None:
        text = self._text.lstrip()
        begin = next(filter(text.startswith, self._tags.begins), None)
        if begin is not None:
            after = len(self._text) - len(text) + len(begin)
            self._forget(after)
            self._has_begun = True
        elif not any(begin.startswith(text) for begin in self._tags.begins):
            self._has_begun, self._is_over = self._is_open, not self._is_open

    def _look_for_end(self) -> None:
        ends = (*self._tags.ends, *self._tags.calls)
        found = [self._text.find(end) for end in ends if end in self._text]
        self._is_over = bool(found)
        # behind this the closing tag may begin
        safe = min(found) if found else max(0, len(self._text) - max(map(len, ends)) + 1)
        self._counted += sum(begin < safe for begin in self._held)
        self._forget(safe)

    def _forget(self, size: int) -> None:
        """Leave out the first characters, and tokens that begin in them."""
        self._text = self._text[size:]
        self._held = [begin - size for begin in self._held if begin >= size]
