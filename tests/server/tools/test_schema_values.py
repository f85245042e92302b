"""Plain text as JSON of the types that a schema names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.tools.schema_values import json_of, types_of


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", "string", "5"),
        ("null", "string", "null"),
        ("5", "integer", 5),
        (" 5.0\n", "number", 5.0),
        ("True", "boolean", True),
        ("0", "boolean", False),
        ("0", "boolean integer", 0),
        ("NULL", "null string", None),
        ("5", "string integer", 5),
        ("[5]", "string integer", "[5]"),
        ('"x"', "string null", '"x"'),
        ('{"a": [1, null]}', "object", {"a": [1, None]}),
        # what is no JSON, and models write nevertheless
        ("007", "integer", 7),
        ("007", "string integer", 7),
        ("007", "string", "007"),
        (".5", "number", 0.5),
        ("+3", "number null", 3.0),
        ("{'a': [1, None, True]}", "object", {"a": [1, None, True]}),
        ("['x']", "array null", ["x"]),
        ("{'a'}", "object", "{'a'}"),
        ("__import__('os')", "object", "__import__('os')"),
        ("(" * 1000, "array", "(" * 1000),
        ("{'a': 1e999}", "object", "{'a': 1e999}"),
        # what is none of the types
        ("many", "integer", "many"),
        ("[1", "array", "[1"),
        ("[1]", "integer", [1]),
        # what no response could hold
        ("1e999", "number", "1e999"),
        ("[NaN]", "array", "[NaN]"),
        (r"['\ud83d']", "array", r"['\ud83d']"),
        ("9" * 5000, "integer", "9" * 5000),
        ("[" * 100_000, "array", "[" * 100_000),
        (r"['\ud83d\ude00']", "array", r"['\ud83d\ude00']"),
        ("[5]", "", [5]),
        ("five", "", "five"),
    ],
)
def test_a_value_of_types(text: str, types: str, expected: Any) -> None:
    found = json.loads(json_of(text, frozenset(types.split())))
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": ["str", "float", "dict"]}, {"string", "number", "object"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "number", "null"}),
        ({"oneOf": [{"type": "array"}, {"allOf": [{"type": "object"}]}]}, {"array", "object"}),
        ({"$ref": "#/$defs/A"}, {"boolean"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/none/there"}, set()),
        ({"$ref": "http://x"}, set()),
        ({"type": {"a": 1}, "enum": 3, "anyOf": "x"}, set()),
        ({}, set()),
        (None, set()),
    ],
)
def test_types_of_a_property(schema: Any, expected: set[str]) -> None:
    loop = {"$ref": "#/$defs/Loop"}
    definitions = {"A": {"type": "boolean"}, "Loop": {"anyOf": [loop, loop, loop]}}
    root = {"properties": {"p": schema}, "$defs": definitions}
    assert types_of(root, "p") == expected
    assert types_of(root, "q") == types_of({"properties": []}, "p") == frozenset()
