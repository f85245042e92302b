"""No text that the JSON-Schema-Test-Suite calls invalid passes: a recorded part of the suite."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.constrained import suite

# The groups of draft 2020-12 without references to other documents, of long ones some cases:
# commit 44401e0c0467 of github.com/json-schema-org/JSON-Schema-Test-Suite.
RECORDED = Path(__file__).parent / "json_schema_test_suite"
DOCS = Path(__file__).parents[3] / "docs" / "structured_outputs.md"


@pytest.mark.slow
def test_no_invalid_text_of_the_recorded_part_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main([str(RECORDED)]) == 0
    printed = capsys.readouterr().out
    (total,) = re.findall(r"^\| all \|.*$", printed, re.MULTILINE)
    assert total == "| all | 146 | 33 | 113 | 193 | 12 | 205 | 0 |"


def test_an_invalid_text_that_passes_is_found_in_any_order_of_properties() -> None:
    group = {
        "description": "a wrong expectation",
        "schema": {"properties": {"a": {}, "b": {}}},
        "tests": [{"description": "order", "data": {"b": 1, "a": [{}]}, "valid": False}],
    }
    counts = Counter[str]()
    (passed,) = suite.judge(group, "any.json", counts)
    assert json.loads(passed.text) == {"a": [{}], "b": 1} and not suite.is_named(passed)
    assert counts == {"accepted": 1, "invalid": 1, "that pass": 1}


def test_walks_find_what_the_suite_has_no_case_of() -> None:
    """Two properties are asked for, which may have one name: the documentation says so."""
    schema = {"minProperties": 2, "patternProperties": {"^[ab]$": {"type": "null"}}}
    schema |= {"type": "object", "additionalProperties": False, "maxProperties": 2}
    counts = Counter[str]()
    passed = suite.walked({"description": "", "schema": schema}, "any.json", 60, counts)
    assert {'{"a":null,"a":null}', '{"b":null,"b":null}'} >= {one.text for one in passed} != set()
    assert counts["drawn"] == 60


def test_the_documentation_names_what_may_be_invalid() -> None:
    table = DOCS.read_text().partition("## What may be invalid")[2]
    assert all(f"`{name}`" in table for name in suite.FORMATS)
