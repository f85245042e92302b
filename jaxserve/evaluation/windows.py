"""Windows over a long text, each of whose tokens is scored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.errors import ValidationError


class Window(NamedTuple):
    """Tokens that a model reads at once.

    Attributes:
        tokens: ids.
        first: index of the first that is scored; those before it are context.
    """

    tokens: list[int]
    first: int


def sliding_windows(tokens: Sequence[int], length: int, stride: int) -> list[Window]:
    """Windows of `length` tokens that begin `stride` apart.

    Each scores what the windows before it have not; the very first token has nothing before it and
    is not scored. With `stride` = `length` they do not overlap, and the first token of each is not
    scored either.

    Raises:
        ValidationError: sizes that are not allowed, or fewer than two tokens.
    """
    if length < 2:
        raise ValidationError("window", length, "2 tokens or more")
    if not 1 <= stride <= length:
        raise ValidationError("stride", stride, f"1 to window={length}")
    if len(tokens) < 2:
        raise ValidationError("text", f"{len(tokens)} tokens", "a text of two tokens or more")
    windows, done = [], 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        first = max(done, begin + 1)
        if first < end:
            windows.append(Window(list(tokens[begin:end]), first - begin))
        done = end
        if end == len(tokens):
            break
    return windows
