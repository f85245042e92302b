"""Reads a text in pieces, into content, thoughts and calls."""

from __future__ import annotations

from typing import NamedTuple

from server.tools.deltas import CallArguments, CallBegin, Content, Reasoning
from server.tools.reader import Reader


class Read(NamedTuple):
    """Content, thoughts, and calls as (name, arguments)."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def read(reader: Reader, *pieces: str) -> Read:
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1, "calls come one after the other"
                calls[index] = (calls[index][0], calls[index][1] + text)
    return Read(content, reasoning, calls)
