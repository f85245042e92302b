"""`oneOf` is `anyOf` where its alternatives exclude one another, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.constrained.suite import allows, compiled
from jaxserve.grammars.schemas import lowered
from jaxserve.grammars.unsupported_keywords import SchemaError

A: dict[str, Any] = {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}
B: dict[str, Any] = {"properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]}
OBJECT_A, OBJECT_B = {**A, "type": "object"}, {**B, "type": "object"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"any": {}}}
LONE = [{"$ref": "#/definitions/any", "type": kind} for kind in ("null", "string")]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}, {"const": True}]},
        {"oneOf": [{"const": 1}, {"enum": [2, "1", None]}, {"const": True}]},
        {"oneOf": [OBJECT_A, OBJECT_B, {"type": "null"}]},
        {"type": "object", "oneOf": [A, B]},
        {"$defs": {"a": OBJECT_A, "b": OBJECT_B}, "oneOf": [{"$ref": "#/$defs/a"}, OBJECT_B]},
        {"oneOf": [{"oneOf": [OBJECT_A, OBJECT_B]}, {"type": "array"}, False]},
        {"oneOf": [{"allOf": [{"type": "object"}, A]}, {"anyOf": [OBJECT_B, {"type": "string"}]}]},
        {"oneOf": [OBJECT_A, {"type": "object", "additionalProperties": False}]},
        {"oneOf": [{"uniqueItems": False}]},
        {**DRAFT_7, "oneOf": [{"type": "null"}, {"type": "string"}]},
    ],
    ids=str,
)
def test_alternatives_that_are_told_apart_are_taken(schema: dict[str, Any]) -> None:
    compiled(json=schema)
    assert "oneOf" not in lowered(schema)[0]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [A, B]},  # of which a number is both
        {"oneOf": [OBJECT_A, {**OBJECT_B, "required": []}, OBJECT_A]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [{"const": [1, {"a": 2}]}, {"const": [1.0, {"a": 2.0}]}]},
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 5}]},
        {"oneOf": [{}, {"type": "null"}]},
        {"oneOf": [{"$ref": "#"}, {"type": "null"}]},
        {"oneOf": [{"$ref": "#/nowhere"}, {"type": "null"}]},
        {"oneOf": [{"$ref": "#a", "$anchor": "a"}, {"type": "null"}]},
        {**DRAFT_7, "oneOf": LONE},
    ],
    ids=str,
)
def test_others_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="alternatives of 'oneOf' that types, constants"):
        lowered(schema)


def test_what_stands_beside_it_stays() -> None:
    named = {"properties": {"a": {}}, "oneOf": [{"type": "object"}], "required": ["a"]}
    assert list(lowered(dict(named))[0]) == ["properties", "anyOf", "required"]
    both = {"anyOf": [{"type": "object"}, {"type": "null"}], "oneOf": [{"type": "object"}]}
    matcher = compiled(json=both)
    assert allows(matcher, "{}") and not allows(matcher, "null")


def test_the_property_of_a_discriminator_is_always_written() -> None:
    """Pydantic leaves it out of `required` where it has a default, and refuses what lacks it."""
    definitions = {
        name: {"type": "object", "properties": {"kind": {"const": name}, "x": {"type": "integer"}}}
        for name in ("a", "b", "c")
    }
    refs = [{"$ref": f"#/$defs/{name}"} for name in definitions]
    inner = {"oneOf": refs[:2], "discriminator": {"propertyName": "kind"}}
    schema = {"oneOf": [inner, refs[2]], "discriminator": {"propertyName": "kind"}}
    matcher = compiled(json={**schema, "$defs": definitions})
    assert all(allows(matcher, f'{{"kind":"{name}","x":1}}') for name in definitions)
    assert not allows(matcher, "{}") and not allows(matcher, '{"x":1}')
    del schema["discriminator"]
    with pytest.raises(SchemaError, match="oneOf"):
        compiled(json={**schema, "$defs": {**definitions, "c": {"type": "object"}}})


def test_long_lists_of_tagged_objects_are_told_apart_at_once() -> None:
    branches = [
        {"type": "object", "properties": {"kind": {"const": f"k{n}"}}, "required": ["kind"]}
        for n in range(2000)
    ]
    schema, _ = lowered({"oneOf": branches})
    assert len(schema["anyOf"]) == 2000
