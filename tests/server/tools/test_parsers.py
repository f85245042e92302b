"""Parsers of tool calls: what they find, whatever the text is and wherever it is cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tools.demanded_calls import ArgumentsParser, ListParser
from server.tools.reader import ToolParser
from server.tools.registry import TOOL_PARSERS
from tests.server.tools.reading import Read, read

F, G = '{"a": 1, "b": [{}, "x}\\"", null]}', "{}"

CASES = [
    ("hermes", "Just text. ", Read("Just text. ", "", [])),
    (
        "hermes",
        f'Wait.\n<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>\n',
        Read("Wait.", "", [("f", F)]),
    ),
    (
        "hermes",
        '<tool_call>{"arguments":{},"name":"f"}</tool_call> and '
        '<tool_call>{"name":"g"}</tool_call>',
        Read(" and", "", [("f", G), ("g", G)]),
    ),
    # what no response could hold
    (
        "hermes",
        '<tool_call>{"name":"\\ud800"}</tool_call>',
        Read('{"name":"\\ud800"}</tool_call>', "", []),
    ),
    # cut off in the middle of its arguments, as max_tokens does
    ("hermes", '<tool_call>{"name":"f","arguments":{"a', Read("", "", [("f", '{"a')])),
    ("hermes", '<tool_call>{"name":"f","argu', Read('{"name":"f","argu', "", [])),
    ("hermes", "<tool_call>none</tool_call>", Read("<tool_call>none</tool_call>", "", [])),
    ("hermes", '<tool_call>{"a":1}</tool_call>', Read('{"a":1}</tool_call>', "", [])),
    ("hermes", '<tool_call>{"name":3}', Read('{"name":3}', "", [])),
    ("hermes", "a <tool_ca", Read("a <tool_ca", "", [])),
    ("llama3_json", f'{{"name": "f", "parameters": {F}}}', Read("", "", [("f", F)])),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "f", "parameters": {F}}}; {{"name": "g", "arguments": {{}}}}',
        Read("", "", [("f", F), ("g", G)]),
    ),
    ("llama3_json", '{"answer": 42} is it', Read('{"answer": 42} is it', "", [])),
    ("llama3_json", "It is {7}.", Read("It is {7}.", "", [])),
    (
        "mistral",
        f'Now: [TOOL_CALLS] [{{"name": "f", "arguments": {F}}}, {{"name":"g","arguments":{{}}}}]',
        Read("Now:", "", [("f", F), ("g", G)]),
    ),
    ("mistral", f"[TOOL_CALLS]f{F}[TOOL_CALLS]g{{}}", Read("", "", [("f", F), ("g", G)])),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{F}", Read("", "", [("f", F)])),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{F}", Read("", "", [("f", F)])),
    ("mistral", "[TOOL_CALLS]words", Read("[TOOL_CALLS]words", "", [])),
    (
        "pythonic",
        """[f(a=1, b=[True, None, 'x)"]']), m.g(c={"d": -1.5})]""",
        Read(
            "", "", [("f", '{"a": 1, "b": [true, null, "x)\\"]"]}'), ("m.g", '{"c": {"d": -1.5}}')]
        ),
    ),
    ("pythonic", "<|python_start|>[f()]<|python_end|>", Read("", "", [("f", G)])),
    ("pythonic", "[1, 2] are numbers", Read("[1, 2] are numbers", "", [])),
    ("pythonic", "[]", Read("[]", "", [])),
    # nothing is evaluated
    (
        "pythonic",
        "[f(a=__import__('os').getpid())]",
        Read("[f(a=__import__('os').getpid())]", "", []),
    ),
    ("pythonic", "[f(a=b'x')]", Read("[f(a=b'x')]", "", [])),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_what_is_found(name: str, text: str, expected: Read) -> None:
    assert read(TOOL_PARSERS[name](), text) == expected
    assert read(TOOL_PARSERS[name](), *text) == expected


def test_calls_that_are_demanded() -> None:
    text = f'[{{"name":"f","parameters":{F}}},{{"name":"g","parameters":{{}}}}]'
    assert read(ListParser(), text) == Read("", "", [("f", F), ("g", G)])
    assert read(ArgumentsParser("f"), *F) == Read("", "", [("f", F)])
    assert read(ArgumentsParser("f"), F[:5]) == Read("", "", [("f", F[:5])])
    assert read(ArgumentsParser("f"), "") == Read("", "", [])


# pieces of all notations, so that most texts are nearly calls
WORDS = (
    "<tool_call> </tool_call> <tool_ [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> [ ] { } f{} g()"
)
WORDS += ' <|python_start|> <|python_end|> " \\ ; : , text é 1e null "a" [f(a=1,b=\'c\')'
CALLS = [
    '{"name": "f", "arguments": {"a": [1, "b"]}}',
    '{"name": "g", "parameters": {}}',
    '{"arguments": {}, "name": "h"}',
]
PIECES = st.sampled_from([*WORDS.split(), *CALLS, " ", "\n"])
TEXTS = st.lists(PIECES, max_size=8).map("".join)
KINDS = [*TOOL_PARSERS.values(), ListParser, lambda: ArgumentsParser("f")]


@settings(max_examples=120, deadline=None)
@given(text=TEXTS, kind=st.sampled_from(KINDS), data=st.data())
def test_where_it_is_cut_does_not_matter(text: str, kind, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(kind(), text)
    assert read(kind(), *pieces) == whole
    assert read(kind(), *text) == whole
    for name, _ in whole.calls:
        assert name


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.text("abc_", min_size=1, max_size=5),
            st.dictionaries(
                st.text(max_size=4),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                    lambda inner: (
                        st.lists(inner, max_size=3)
                        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
                    ),
                    max_leaves=6,
                ),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    indent=st.sampled_from([None, 2]),
)
def test_calls_come_back(calls, indent) -> None:
    def dumped(key: str) -> list[str]:
        return [json.dumps({"name": n, key: a}, indent=indent) for n, a in calls]

    texts: list[tuple[ToolParser, str]] = [
        (
            TOOL_PARSERS["hermes"](),
            "".join(f"<tool_call>{c}</tool_call>" for c in dumped("arguments")),
        ),
        (TOOL_PARSERS["llama3_json"](), "; ".join(dumped("parameters"))),
        (TOOL_PARSERS["mistral"](), "[TOOL_CALLS][" + ", ".join(dumped("arguments")) + "]"),
        (ListParser(), "[" + ",".join(dumped("parameters")) + "]"),
    ]
    for parser, text in texts:
        found = read(parser, text)
        assert [(name, json.loads(text)) for name, text in found.calls] == calls
        assert found.content == ""


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        "<tool_call>{" + '"a":[' * 20_000,
        "[f(a=" + "[" * 50_000,
        "[f(a=" + "-" * 20_000 + "1)]",
        "[TOOL_CALLS]" * 4_000,
        "<" * 50_000,
        " " * 50_000,
        '{"name": "f", "parameters": ' + '{"a":' * 20_000,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_text_is_read_in_time(name: str, text: str) -> None:
    begin = time.process_time()
    read(TOOL_PARSERS[name](), text)
    assert time.process_time() - begin < 2.0
