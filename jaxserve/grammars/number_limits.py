"""Limits of numbers, so that llguidance rounds none outwards.

llguidance has them as 64-bit floats. Of an integer it adds 1 to an exclusive one, in floats; of
other numbers it takes the shortest text of the float, which may lie beyond it.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from jaxserve.grammars.unsupported_keywords import SchemaError

LARGEST = 2**63 - 1024  # llguidance counts with floats and with 64-bit integers: both have it
EXACT = 2**53  # below, floats have each integer
_ALONE = 10**18  # from here on llguidance has no expression for what a single limit leaves
_KEYWORDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))


def lower_limits(schema: dict[str, Any], at: str) -> None:
    """Make large limits inclusive ones that are held, in place.

    Args:
        schema: one that may have limits.
        at: its place, as a JSON pointer.

    Raises:
        SchemaError: a limit is held by no range of llguidance's.
    """
    types = schema.get("type", "number")
    is_whole = "number" not in (types if isinstance(types, list) else [types])
    for inclusive, exclusive, towards in _KEYWORDS:
        if schema.get(exclusive) is True and _is_number(schema.get(inclusive)):  # of draft 4
            schema[exclusive] = schema.pop(inclusive)
        for keyword in (inclusive, exclusive):
            value: Any = schema.get(keyword)
            if not _is_number(value) or abs(value) < EXACT:
                continue
            limit = int(value) + (towards if keyword == exclusive else 0)
            if limit * towards > LARGEST:
                raise SchemaError.of("a limit from -2^63 to 2^63", value, f"{at}/{keyword}")
            del schema[keyword]
            near = _narrowed(limit, towards, is_whole)
            there = schema.setdefault(inclusive, near)
            if _is_number(there) and there * towards < near * towards:
                schema[inclusive] = near
            if near * towards >= _ALONE and not _has_other(schema, towards):
                allowed = "a limit on the other side too, or one below 10^18"
                raise SchemaError.of(allowed, value, f"{at}/{keyword}")


def is_exact(value: int) -> bool:
    """Whether llguidance has this integer."""
    return abs(value) <= LARGEST and int(float(value)) == value


def _narrowed(limit: int, towards: int, is_whole: bool) -> int:
    """The next float that is not beyond a limit, and whose shortest text is not.

    Args:
        limit: an inclusive one.
        towards: the sign of the direction in which values are allowed.
        is_whole: values are integers, of which llguidance does not write the text.
    """
    near = float(max(limit * towards, -LARGEST) * towards)
    while int(near) * towards < limit * towards or (
        not is_whole and Decimal(repr(near)) * towards < limit * towards
    ):
        near = math.nextafter(near, towards * math.inf)
    return int(near)


def _has_other(schema: dict[str, Any], towards: int) -> bool:
    return any(
        _is_number(schema.get(keyword))
        for *keywords, direction in _KEYWORDS
        if direction != towards
        for keyword in keywords
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
