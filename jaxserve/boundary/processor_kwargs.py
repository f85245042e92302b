"""vLLM's `mm_processor_kwargs`: how images become pixels, in place of the model's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.config.settings import Integer, Number, Rule, Switch
from jaxserve.errors import ValidationError

FIELD: Final = "mm_processor_kwargs"
VALUES: dict[str, Rule] = {
    "do_rescale": Switch(),
    "rescale_factor": Number(above=0.0),
    "do_normalize": Switch(),
    "resample": Integer(0, 5),  # a filter of Pillow's
}
# of models that read images in sizes of their own: the edge of `size` that each is
BOUNDS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
SIZE = "size"
OFF = "do_pan_and_scan"  # an image is one
OF_VIDEOS = "fps"


def processor_kwargs(given: Any, facts: ImageFacts | None) -> dict[str, Any]:
    """What an image processor is called with, by transformers' names.

    Args:
        given: values by vLLM's names; None: none.
        facts: how the model reads images; None: it does not.

    Returns:
        The values. `min_pixels` and `max_pixels` are edges of `size`, in pixels.

    Raises:
        ValidationError: another name, or a value that the processor does not take.
    """
    if given is None or given == {}:
        return {}
    if facts is None:
        raise ValidationError(FIELD, given, "none: this model reads no images")
    is_free = bool(facts.free_axes) and facts.tiling is None
    names = [*VALUES, *((*BOUNDS, SIZE) if is_free else ())]
    allowed = f"a mapping of {', '.join(names)}"
    if not isinstance(given, Mapping):
        raise ValidationError(FIELD, given, allowed)
    found: dict[str, Any] = {}
    size: dict[str, int] = {}
    for name, value in given.items():
        field = f"{FIELD}.{name}"
        if value is None or name == OF_VIDEOS or (name == OFF and value is False):
            continue
        if name == SIZE and is_free:
            size |= _edges(value, field)
        elif name in BOUNDS and is_free:
            size[BOUNDS[name]] = Integer(1).checked(field, value)
        elif name in VALUES:
            found[name] = VALUES[name].checked(field, value)
        else:
            raise ValidationError(field, value, f"this model's {FIELD} are {allowed}")
    return found | ({SIZE: size} if size else {})


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `processor_kwargs`, where the second ones go before the first."""
    size = {**first.get(SIZE, {}), **second.get(SIZE, {})}
    return {**first, **second, **({SIZE: size} if size else {})}


def with_kwargs(prompt: Any, given: Mapping[str, Any] | None) -> Any:
    """A prompt with those of its call, which its own go before; without images it needs none.

    Raises:
        ValidationError: either is no mapping.
    """
    own = prompt.get(FIELD) if isinstance(prompt, Mapping) else None
    for one in (given, own):
        if one is not None and not isinstance(one, Mapping):
            raise ValidationError(FIELD, one, "None, or a mapping of how images become pixels")
    if not given or not isinstance(prompt, Mapping):
        return prompt
    return {**prompt, FIELD: {**given, **(own or {})}}


def _edges(value: Any, field: str) -> dict[str, int]:
    edges = tuple(BOUNDS.values())
    if not isinstance(value, Mapping) or not value or not value.keys() <= {*edges}:
        raise ValidationError(field, value, f"numbers of pixels by the names {', '.join(edges)}")
    return {name: Integer(1).checked(f"{field}.{name}", value[name]) for name in value}
