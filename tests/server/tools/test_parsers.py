"""Parsers of tool calls: what they find, whatever the text is and wherever it is cut."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tools.demanded_calls import ArgumentsParser, ListParser
from server.tools.reader import Reader
from server.tools.registry import TOOL_PARSERS, tool_parser
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
        Read('<tool_call>{"name":"\\ud800"}</tool_call>', "", []),
    ),
    # cut off in the middle of its arguments, as max_tokens does
    ("hermes", '<tool_call>{"name":"f","arguments":{"a', Read("", "", [("f", '{"a')])),
    ("hermes", '<tool_call>{"name":"f","argu', Read('<tool_call>{"name":"f","argu', "", [])),
    ("hermes", "<tool_call>none</tool_call>", Read("<tool_call>none</tool_call>", "", [])),
    ("hermes", '<tool_call>{"a":1}</tool_call>', Read('<tool_call>{"a":1}</tool_call>', "", [])),
    ("hermes", '<tool_call>{"name":3}', Read('<tool_call>{"name":3}', "", [])),
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
        "llama3_json",
        f'It is: {{"name": "f", "parameters": {F}}}\n{{"name": "g", "arguments": {{}}}} by {{g}}.',
        Read("It is: by {g}.", "", [("f", F), ("g", G)]),
    ),
    ("llama3_json", '{"name": "Anna", "age": 5}', Read('{"name": "Anna", "age": 5}', "", [])),
    ("llama3_json", "{" * 3 + '"name":', Read("{" * 3 + '"name":', "", [])),
    # arguments as the text of an object, as Granite 4 writes them
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>'
        '<tool_call>{"arguments": "{}", "name": "g"}</tool_call>'
        '<tool_call>{"name": "h", "arguments": "words"}</tool_call>',
        Read("", "", [("f", '{"a": "é"}'), ("g", G), ("h", '"words"')]),
    ),
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
    (
        "pythonic",
        "[f(a=true, b=[null, {'c': false}], d='true')]",
        Read("", "", [("f", '{"a": true, "b": [null, {"c": false}], "d": "true"}')]),
    ),
    (
        "pythonic",
        "[f(a=(1, +2), b={'x', -3}, c=f'y', d={1: ()})]",
        Read("", "", [("f", '{"a": [1, 2], "b": ["x", -3], "c": "y", "d": {"1": []}}')]),
    ),
    (
        "pythonic",
        r"[f(a='\ud83d\ude00', b='\ud800')]",  # a pair of surrogates, and half of one
        Read("", "", [("f", '{"a": "\N{GRINNING FACE}", "b": "\ufffd"}')]),
    ),
    ("pythonic", "[f(a=none)]", Read("[f(a=none)]", "", [])),
    ("pythonic", "[f(a=not True)]", Read("[f(a=not True)]", "", [])),
    ("pythonic", "[f(a=f'{x}')]", Read("[f(a=f'{x}')]", "", [])),
    ("pythonic", "[f(a={**{}})]", Read("[f(a={**{}})]", "", [])),
    # calls before one that cannot be read stay calls, what follows is text
    ("pythonic", "[f(), g(a=x), h()]", Read(" g(a=x), h()]", "", [("f", G)])),
    ("pythonic", "[g(a=x), f()]", Read("[g(a=x), f()]", "", [])),
    ("pythonic", "[f()] Done.", Read("Done.", "", [("f", G)])),
    ("pythonic", "[f(), g(a='x", Read(" g(a='x", "", [("f", G)])),
    ("pythonic", "[1, 2] are numbers", Read("[1, 2] are numbers", "", [])),
    ("pythonic", "[]", Read("[]", "", [])),
    # nothing is evaluated
    (
        "pythonic",
        "[f(a=__import__('os').getpid())]",
        Read("[f(a=__import__('os').getpid())]", "", []),
    ),
    ("pythonic", "[f(a=b'x')]", Read("[f(a=b'x')]", "", [])),
    (
        "llama4_pythonic",
        "<|python_start|>[f(a=1)]<|python_end|>",
        Read("", "", [("f", '{"a": 1}')]),
    ),
    ("mistral", "[TOOL_CALLS] [1, 2]", Read("[TOOL_CALLS] [1, 2]", "", [])),
    ("mistral", "[TOOL_CALLS]one [TOOL_CALLS]f{}", Read("[TOOL_CALLS]one", "", [("f", G)])),
    (
        "phi4_mini_json",
        f'Now\nfunctools[\n{{"name": "f", "arguments": {F}}}, {{"name": "g"}}\n]\nDone',
        Read("Now\nDone", "", [("f", F), ("g", G)]),
    ),
    ("phi4_mini", "functools[] and functools[ 1 ]", Read("functools[] and functools[ 1 ]", "", [])),
    (
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        + F
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Read("Hm.", "", [("f", F), ("g", G)]),
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{F}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Read("", "", [("f", F), ("g", G)]),
    ),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f", Read("<｜tool▁call▁begin｜>f", "", [])),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">[5]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="c">é"</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="g"></｜DSML｜invoke></｜DSML｜function_calls>',
        Read("", "", [("f", '{"a": "5", "b": [5], "c": "é\\""}'), ("g", G)]),
    ),
    (
        "qwen3_coder",
        "Hm.\n<tool_call>\n<function=f>\n<parameter=a>\nx\n\ny</z>\n</parameter>\n"
        "<parameter=b></parameter>\n</function>\n</tool_call>\n<function=g></function>",
        Read("Hm.", "", [("f", '{"a": "x\\n\\ny</z>", "b": ""}'), ("g", G)]),
    ),
    # closing tags that are missing
    (
        "qwen3_xml",
        "<tool_call><function=f><parameter=a>1<parameter=b>\n2\n</function></tool_call>"
        "<tool_call><function=g><function=h>x",
        Read("", "", [("f", '{"a": "1", "b": "2"}'), ("g", G), ("h", G)]),
    ),
    ("qwen3_coder", "<function=f><parameter=a>b<c", Read("", "", [("f", '{"a": "b<c')])),
    (
        "qwen3_coder",
        "<tool_call> is a tag, <function=f</function> none",
        Read("<tool_call> is a tag, <function=f</function> none", "", []),
    ),
    (
        "glm45",
        "Hm.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value> 1\n</arg_value>\n</tool_call>"
        "<tool_call>g</tool_call>",
        Read("Hm.", "", [("f", '{"a": 1}'), ("g", G)]),
    ),
    (
        "glm47",
        "<tool_call>a few words</tool_call><tool_call>f<tool_call>",
        Read("<tool_call>a few words</tool_call><tool_call>f<tool_call>", "", []),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_what_is_found(name: str, text: str, expected: Read) -> None:
    assert read(tool_parser(name), text) == expected
    for cut in range(len(text)):
        assert read(tool_parser(name), text[:cut], text[cut:]) == expected
    assert read(tool_parser(name), *text) == expected


def test_calls_that_are_demanded() -> None:
    text = f'[{{"name":"f","parameters":{F}}},{{"name":"g","parameters":{{}}}}]'
    assert read(ListParser(), text) == Read("", "", [("f", F), ("g", G)])
    assert read(ArgumentsParser("f"), *F) == Read("", "", [("f", F)])
    assert read(ArgumentsParser("f"), F[:5]) == Read("", "", [("f", F[:5])])
    assert read(ArgumentsParser("f"), "") == Read("", "", [])


# pieces of all notations, so that most texts are nearly calls
ANY_TOOL = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}}
WORDS = (
    "<tool_call> </tool_call> <tool_ [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> [ ] { } f{} g()"
)
WORDS += " functools[ <function=f> <parameter=a> </parameter> </function> <arg_key> </arg_key>"
WORDS += (
    " <arg_value> </arg_value> <｜tool▁call▁begin｜> <｜tool▁sep｜> ```json <｜tool▁call▁end｜>"
)
WORDS += (
    ' <｜DSML｜invoke name="f"> </｜DSML｜parameter> <｜DSML｜parameter name="a" string="false">'
)
WORDS += " <|channel|>analysis<|message|> <|end|> <|start|> <|channel|>final <|message|> to=f"
WORDS += ' <|python_start|> <|python_end|> " \\ ; : , text é 1e null "a" [f(a=1,b=\'c\')'
CALLS = [
    '{"name": "f", "arguments": {"a": [1, "b"]}}',
    '{"name": "g", "parameters": {}}',
    '{"arguments": {}, "name": "h"}',
]
PIECES = st.sampled_from([*WORDS.split(), *CALLS, " ", "\n"])
TEXTS = st.lists(PIECES, max_size=8).map("".join)
ONE_OF_EACH = {id(kind): name for name, kind in TOOL_PARSERS.items()}.values()
KINDS = [
    *(partial(tool_parser, name) for name in ONE_OF_EACH),
    ListParser,
    lambda: ArgumentsParser("f"),
]


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

    texts: list[tuple[Reader, str]] = [
        (
            tool_parser("hermes"),
            "".join(f"<tool_call>{c}</tool_call>" for c in dumped("arguments")),
        ),
        (tool_parser("llama3_json"), "; ".join(dumped("parameters"))),
        (tool_parser("mistral"), "[TOOL_CALLS][" + ", ".join(dumped("arguments")) + "]"),
        (ListParser(), "[" + ",".join(dumped("parameters")) + "]"),
    ]
    for parser, text in texts:
        found = read(parser, text)
        assert [(name, json.loads(text)) for name, text in found.calls] == calls
        assert found.content == ""


HOSTILE = [
    "[",
    '<tool_call>{"a":[',
    "[f(a=",
    "[f(a=-",
    "[TOOL_CALLS]",
    "<",
    " ",
    '{"name": "f", "parameters": {"a":',
    "<function=f><parameter=a>",
    "<function=f><parameter=a>\n",
    "<function=",
    "<tool_call>f",
    "<tool_call>f<arg_key>a</arg_key>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>[",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a',
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">[',
    "<tool_call>f<arg_key>" + " " * 480 + "</arg_key>",
    "<|channel|>",
    "<|channel|>commentary to=f<|message|>",
    "\n```",
    "functools[",
]


def read_in_time(name: str, size: int) -> None:
    """Read texts that go on as they begin, or repeat themselves."""
    for piece in HOSTILE:
        for text in (piece * (size // len(piece)), piece + piece[-1] * size):
            begin = time.process_time()
            read(tool_parser(name, [ANY_TOOL]), text)
            assert time.process_time() - begin < 3.0, piece


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_hostile_text_is_read(name: str) -> None:
    read_in_time(name, 2_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_hostile_text_is_read_in_time(name: str) -> None:
    read_in_time(name, 100_000)
