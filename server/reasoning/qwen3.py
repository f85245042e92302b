"""Qwen3: thoughts stand between tags, of which the template may have written the first."""

from __future__ import annotations

from server.reasoning.tags import ReasoningParser


class Qwen3Parser(ReasoningParser):
    """An answer without tags is an answer."""

    begin, end = "<think>", "</think>"
