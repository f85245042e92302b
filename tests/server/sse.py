"""Parsing of server-sent events, strict about the format."""

from __future__ import annotations

import json
from typing import Any


def events(body: bytes) -> list[dict[str, Any]]:
    """The JSON of each `data:` event; the stream must end with `[DONE]`."""
    pieces = body.decode("utf-8").split("\n\n")
    assert pieces[-1] == "", "a stream ends with a blank line"
    assert pieces[-2] == "data: [DONE]"
    parsed = []
    for piece in pieces[:-2]:
        assert piece.startswith("data: {") and "\n" not in piece, piece
        parsed.append(json.loads(piece.removeprefix("data: ")))
    return parsed


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream, of either endpoint."""
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text
