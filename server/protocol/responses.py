"""Response bodies as plain dicts: built once per request or per chunk, so no model validation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import jaxserve
from jaxserve.outputs import RequestMetrics

# Compact JSON; ensure_ascii=False keeps every character as itself in UTF-8.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

PIECE = 256  # elements of a list that are encoded at a time

FINGERPRINT = f"jaxserve-{jaxserve.__version__}"


def dumps(value: Any) -> str:
    """Compact JSON text with every character as itself."""
    return _ENCODER.encode(value)


class RepeatedList(list[Any]):
    """A list that a response has several times: `dumped_in_pieces` encodes it once.

    Attributes:
        pieces: of its text, once it was asked for.
    """

    pieces: list[bytes] | None = None


class EncodedList(list[bytes]):
    """A list that is kept as its JSON, one or more of its elements a piece, without brackets."""

    def add(self, elements: list[Any]) -> bytes:
        """More elements, one at least; their piece."""
        piece = dumps(elements)[1:-1].encode()
        self.append(piece)
        return piece


def dumped_in_pieces(value: Any) -> Iterator[bytes]:
    """The text of `dumps` in UTF-8, by pieces: others get to run between them.

    The encoder lets go of the interpreter only when it is done; a response may have megabytes.
    """
    if isinstance(value, RepeatedList):
        if value.pieces is None:
            value.pieces = [*dumped_in_pieces([*value])]
        yield from value.pieces
    elif isinstance(value, EncodedList):
        for index, piece in enumerate(value):
            yield b"," if index else b"["
            yield piece
        yield b"]" if value else b"[]"
    elif isinstance(value, dict):
        for index, (key, item) in enumerate(value.items()):
            yield f"{',' if index else '{'}{dumps(key)}:".encode()
            yield from dumped_in_pieces(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > PIECE:
        for start in range(0, len(value), PIECE):
            yield b"," if start else b"["
            yield dumps(value[start : start + PIECE])[1:-1].encode()
        yield b"]"
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from dumped_in_pieces(item)
        yield b"]"
    else:
        yield dumps(value).encode()


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None,
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """The `usage` object: counts in tokens; None is not told."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    told: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
    }
    if reasoning_tokens is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return told


def timings(times: RequestMetrics | None, num_tokens: int) -> dict[str, float]:
    """The `metrics` object of a finished request, under vLLM's names, without what is not known.

    Args:
        times: of the request.
        num_tokens: that it generated.
    """
    if times is None:
        return {}
    scheduled, first = times.first_scheduled_time, times.first_token_time
    generation = _between(first, times.last_token_time)
    whole = _between(scheduled, times.last_token_time)
    one = None if generation is None or num_tokens < 2 else generation / (num_tokens - 1)
    found = {
        "time_to_first_token_ms": _between(times.arrival_time, first),
        "generation_time_ms": generation,
        "queue_time_ms": _between(times.arrival_time, scheduled),
        "mean_itl_ms": one,
        "tokens_per_second": 1000.0 * num_tokens / whole if whole else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _between(begin: float | None, end: float | None) -> float | None:
    """Milliseconds."""
    return None if begin is None or end is None else 1000.0 * (end - begin)


def response_body(
    response_id: str,
    kind: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """A whole response; `kind` is the `object` field."""
    return {
        "id": response_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": choices,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
    }


def finite(value: Any) -> Any:
    """Plain data with null for the numbers that JSON does not have: infinite ones and NaN."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list():
            return [finite(one) for one in value]
        case dict():
            return {key: finite(one) for key, one in value.items()}
        case _:
            return value


class ChunkWriter:
    """Server-sent events of one streamed response; the constant part is encoded once."""

    DONE = b"data: [DONE]\n\n"

    def __init__(self, response_id: str, kind: str, created: int, model: str) -> None:
        head = {"id": response_id, "object": kind, "created": created, "model": model}
        self._head = f"data: {dumps(head)[:-1]},"

    def chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        fingerprint: bool = False,
        metrics: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        """One event `data: {json}` with a blank line after it; `more` are its last fields."""
        tail = "" if usage is None else f',"usage":{dumps(usage)}'
        if fingerprint:
            tail += f',"system_fingerprint":{dumps(FINGERPRINT)}'
        if metrics is not None:
            tail += f',"metrics":{dumps(metrics)}'
        if more:
            tail += f",{dumps(more)[1:-1]}"
        return f'{self._head}"choices":{dumps(choices)}{tail}}}\n\n'.encode()
