"""DeepSeek-R1 and models made from it: an answer begins with thoughts, said to or not."""

from __future__ import annotations

from server.reasoning.tags import ReasoningParser


class DeepSeekR1Parser(ReasoningParser):
    """Everything is thought up to `</think>`."""

    begin, end = "<think>", "</think>"
    starts_open = True
