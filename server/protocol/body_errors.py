"""Errors in the words of the request's body."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from jaxserve.errors import ValidationError


@contextlib.contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """Errors of this block name the field that `name` makes of theirs."""
    try:
        yield
    except ValidationError as error:
        field = name(error.field)
        if field == error.field:
            raise
        raise ValidationError(field, error.value, error.allowed) from error


def named(fields: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Errors of this block name the body's own fields, where those of parameters differ."""

    def name(field: str) -> str:
        first, dot, rest = field.partition(".")
        return fields.get(field) or fields.get(first, first) + dot + rest

    return renamed(name)
