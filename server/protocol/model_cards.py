"""What `/v1/models` tells of a model, in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

ANTHROPIC_HEADER = "anthropic-version"  # Anthropic's clients send it with every request


def openai_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """A model as OpenAI's API has it, with vLLM's `max_model_len`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxserve",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
    }


def anthropic_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """A model as Anthropic's API has it; prompt and answer share the context."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def anthropic_page(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """The list of all models, as one page."""
    return {
        "data": cards,
        "has_more": False,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
    }


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a request came from one of Anthropic's clients."""
    return ANTHROPIC_HEADER in headers
