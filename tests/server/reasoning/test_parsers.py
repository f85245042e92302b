"""Parsers of thoughts: what is thought and what is said, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.protocol.tools import asked_tools
from server.reasoning.registry import REASONING_PARSERS
from server.tools.choice import Parsers
from server.tools.reader import Reader
from tests.server.tools.reading import Read, read

CASES = [
    ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.", Read("Yes.", "Hm.\n", [])),
    ("qwen3", True, "Hm.</think>Yes.", Read("Yes.", "Hm.", [])),
    ("qwen3", False, "Yes.", Read("Yes.", "", [])),
    ("qwen3", False, "<think>Hm", Read("", "Hm", [])),
    ("deepseek_r1", False, "Hm.</think>Yes.", Read("Yes.", "Hm.", [])),
    ("deepseek_r1", False, "<think>Hm.</think>Yes.", Read("Yes.", "Hm.", [])),
    ("deepseek_r1", False, "Hm. </thi", Read("", "Hm. </thi", [])),
    ("mistral", False, "[THINK]a[/THINK]b </think>", Read("b </think>", "a", [])),
]


def parser(name: str, is_open: bool) -> Reader:
    tags = REASONING_PARSERS[name]
    return tags.reader(tags.begin if is_open else "")


@pytest.mark.parametrize(("name", "is_open", "text", "expected"), CASES)
def test_what_is_found(name: str, is_open: bool, text: str, expected: Read) -> None:
    for pieces in ([text], text):
        assert read(parser(name, is_open), *pieces) == expected


def test_what_a_template_leaves_open() -> None:
    tags = REASONING_PARSERS["qwen3"]
    assert tags.are_open("...<think>\n")
    assert not tags.are_open("<think>\n\n</think>\n\n")
    assert not tags.are_open("<think> is a tag")


def test_thoughts_that_the_prompt_has_closed() -> None:
    parsers = Parsers(reasoning="deepseek_r1")
    asked = asked_tools(None, None, None)
    for end, expected in (
        ("<think>\n\n</think>\n\n", Read("Four.", "", [])),
        ("", Read("", "Four.", [])),
    ):
        reader = parsers.reader(asked, end, thinks=True, tells_reasoning=True)
        told = reader.message("Four.")
        assert (told.get("content") or "", told.get("reasoning") or "") == expected[:2]
        assert (parsers.counter(end, str, thinks=True) is None) == (expected.reasoning == "")


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "a", " ", "<", "/", "\n"]),
        max_size=8,
    ).map("".join),
    name=st.sampled_from(sorted(REASONING_PARSERS)),
    is_open=st.booleans(),
    data=st.data(),
)
def test_where_it_is_cut_does_not_matter(text, name, is_open, data) -> None:
    cut = data.draw(st.integers(0, len(text)))
    whole = read(parser(name, is_open), text)
    assert read(parser(name, is_open), text[:cut], text[cut:]) == whole
