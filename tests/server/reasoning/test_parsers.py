"""Parsers of thoughts: what is thought and what is said, wherever the text is cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.grammars.thoughts import ThoughtTracker
from server.protocol.tools import asked_tools
from server.reasoning.registry import REASONING_PARSERS
from server.tools.choice import Parsers
from server.tools.reader import Reader
from tests.server.tools.reading import Read, read

HARMONY = ["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>"]
HARMONY += ["<|start|>", "assistant", "<|channel|>", "final"]
CASES = [
    ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.", Read("Yes.", "Hm.\n", [])),
    ("qwen3", True, "Hm.</think>Yes.", Read("Yes.", "Hm.", [])),
    ("qwen3", False, "Yes.", Read("Yes.", "", [])),
    ("qwen3", False, "<think>Hm", Read("", "Hm", [])),
    ("deepseek_r1", False, "Hm.</think>Yes.", Read("Yes.", "Hm.", [])),
    ("deepseek_r1", False, "<think>Hm.</think>Yes.", Read("Yes.", "Hm.", [])),
    ("deepseek_r1", False, "Hm. </thi", Read("", "Hm. </thi", [])),
    ("glm45", True, "\nHm.</think>\nYes.", Read("Yes.", "\nHm.", [])),
    ("deepseek_v3", False, "<think></think>Yes.", Read("Yes.", "", [])),
    (
        "granite",
        False,
        "Here is my thought process: Hm. Here is my\nHere's my response: Yes.",
        Read("Yes.", "Hm. Here is my\n", []),
    ),
    ("granite", False, "Here's my thought process:Hm", Read("", "Hm", [])),
    ("granite", False, "Here's my thought", Read("Here's my thought", "", [])),
    (
        "openai_gptoss",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        Read("Yes.", "Hm.", []),
    ),
    ("qwen3", True, "Hm. <tool_call>{}", Read("<tool_call>{}", "Hm. ", [])),
    ("mistral", False, "[THINK]a[TOOL_CALLS]f", Read("[TOOL_CALLS]f", "a", [])),
    ("mistral", False, "[THINK]a[/THINK]b </think>", Read("b </think>", "a", [])),
    ("mistral", False, "a\n[THINK]b[/THINK]c [THINK]", Read("a\nc [THINK]", "b", [])),
    ("mistral", False, "[/THINK]a [/THINK]b [TH", Read("a b [TH", "", [])),
    ("mistral", False, "a[TOOL_CALLS]f[THINK]b", Read("a[TOOL_CALLS]f[THINK]b", "", [])),
]


def parser(name: str, is_open: bool) -> Reader:
    tags = REASONING_PARSERS[name]
    return tags.reader(tags.begin if is_open else "")


@pytest.mark.parametrize(("name", "is_open", "text", "expected"), CASES)
def test_what_is_found(name: str, is_open: bool, text: str, expected: Read) -> None:
    assert read(parser(name, is_open), *text) == expected
    for cut in range(len(text) + 1):
        assert read(parser(name, is_open), text[:cut], text[cut:]) == expected


def test_what_a_template_leaves_open() -> None:
    tags = REASONING_PARSERS["qwen3"]
    assert tags.are_open("...<think>\n")
    assert not tags.are_open("<think>\n\n</think>\n\n")
    assert not tags.are_open("<think> is a tag")
    assert tags.are_closed("<|assistant|>\n<think></think>") and not tags.are_closed("<think>")


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


PIECES = ["<think>", "</think>", "[THINK]", "[/THINK]", "a", " ", "<", "/", "\n", "<|message|>"]
PIECES += ["Here is", "Here's", " my thought process:", " my response:", "<|end|>", "<|start|>"]
PIECES += ["<|channel|>analysis", "<|channel|>final", "<|channel|>commentary to=f"]


@pytest.mark.parametrize(
    "header", ["final", "final json", "final <|constrain|>json", "commentary", "analysis"]
)
def test_a_constraint_begins_in_the_final_message(header: str) -> None:
    found = REASONING_PARSERS["gpt_oss"].thoughts("<|start|>assistant")
    pieces = [*HARMONY[:-1], header, "<|message|>", "{}"]
    tracker = ThoughtTracker(found, None, lambda token: pieces[token].encode())
    answer = tracker.answer([*range(len(pieces))])
    assert answer == ([len(pieces) - 1] if header.startswith("final") else [])


@pytest.mark.parametrize(
    ("name", "tokens", "count"),
    [
        ("qwen3", ["<think>", "a", "b", "</think>", "c"], 2),
        ("qwen3", ["<think>", "a", "<tool_call>", "{}"], 1),
        ("granite", ["Here's", " my thought process:", "a", "Here is my", " response:", "b"], 1),
        (
            "openai_gptoss",
            [*HARMONY, " <|constrain|>", "json", "<|message|>", "c"],
            5,  # the end of the thoughts is seen in the header of the final message alone
        ),
        ("openai_gptoss", ["<|channel|>", "final", "<|message|>", "a"], 0),
    ],
)
def test_tokens_of_thoughts(name: str, tokens: list[str], count: int) -> None:
    counter = Parsers(reasoning=name).counter("", tokens.__getitem__, thinks=True)
    assert counter is not None
    for token in range(len(tokens)):
        counter.feed([token])
    assert counter.count == count


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(PIECES),
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


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
@pytest.mark.parametrize(
    "piece",
    [
        "<",
        "</think",
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in (" ", "Here is my ", "<|channel|>analysis")
        ),
    ],
)
def test_hostile_text_is_read_in_time(name: str, piece: str) -> None:
    text = piece * (20_000 // len(piece))
    begin = time.process_time()
    for is_open in (False, True):
        found = read(parser(name, is_open), text)
        assert found.content + found.reasoning == text
    assert time.process_time() - begin < 2.0
