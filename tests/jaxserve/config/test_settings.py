"""Declarations: each field has one, checks follow it, and docs/settings.md is made of it."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxserve import EngineConfig, SamplingParams
from jaxserve.config.flags import add_flag
from jaxserve.config.settings import (
    Integer,
    Integers,
    Number,
    OneOf,
    PowerOfTwo,
    Switch,
    Text,
    Texts,
    check,
    defaults_of,
    setting,
    settings_of,
)
from jaxserve.errors import ValidationError
from jaxserve.jobs.settings_page import page
from jaxserve.params.sampling_params import CLIENT, SCHEDULER

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "settings.md"
FOLDER = ROOT / "jaxserve" / "execution" / "features"


def test_the_page_is_that_of_the_declarations() -> None:
    assert page() == PAGE.read_text(), "python -m jaxserve.jobs.settings_page > docs/settings.md"


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_every_field_is_declared_and_its_default_allowed(kind: type) -> None:
    items = settings_of(kind)
    assert set(items) == {field.name for field in dataclasses.fields(kind)}
    for name, default in defaults_of(kind).items():
        kept = items[name].checked(name, default)
        assert kept == default and items[name].text.endswith(".")


def test_who_reads_a_parameter_is_there() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")}
    readers = {item.reader for item in settings_of(SamplingParams).values()}
    assert readers <= files | {CLIENT, SCHEDULER}


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (Integer(1, 3), [1, 3], [0, 4, True, "1", 1.0, None]),
        (Integer(), [-(2**70)], ["", 0.5]),
        (PowerOfTwo(), [1, 2, 64], [0, 3, -2, True]),
        (Number(0.0, 1.0), [0, 1.0], [-0.1, 1.1, math.nan, math.inf, True, "0"]),
        (Number(above=0.0), [1e-300, 10], [0, -1, math.inf, 10**400]),
        (OneOf(("a", "b")), ["a"], ["c", "", None, ["a"]]),
        (Switch(), [True, False], [0, 1, "true", None]),
        (Text(), ["a"], ["", None, b"a"]),
        (Texts(), [["a"], ()], ["a", [""], [1], {"a": 1}, 5]),
        (Texts(single=True), ["a", ["a", "b"], None], ["", [None]]),
        (Integers(2, 1), [(1, 2), [3, 4]], [(1,), (0, 1), (1, True), "12", None]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_holds(rule: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        rule.checked("x", value)
    for value in bad:
        with pytest.raises(ValidationError) as caught:
            rule.checked("x", value)
        assert caught.value.field == "x" and caught.value.allowed


@dataclass
class Made:
    size: int = setting(4, Integer(1), "How many.", reader="r")
    words: list[str] = setting(list, Texts(), "Which.", reader="r")
    rate: float | None = setting(None, Number(above=0.0), "How fast.", reader="r")
    loud: bool = setting(False, Switch(), "How loud.", reader="r")
    secret: str | None = setting(None, Text(), "What.", reader="r", secret=True)

    def __post_init__(self) -> None:
        check(self)


def test_a_class_is_checked_and_its_flags_are_made() -> None:
    assert Made().words == [] and Made().words is not Made().words
    assert Made(words=("a",)).words == ["a"]  # type: ignore[arg-type]
    assert "s3" not in repr(Made(secret="s3"))
    with pytest.raises(ValidationError, match="size=None"):
        Made(size=None)  # type: ignore[arg-type]
    parser = argparse.ArgumentParser()
    for name in settings_of(Made):
        add_flag(parser, Made, name, unset=name == "size")
    given = vars(parser.parse_args(["--words=a", "--words=b", "--rate=none", "--loud"]))
    assert given == {"size": None, "words": ["a", "b"], "rate": None, "loud": True, "secret": None}
    assert "how fast" in parser.format_help() and "(default: off)" in parser.format_help()
