"""The parts of a prompt that take the places of token ids, and their spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxserve.boundary.image_facts import checked_pixels, image_places, size_of
from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.boundary.prompt_embeds import checked_embeds
from jaxserve.errors import ValidationError

NO_ID = -1  # the token id of a place that a span takes


class PromptSpan(NamedTuple):
    """An array that takes neighbouring places of a prompt.

    Attributes:
        part: the name of its part of the prompt, see `PARTS`.
        start, length: its first place, and their number.
        shape: the array's shape.
        data: the array, little-endian.
        detail: what else its part says of it.
    """

    part: str
    start: int
    length: int
    shape: tuple[int, ...]
    data: bytes
    detail: tuple[int, ...] = ()


class Part(NamedTuple):
    """A kind of data that may take the places of token ids; a feature of its name reads the spans.

    Attributes:
        setting: field of `EngineConfig` that must be on.
        read: turns a caller's value for one span into the array sent; raises ValidationError.
        places: number of places that such an array with its detail takes.
        detail: what a caller's value says beside the array, see `PromptSpan`.
    """

    setting: str
    read: Callable[[Any, ModelFacts], np.ndarray]
    places: Callable[[np.ndarray, tuple[int, ...], ModelFacts], int] = lambda array, *_: len(array)
    detail: Callable[[Any], tuple[int, ...]] = lambda given: ()


IMAGES = "images"
# key of a caller's mapping -> part
PARTS: dict[str, Part] = {
    "prompt_embeds": Part("enable_prompt_embeds", checked_embeds),
    IMAGES: Part("limit_mm_per_prompt", checked_pixels, image_places, size_of),
}


def span_of(part: str, start: int, given: Any, model: ModelFacts) -> PromptSpan:
    """The span that begins at `start`, from a caller's value.

    Raises:
        ValidationError: the part does not take that value.
    """
    kind = PARTS[part]
    array, detail = kind.read(given, model), kind.detail(given)
    places = kind.places(array, detail, model)
    return PromptSpan(part, start, places, array.shape, array.tobytes(), detail)


def take_places(
    parts: Mapping[str, list[Any]], tokens: list[int], model: ModelFacts
) -> list[PromptSpan]:
    """The spans that a caller gives beside token ids, in the order of their places.

    Args:
        parts: name -> pairs (start, value for the places from there on).
        tokens: of the whole prompt; changed in place: the spans' places become NO_ID.
        model: has the hidden size that arrays must have.

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
            allowed = f"places of the {len(tokens)} tokens that no other span has, one or more"
            raise ValidationError(name, f"{span.length} places from {span.start} on", allowed)
        tokens[span.start : end] = [NO_ID] * span.length
        spans.append(span)
    return sorted(spans, key=lambda span: span.start)
