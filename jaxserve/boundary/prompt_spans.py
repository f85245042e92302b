"""What takes the places of token ids in a prompt: the parts there are, and their spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.boundary.prompt_embeds import checked_embeds
from jaxserve.errors import ValidationError

NO_ID = -1  # of a place of the prompt that a span takes


class PromptSpan(NamedTuple):
    """What takes neighbouring places of a prompt.

    Attributes:
        part: the name of its part of the prompt, see `PARTS`.
        start, length: which places.
        shape: of the array.
        data: the array, little-endian.
    """

    part: str
    start: int
    length: int
    shape: tuple[int, ...]
    data: bytes


class Part(NamedTuple):
    """What may take the places of token ids; the feature of the same name reads the spans.

    Attributes:
        setting: of `EngineConfig`: engines that take it have it on.
        read: an array, as it travels, of what a caller gives for one span; raises ValidationError.
        places: how many places such an array takes.
    """

    setting: str
    read: Callable[[Any, ModelFacts], np.ndarray]
    places: Callable[[np.ndarray], int] = len


# by the name that a caller's mapping has for it
PARTS: dict[str, Part] = {"prompt_embeds": Part("enable_prompt_embeds", checked_embeds)}


def span_of(part: str, start: int, given: Any, model: ModelFacts) -> PromptSpan:
    """The span that begins at `start`, of what a caller gives.

    Raises:
        ValidationError: the part cannot be that.
    """
    array = PARTS[part].read(given, model)
    return PromptSpan(part, start, PARTS[part].places(array), array.shape, array.tobytes())


def take_places(
    parts: Mapping[str, list[Any]], tokens: list[int], model: ModelFacts
) -> list[PromptSpan]:
    """The spans that a caller gives beside token ids, in the order of their places.

    Args:
        parts: by name, pairs (start, what takes the places from there on).
        tokens: of the whole prompt; those of the places become NO_ID.
        model: of the engine.

    Raises:
        ValidationError: anything else, or spans that overlap or reach beyond the prompt.
    """
    spans = []
    for name, pair in ((name, pair) for name, pairs in parts.items() for pair in pairs):
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], int | np.integer):
            allowed = "pairs (start, array) beside prompt_token_ids"
            raise ValidationError(name, f"a list of {type(pair).__name__}", allowed)
        span = span_of(name, int(pair[0]), pair[1], model)
        end = span.start + span.length
        if not 0 <= span.start < end <= len(tokens) or NO_ID in tokens[span.start : end]:
            allowed = f"one or more that no other span has, of {len(tokens)}"
            raise ValidationError(name, f"{span.length} places from {span.start} on", allowed)
        tokens[span.start : end] = [NO_ID] * span.length
        spans.append(span)
    return sorted(spans, key=lambda span: span.start)
