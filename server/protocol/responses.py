"""Response bodies as plain dicts: built once per request or per chunk, so no model validation."""

from __future__ import annotations

import json
from typing import Any

import jaxserve

# Compact JSON; ensure_ascii=False keeps every character as itself in UTF-8.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

FINGERPRINT = f"jaxserve-{jaxserve.__version__}"


def dumps(value: Any) -> str:
    """Compact JSON text with every character as itself."""
    return _ENCODER.encode(value)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object: counts in tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


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


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxserve",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
    }


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
    ) -> bytes:
        """One event `data: {json}` with a blank line after it."""
        tail = "" if usage is None else f',"usage":{dumps(usage)}'
        if fingerprint:
            tail += f',"system_fingerprint":{dumps(FINGERPRINT)}'
        return f'{self._head}"choices":{dumps(choices)}{tail}}}\n\n'.encode()

    @staticmethod
    def error(body: dict[str, Any]) -> bytes:
        """An error event in the middle of a stream."""
        return f"data: {dumps(body)}\n\n".encode()
