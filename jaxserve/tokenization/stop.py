"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopChecker:
    """Finds the first stop string to be complete and sends no part of it before.

    Of stop strings that end at the same character the longest counts. Each string is followed by
    a Knuth-Morris-Pratt automaton, so a character costs constant time and the result does not
    depend on how the text was split.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False):
        self._stop = sorted(stop, key=len, reverse=True)
        self._include = include_stop_str_in_output
        self._borders = [_borders(text) for text in self._stop]
        self._matched = [0] * len(self._stop)
        self._first_letters = {text[0] for text in self._stop}
        self._held = ""

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Returns:
            Text that can be sent, and the stop string that was completed, or None. With a stop
            string the text is cut before it, or behind it if it is to be included, and the rest
            of the piece is dropped.
        """
        if not self._held and not any(self._matched) and self._first_letters.isdisjoint(delta):
            return delta, None
        text = self._held + delta
        for end in range(len(self._held) + 1, len(text) + 1):
            found = self._step(text[end - 1])
            if found is not None:
                self._held = ""
                return text[: end if self._include else end - len(found)], found
        # With the stop string included, its beginning is wanted text and need not wait.
        waiting = 0 if self._include else max(self._matched, default=0)
        self._held = text[len(text) - waiting :]
        return text[: len(text) - waiting], None

    def finish(self) -> str:
        """The text held back, when generation ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _step(self, letter: str) -> str | None:
        """Advances every automaton by one character; the longest stop string complete here."""
        found = None
        for index, text in enumerate(self._stop):
            length, borders = self._matched[index], self._borders[index]
            while length and text[length] != letter:
                length = borders[length - 1]
            if text[length] == letter:
                length += 1
            if length == len(text):
                found = found or text
                length = borders[length - 1]
            self._matched[index] = length
        return found


@lru_cache(maxsize=1024)
def _borders(text: str) -> tuple[int, ...]:
    """For each prefix of text: length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return tuple(borders)
