"""Prompts as bodies give them: text, token ids, or lists of either."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ValidationError

MAX_PROMPTS = 1024


def prompt_list(given: Any, field: str) -> list[str | list[int]]:
    """The prompts in order, each a text or a list of token ids.

    Raises:
        ValidationError: they are none or too many, one is empty, or of another type.
    """
    if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
        prompts = [given]
    elif isinstance(given, list):
        prompts = given
    else:
        raise _wrong(given, field)
    if not prompts:
        raise ValidationError(field, prompts, "at least one prompt")
    if len(prompts) > MAX_PROMPTS:
        raise ValidationError(
            field, f"{len(prompts)} prompts", f"at most {MAX_PROMPTS} prompts in one request"
        )
    all_text = all(isinstance(one, str) for one in prompts)
    if not all_text and not all(_is_token_ids(one) for one in prompts):
        raise _wrong(given, field)
    if not all(prompts):
        raise ValidationError(field, given, "a prompt that is not empty")
    return prompts


def _is_id(value: Any) -> bool:
    # type() and not isinstance(): True is an int to Python but no token id.
    return type(value) is int


def _is_token_ids(value: Any) -> bool:
    # set(map(type, ...)) runs in C: a body may hold millions of ids.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _wrong(given: Any, field: str) -> ValidationError:
    shown = given if isinstance(given, int | float | bool | None) else type(given).__name__
    return ValidationError(
        field, shown, "a string, a list of strings, a list of token ids or a list of such lists"
    )
