"""Constraints are checked when they are made, and travel in llguidance's notation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve import SamplingParams, StructuredOutputsParams
from jaxserve.errors import ValidationError
from jaxserve.params.structured_outputs_params import (
    MAX_CHARACTERS,
    MAX_CHOICE_CHARACTERS,
    MAX_CHOICES,
    MAX_DEPTH,
)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"regexp": "a"}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[1]"}, "structured_outputs.json"),
        ({"json": '{"minimum": NaN}'}, "structured_outputs.json"),
        ({"json": {"minimum": float("inf")}}, "structured_outputs.json"),
        ({"json": "[" * 100_000}, "structured_outputs.json"),
        ({"json": nested(MAX_DEPTH)}, "structured_outputs.json"),
        ({"json": {"title": "x" * MAX_CHARACTERS}}, "structured_outputs.json"),
        ({"json": 5}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "a\0"}, "structured_outputs.regex"),
        ({"regex": "\ud800"}, "structured_outputs.regex"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "structured_outputs.regex"),
        ({"grammar": 3}, "structured_outputs.grammar"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice"),
        ({"choice": ["a" * MAX_CHOICE_CHARACTERS, "b"]}, "structured_outputs.choice"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"json_object": True, "whitespace_pattern": ""}, "structured_outputs.whitespace_pattern"),
        ({"json_object": True, "disable_any_whitespace": 1}, "structured_outputs.disable_any"),
    ],
)
def test_bad_constraints_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    assert caught.value.field.startswith(field)
    assert len(str(caught.value)) < 500


def test_a_mapping_is_taken_too() -> None:
    params = SamplingParams(structured_outputs={"regex": "a", "json": None})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    assert params.for_engine().structured_outputs is None
    deep = nested(MAX_DEPTH - 1)
    assert StructuredOutputsParams(json=json.dumps(deep)).json == json.dumps(deep)
