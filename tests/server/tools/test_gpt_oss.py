"""Harmony: messages in channels become thoughts, content and calls."""

from __future__ import annotations

import pytest

from server.protocol.tools import asked_tools
from server.tools.choice import Parsers
from server.tools.gpt_oss import HarmonyReader
from tests.server.tools.reading import Read, read

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes."
CALL = '<|channel|>commentary to=functions.a.f <|constrain|>json<|message|>{"a": 1}<|call|>'
TOOL = {"type": "function", "function": {"name": "a.f"}}

CASES = [
    (THOUGHT + NEXT + FINAL, Read("Yes.", "Hm.", [])),
    (THOUGHT + NEXT + FINAL + "<|return|>", Read("Yes.", "Hm.", [])),
    (THOUGHT + NEXT + CALL, Read("", "Hm.", [("a.f", '{"a": 1}')])),
    # where the recipient stands before the channel, and one without the prefix
    (
        f" to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>{NEXT} to=g<|channel|>"
        "commentary<|message|>[]",
        Read("", "", [("f", "{}"), ("g", "[]")]),
    ),
    # what is said before a call, and thoughts between
    (
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>So: <|end|>{NEXT}{THOUGHT}{NEXT}{CALL}",
        Read("So:", "Hm.\nHm.", [("a.f", '{"a": 1}')]),
    ),
    (f"<|channel|>commentary<|message|>So:<|end|>{NEXT}{FINAL}", Read("So:\nYes.", "", [])),
    # the tools that are the model's own are no functions
    (
        f"<|channel|>commentary to=python<|message|>print(1)<|call|>{NEXT}{FINAL}",
        Read("Yes.", "", []),
    ),
    (
        f"<|channel|>analysis to=python code<|message|>print(1)<|call|>{NEXT}{FINAL}",
        Read("Yes.", "print(1)", []),
    ),
    # an end that is missing, a header that is none, an answer without channels
    (f"<|channel|>analysis<|message|>Hm.{FINAL}", Read("Yes.", "Hm.", [])),
    ("<|channel|>final Yes.<|return|>", Read("<|channel|>final Yes.", "", [])),
    ("to be", Read("to be", "", [])),
    ("t", Read("t", "", [])),
    (" Yes.<|end|>", Read(" Yes.", "", [])),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_what_is_found(text: str, expected: Read) -> None:
    for cut in range(len(text) + 1):
        assert read(HarmonyReader(), text[:cut], text[cut:]) == expected
    assert read(HarmonyReader(), *text) == expected
    silent = read(HarmonyReader(has_calls=False), text)
    assert silent._replace(content=silent.content.rstrip()) == expected._replace(calls=[])


@pytest.mark.parametrize("reasoning", ["openai_gptoss", None])
@pytest.mark.parametrize("tells_reasoning", [True, False])
def test_a_message(reasoning: str | None, tells_reasoning: bool) -> None:
    parsers = Parsers("openai", True, reasoning)
    for tools, text in (([TOOL], CALL), (None, CALL), ([TOOL], FINAL)):
        asked = asked_tools(tools, None, None)
        if not parsers.reads(asked):
            continue
        whole, streamed = (
            parsers.reader(asked, NEXT, thinks=True, tells_reasoning=tells_reasoning)
            for _ in range(2)
        )
        told = whole.message(THOUGHT + NEXT + text)
        delta = streamed.feed(THOUGHT + NEXT + text, last=True)
        assert delta.get("reasoning") == told.get("reasoning")
        assert bool(told.get("tool_calls")) == (tools is not None and text == CALL)
        assert told.get("reasoning") == ("Hm." if reasoning and tells_reasoning else None)
        assert (told["content"] or "") == ("Yes." if text == FINAL else "")


def test_calls_that_are_demanded_are_in_the_final_message() -> None:
    parsers = Parsers("openai", True, "openai_gptoss")
    thoughts = parsers.thoughts(NEXT)
    assert thoughts is not None and thoughts.is_open
    asked = asked_tools([TOOL], "required", None)
    reader = parsers.reader(asked, NEXT, thinks=True, tells_reasoning=True)
    called = '[{"name":"a.f","parameters":{}}]'
    told = reader.message(f"{THOUGHT}{NEXT}<|channel|>final <|constrain|>json<|message|>{called}")
    assert told["tool_calls"][0]["function"] == {"name": "a.f", "arguments": "{}"}
    assert told["reasoning"] == "Hm." and told["content"] is None
