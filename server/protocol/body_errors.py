"""Errors in the words of the request's body."""

from __future__ import annotations

import contextlib
import re
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
        raise type(error)(field, error.value, error.allowed) from error


def by_patterns(names: Mapping[str, str]) -> Callable[[str], str]:
    """What renames a field as the first pattern that it matches says: pattern -> name."""
    patterns = [(re.compile(pattern), name) for pattern, name in names.items()]

    def name(field: str) -> str:
        found = (pattern.sub(new, field) for pattern, new in patterns if pattern.fullmatch(field))
        return next(found, field)

    return name


def named(fields: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Errors of this block name the body's own fields, where those of parameters differ."""

    def name(field: str) -> str:
        first, dot, rest = field.partition(".")
        return fields.get(field) or fields.get(first, first) + dot + rest

    return renamed(name)
