"""Control tokens in users' text: kept apart from those that a chat template writes.

Users' strings are marked before the template is rendered, so that a `<|end|>` of theirs is encoded
as text and only the template's is a token (CVE-2026-44222). The scheme is that of transformers'
`sanitize_control_tokens`, which changes a shared tokenizer and so cannot be used by threads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

# private-use characters, dropped where a user's text has them
START, END = "\ue0f0", "\ue0f1"
_MARKS = re.compile(f"[{START}{END}]")

Encode = Callable[[str], list[int]]


class ControlTokens:
    """Marks control tokens in strings, and encodes what was rendered from those.

    Args:
        tokens: text -> id of those that are control tokens.
        encode: ids of a text in which control tokens are tokens, without any added before it.
    """

    def __init__(self, tokens: dict[str, int], encode: Encode):
        self._ids = tokens
        self._encode = encode
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._marked = re.compile(f"{START}({self._pattern.pattern}){END}|[{START}{END}]")
        self._newline = encode("\n")
        self._spelled = functools.cache(self._spell)

    def mark(self, value: Any) -> Any:
        """A string, or lists and dicts of them, with control tokens between marks."""
        if isinstance(value, str):
            return self._pattern.sub(f"{START}\\g<0>{END}", _MARKS.sub("", value))
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text; what is marked becomes text."""
        # [text, marked token, text, ...], None for a mark that lost its other half
        pieces = self._marked.split(text)
        ids = self._encode(pieces[0])
        for index, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self._spelled(piece) if index % 2 else self._behind_others(piece)
        return ids

    def _spell(self, token: str) -> list[int]:
        """Ids that spell a control token: of its parts, among which it is not."""
        for parts in ([token[:1], token[1:]], list(token)):
            ids = [one for part in parts if part for one in self._behind_others(part)]
            if set(ids).isdisjoint(self._ids.values()):
                return ids
        return []  # a control token of one character: there is no other way to spell it

    def _behind_others(self, text: str) -> list[int]:
        """Ids without the space that some tokenizers put before a text: behind a newline."""
        ids = self._encode(f"\n{text}")
        if ids[: len(self._newline)] == self._newline:
            return ids[len(self._newline) :]
        return self._encode(text)


def unmarked(text: str) -> str:
    """A rendered text without marks."""
    return _MARKS.sub("", text)
