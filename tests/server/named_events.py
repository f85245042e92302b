"""Parsing of server-sent events that have names."""

from __future__ import annotations

import json
from typing import Any


def named_events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event, whose data repeats the name as its type."""
    pieces = body.decode("utf-8").split("\n\n")
    assert pieces.pop() == "", "a stream ends with a blank line"
    found = []
    for piece in pieces:
        if piece.startswith(":"):
            continue
        first, second = piece.split("\n")
        name, data = first.removeprefix("event: "), json.loads(second.removeprefix("data: "))
        assert data["type"] == name
        found.append((name, data))
    return found
