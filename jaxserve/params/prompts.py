"""Prompts as mappings, by vLLM's names."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text. `multi_modal_data` is `{"image": ...}`, one image or a list, each a PIL
    image or an array uint8[H, W, 3], for the places of the model's image token, in their order.
    `mm_processor_kwargs` says how they become pixels, where the engine's setting of that name does
    not. `cache_salt` keeps what it computes from prompts with another salt."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as input embeddings: a floating array of NumPy, JAX or torch [tokens, hidden size].

    Beside token ids: pairs (start, array) whose rows take the places of some of them. It needs
    `enable_prompt_embeds`.
    """

    prompt_embeds: Any
    prompt_token_ids: NotRequired[list[int]]
    cache_salt: NotRequired[str]
