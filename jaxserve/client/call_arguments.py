"""Arguments of a call on several prompts: one value for all, or a list with one a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxserve.client.prompt_reader import Prompt
from jaxserve.errors import ValidationError

Kind = TypeVar("Kind")


def list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a call that takes one or several; token ids are one prompt."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items: list[Any] = list(prompts)
    one_prompt = bool(items) and all(isinstance(item, int) for item in items)
    return [items] if one_prompt else items


def one_a_prompt(field: str, given: Any, kind: type[Kind], count: int) -> list[Kind]:
    """A value for each prompt.

    Args:
        field: the argument's name.
        given: one value or a sequence of them.
        kind: of a value.
        count: prompts.

    Raises:
        ValidationError: another kind, or another number of values than of prompts.
    """
    if isinstance(given, kind):
        return [given] * count
    what = "integer" if kind is int else kind.__name__
    allowed = f"one {what}, or a list with one a prompt ({count})"
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        raise ValidationError(field, given, allowed)
    if len(given) != count:
        raise ValidationError(field, f"{len(given)} items", allowed)
    return list(given)
