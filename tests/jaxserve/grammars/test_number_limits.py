"""Large limits of numbers: narrower than they are said, never wider."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from decimal import Decimal
from operator import ge, gt, le, lt
from typing import Any

import pytest

from benchmarks.constrained.suite import allows, compiled
from jaxserve.grammars.number_limits import LARGEST
from jaxserve.grammars.schemas import lowered
from jaxserve.grammars.unsupported_keywords import SchemaError

HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": ge,
    "exclusiveMinimum": gt,
    "maximum": le,
    "exclusiveMaximum": lt,
}
LIMITS = [2**53 - 1, 2**53, 2**53 + 1, 10**17, 2**60 - 1, 2**60, 2**62 + 1, LARGEST, 2**63 - 1]


@pytest.mark.parametrize("keyword", HOLDS)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_no_number_beyond_a_limit_passes(kind: str, keyword: str) -> None:
    inward = 1 if keyword.lower().endswith("minimum") else -1
    other = "maximum" if inward > 0 else "minimum"
    for size, sign in itertools.product(LIMITS, (1, -1)):
        limit = size * sign
        schema = {
            "type": kind,
            keyword: limit,
            **({other: inward * 2**65} if size > 10**18 else {}),
        }
        if size >= LARGEST and sign == inward:
            continue  # nothing may be left
        matcher = compiled(json=schema)
        shortest = int(Decimal(repr(float(limit))))
        near = [limit + step for step in (-600, -2, -1, 0, 1, 2, 600)]
        for value in (*near, shortest, shortest - 1, shortest + 1, int(float(limit))):
            assert HOLDS[keyword](value, limit) or not allows(matcher, str(value)), (schema, value)
        assert allows(matcher, str(limit + 4096 * inward)), schema


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"minimum": 2**60, "exclusiveMinimum": True, "maximum": 2**61}, 2**60 + 999, 2**60),
        ({"minimum": 3, "exclusiveMinimum": -(2**60)}, 3, 2),
        ({"minimum": -(2**62), "exclusiveMinimum": -(2**60)}, -(2**60) + 999, -(2**60)),
        ({"allOf": [{"exclusiveMinimum": 2**53}]}, 2**53 + 999, 2**53),
        ({"minimum": -1e300, "maximum": 10**400}, LARGEST, 10**20),
    ],
    ids=str,
)
def test_limits_beside_others(schema: dict[str, Any], right: int, wrong: int) -> None:
    matcher = compiled(json={"type": "integer", **schema})
    assert allows(matcher, str(right)) and not allows(matcher, str(wrong))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"minimum": 2**63}, "a limit from -2.*9223372036854775808 is at '#/minimum'"),
        ({"items": {"maximum": -1e300}}, "'#/items/maximum'"),
        ({"type": "number", "minimum": 2**62}, "the other side too.*'#/minimum'"),
        ({"type": "integer", "exclusiveMaximum": -(10**18)}, "below 10.*'#/exclusiveMaximum'"),
    ],
    ids=str,
)
def test_limits_that_no_range_holds_are_refused_by_place(
    schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(SchemaError, match=words):
        lowered(schema)
