"""Schemas in llguidance's words: what is refused, by keyword and place, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from benchmarks.constrained.suite import allows, compiled
from jaxserve.grammars.grammar_text import grammar_text
from jaxserve.grammars.notation import in_notation
from jaxserve.grammars.schemas import lowered
from jaxserve.grammars.unsupported_keywords import SchemaError
from jaxserve.params.structured_outputs_params import StructuredOutputsParams

DEFS = {"a/b~": {"items": {"uniqueItems": True}}, "unused": {"not": {}}}

SILENT: list[dict[str, Any]] = [
    {"not": False},
    {"unevaluatedItems": True, "unevaluatedProperties": {"title": "any"}},
    {"dependentRequired": {}, "dependentSchemas": {"a": True}, "dependencies": {"a": []}},
    {"if": {"type": "null"}},
    {"if": {"type": "null"}, "then": True, "else": {}},
    {"then": False, "else": False},
    {"minContains": 2, "maxContains": 1},
    {"$recursiveAnchor": True},
]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "'uniqueItems', .* '#/properties/a/uniqueI"),
        ({"$ref": "#/$defs/a~1b~0", "$defs": DEFS}, r"'#/\$defs/a~1b~0/items/uniqueItems'"),
        ({"$ref": "#/$defs/a%7E1b%7E0", "$defs": DEFS}, "items/uniqueItems"),
        ({"items": [{}, {"anyOf": [{"not": {}}]}]}, "'#/items/1/anyOf/0/not'"),
        ({"dependentRequired": {"a": ["b"]}}, "'#/dependentRequired'"),
        ({"if": {}, "then": True, "else": False}, "'#/if'"),
        ({"contains": {}, "minContains": 0}, "'#/contains'"),
        ({"$dynamicAnchor": "a", "items": {"$dynamicRef": "#a"}}, "dynamicAnchor"),
        ({"propertyNames": {"minLength": 1}}, "'properties' or 'patternProperties' can name"),
        ({"$ref": "#a", "$defs": {"b": {"$anchor": "a", "not": {}}}}, r"'#/\$defs/b/not'"),
        ({"pattern": "(?=.*[0-9])a"}, r"without look-around.*look-ahead '\(\?='.*'#/pattern'"),
        ({"pattern": "(?<!a)b"}, "look-behind"),
        ({"pattern": r"\bword"}, "word boundary"),
        ({"pattern": r"(a)\1"}, "back-reference"),
        ({"pattern": "^(?!^[+]*$)a|b"}, "look-ahead"),
        ({"patternProperties": {"^(?!a)": {}}}, "look-ahead .*'#/patternProperties'"),
        ({"enum": [[{"a": 2**53 + 1}]]}, "9007199254740993 is at '#/enum'"),
        ({"const": 2**64}, "below 2"),
        ({"const": "a\u0001"}, "control characters"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' .*'#/oneOf'"),
    ],
    ids=str,
)
def test_what_no_grammar_carries_is_refused_by_keyword_and_place(
    schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(SchemaError, match=words):
        lowered(schema)


def test_what_says_nothing_and_what_is_not_referred_to_is_no_reason() -> None:
    schema: dict[str, Any] = {"uniqueItems": False, "propertyNames": {"type": "string"}}
    assert lowered({**schema, "$defs": DEFS}) == ({"$defs": DEFS}, "")
    for silent in SILENT:
        assert lowered(dict(silent)) == ({}, ""), silent
        matcher = compiled(json={"type": "array", **silent})
        assert allows(matcher, "[1]") and not allows(matcher, "1")
    anchored = {"$dynamicAnchor": "a", "type": "null"}
    matcher = compiled(json={"anyOf": [anchored, {"type": "array", "items": {"$ref": "#a"}}]})
    assert allows(matcher, "[null]") and not allows(matcher, "[1]")
    assert allows(compiled(json={"type": "array", **schema}), "[1,1]")
    names = {"properties": {"not": {}, "$ref": {}, "$id": {"type": "null"}}}
    assert allows(compiled(json=names), '{"not":1,"$ref":2,"$id":null}')
    assert r"look" not in str(lowered({"pattern": r"\(?=[(?=]\\b"}))


def test_unknown_formats_are_annotations_of_texts() -> None:
    schema = {
        "properties": {
            "a": {"type": ["string", "null"], "format": "colour\n"},
            "b": {"type": "integer", "format": "int64"},
        }
    }
    matcher = compiled(json=schema)
    assert allows(matcher, '{"a":"any","b":1}') and not allows(matcher, '{"a":1}')
    _, note = lowered(schema)
    assert note == r"any text passes for format 'colour\n' at '#/properties/a'"
    _, note = lowered({"items": [{"format": f"x{n}"} for n in range(7)]})
    assert note.endswith(" and 2 more")


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date", "2000-02-29", "1900-02-29"),
        ("date", "2023-04-30", "2023-04-31"),
        ("date-time", "2024-02-29T23:59:59.5+01:00", "2023-02-29T00:00:00Z"),
        ("date-time", "1998-12-31t23:59:59z", "1998-12-31T22:59:60Z"),
        ("time", "23:59:59-23:59", "23:59:60Z"),
        ("hostname", "a.b-c.example", "xn--a"),
        ("hostname", "a" * 63 + ".b", "a" * 64),
        ("hostname", ".".join(["abcdefg"] * 31), ".".join(["abcdefg"] * 32)),
        ("uuid7", "01890a5d-ac96-774b-bcce-b302099a8057", "01890a5d-ac96-474b-bcce-b302099a8057"),
        ("ipv4interface", "10.0.0.1", "10.0.0.1/"),
        ("ipv6network", "1:2::7:8/127", "1::2::3"),
        ("ipvanynetwork", "::/0", "10.0.0.0/129"),
        ("json-pointer", "/a~1b/", "/a~2"),
        ("relative-json-pointer", "1/a", "-1/a"),
        ("base64", "YWI=", "YW="),
    ],
)
def test_formats_are_held(format: str, right: str, wrong: str) -> None:
    matcher = compiled(json={"format": format, "pattern": "^.*$"})
    assert allows(matcher, json.dumps(right)) and not allows(matcher, json.dumps(wrong))


def test_the_look_ahead_of_a_decimal_is_said_without() -> None:
    matcher = compiled(json={"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"})
    assert all(allows(matcher, f'"{text}"') for text in ("19.99", "-.5", "+007", "3."))
    assert not any(allows(matcher, f'"{text}"') for text in ("", ".", "-", "+.", "1.2.3", "a"))


def test_siblings_of_a_reference_mean_nothing_up_to_draft_7() -> None:
    beside = {"$ref": "#/definitions/a", "uniqueItems": True, "maxLength": 1, "type": "null"}
    schema = {"properties": {"x": beside}, "definitions": {"a": {"type": "string"}}}
    matcher = compiled(json={"$schema": "http://json-schema.org/draft-07/schema#", **schema})
    assert allows(matcher, '{"x":"long"}') and not allows(matcher, '{"x":null}')
    root = {"$schema": "http://json-schema.org/draft-04/schema#", "$ref": "#/definitions/a"}
    assert allows(compiled(json={**root, "definitions": schema["definitions"]}), '"a"')
    with pytest.raises(SchemaError, match="'#/properties/x/uniqueItems'"):
        compiled(json=schema)


@pytest.mark.parametrize("name", ["a", "a/b~ %é"])
def test_references_into_alternatives_lead_there(name: str) -> None:
    options = [{"type": "string"}, {"type": "integer"}]
    escaped = quote(name.replace("~", "~0").replace("/", "~1"))
    for beside in ({}, {"anyOf": [True]}, {"anyOf": [True], "allOf": [True]}):
        properties = {name: {"oneOf": options, **beside}, "x": {}}
        properties["x"] = {"$ref": f"#/properties/{escaped}/oneOf/1"}
        for ordered in (properties, dict(reversed(properties.items()))):
            matcher = compiled(json={"properties": ordered, "required": ["x"]})
            assert allows(matcher, '{"x":1}') and not allows(matcher, '{"x":"a"}')
    arrays = {"type": "array", "items": {"$ref": "#/oneOf/0"}}
    matcher = compiled(json={"oneOf": [{"type": "string"}, arrays]})
    assert allows(matcher, '["a"]') and not allows(matcher, "[[]]")


def test_names_are_written_in_one_way() -> None:
    r"""`"\u0061"` is `"a"`: what is not in `properties` by its spelling would have any value."""
    matcher = compiled(json={"properties": {"a": {"type": "integer"}}})
    assert allows(matcher, '{"a":1}') and allows(matcher, r'{"é\n\"":"x"}')
    assert not allows(matcher, r'{"\u0061":"x"}') and not allows(matcher, '{"a":1,"a":"x"}')


def test_options_of_llguidance_are_not_the_clients() -> None:
    asked = StructuredOutputsParams(json={"x-guidance": {"lenient": True}})
    text, _ = in_notation(grammar_text(asked))
    assert json.loads(text)["grammars"][0]["json_schema"]["x-guidance"]["lenient"] is False


def test_schemas_of_tags_are_lowered_too() -> None:
    def tag(schema: dict[str, Any]) -> dict[str, Any]:
        return {"structures": [{"begin": "<d>", "schema": schema}], "triggers": ["<d"]}

    matcher = compiled(structural_tag=tag({"format": "date"}))
    assert allows(matcher, 'on <d>"2024-02-29" it') and not allows(matcher, '<d>"2023-02-29"')
    with pytest.raises(SchemaError, match="'#/uniqueItems'"):
        compiled(structural_tag=tag({"uniqueItems": True}))
