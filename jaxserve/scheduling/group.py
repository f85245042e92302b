"""The sequences of one prompt: it is computed once, and they share its pages."""

from __future__ import annotations

from collections import deque

from jaxserve.request import Request


class SequenceGroup:
    """Sequences with the same prompt, in the order in which they get their slots.

    The first one computes the prompt while the others stay `behind`. Then the group holds the full
    pages of the prompt, all but the one of its last token, until every sequence has its share: each
    computes what is left, at least the last token, and so gets a first token of its own.

    Attributes:
        behind: sequences that are not queued yet.
        front: the sequence that must go ahead before the next one is queued; None once there is
            nobody behind.
        pages: held for those behind.
    """

    def __init__(self) -> None:
        self.behind: deque[Request] = deque()
        self.front: Request | None = None
        self.pages: list[int] = []
