"""Magistral: thoughts between `[THINK]` and `[/THINK]`."""

from __future__ import annotations

from server.reasoning.tags import ReasoningParser


class MistralReasoningParser(ReasoningParser):
    """An answer without tags is an answer."""

    begin, end = "[THINK]", "[/THINK]"
