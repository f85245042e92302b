"""Arguments that are tagged values: they come back as JSON of the types that the schema names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tools.deltas import CallArguments
from server.tools.message import MessageReader
from server.tools.registry import tool_parser
from tests.server.tools.reading import read

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "nested": {"$ref": "#/$defs/Nested"},
    "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Nested": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]

SURROGATE = r'{"text": "\ud83d"}'  # half of a pair, which no response could hold

PIECES = st.text(st.sampled_from('<>/\n\\"{é parmetucn=_'), max_size=8)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": PIECES,
        "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "list": st.lists(st.none() | PIECES, max_size=3),
        "nested": st.dictionaries(PIECES, st.integers(), max_size=2),
        "any": st.none() | st.integers(),
    },
)


def written(name: str, arguments: dict[str, Any]) -> str:
    """A call as models of the notation write it: texts as they are, all else as JSON."""

    def plain(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    told = [(key, plain(value)) for key, value in arguments.items()]
    if name == "qwen3_coder":
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in told)
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    if name == "glm":
        tag = "\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"
        return f"<tool_call>f{''.join(tag.format(*one) for one in told)}\n</tool_call>"
    tag = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
    kinds = (("true" if isinstance(arguments[k], str) else "false", k, v) for k, v in told)
    inner = "".join(tag.format(key, kind, value) for kind, key, value in kinds)
    frame = "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>"
    return frame.format(f'<｜DSML｜invoke name="f">\n{inner}</｜DSML｜invoke>\n')


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "deepseek_v32"])
@settings(max_examples=50, deadline=None)
@given(arguments=VALUES, data=st.data())
def test_values_come_back(name: str, arguments: dict[str, Any], data: st.DataObject) -> None:
    text = written(name, arguments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for way in ([text], pieces, [*text]):
        found = read(tool_parser(name, TOOLS), *way)
        ((called, told),) = found.calls
        assert called == "f" and json.loads(told) == arguments and found.content == ""


OUTER = {
    "qwen3_coder": "<tool_call></tool_call><function=g>",
    "glm": "<tool_call>g",
    "deepseek_v32": '<｜DSML｜function_calls></｜DSML｜function_calls><｜DSML｜invoke name="g">',
}


@pytest.mark.parametrize("name", OUTER)
def test_tags_of_calls_are_text_in_a_value(name: str) -> None:
    wanted = {"text": f"use {OUTER[name]} here", "number": 1}
    found = read(tool_parser(name, TOOLS), written(name, wanted))
    ((called, told),) = found.calls
    assert (called, json.loads(told), found.content) == ("f", wanted, "")


def test_a_call_ends_with_the_text_where_the_model_has_ended_it() -> None:
    """Never within a value, nor where the text was cut off: more would have come."""
    text = "<tool_call>\n<function=f>\n<parameter=number>\n1\n</parameter>\n"
    for told, cut, arguments in (
        (text, False, '{"number": 1}'),
        (text, True, '{"number": 1'),
        (text + "<parameter=te", False, '{"number": 1'),
        (text + "<parameter=text>x", False, '{"number": 1, "text": "x'),
    ):
        reader = MessageReader(None, tool_parser("qwen3_coder", TOOLS), True, True)
        (call,) = reader.message(told, cut=cut)["tool_calls"]
        assert call["function"]["arguments"] == arguments


UNTYPED = {"number": 1, "other": [None], "word": "true story"}


@pytest.mark.parametrize(
    ("name", "other"), [("qwen3_coder", "[null]"), ("glm", [None]), ("deepseek_v32", [None])]
)
def test_values_without_a_schema(name: str, other: Any) -> None:
    """Texts with Qwen, of GLM JSON where they are some; DeepSeek says which are texts."""
    text = written(name, UNTYPED)
    number = "1" if isinstance(other, str) else 1
    for tools in ([], [{"function": {"name": "f"}}], [{"function": {"name": "g"}}]):
        ((_, told),) = read(tool_parser(name, tools), text).calls
        assert json.loads(told) == UNTYPED | {"number": number, "other": other}
    ((_, told),) = read(tool_parser(name, TOOLS), text).calls
    assert json.loads(told) == UNTYPED | {"other": other}


def test_a_schema_goes_before_what_the_model_says_of_a_value() -> None:
    tag = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
    inner = "".join(
        tag.format(*one)
        for one in (
            ("number", "true", "5"),
            ("nested", "true", '{"a": 1}'),
            ("text", "false", "null"),
            ("other", "true", "5"),
            ("any", "false", "abc"),
        )
    )
    text = f'<｜DSML｜invoke name="f">{inner}</｜DSML｜invoke>'
    expected = {"number": 5, "nested": {"a": 1}, "text": "null", "other": "5", "any": "abc"}
    for way in ([text], [*text]):
        ((_, told),) = read(tool_parser("deepseek_v32", TOOLS), *way).calls
        assert json.loads(told) == expected


@pytest.mark.parametrize("is_text", ["true", "false"])
@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ('{"text": "a", "number": 1}', {"text": "a", "number": 1}),
        ('{"other": 1}', None),
        ("{}", None),
        ("[1", None),
        ('{"number": NaN}', None),
        (SURROGATE, None),
    ],
)
def test_an_object_around_all_arguments_is_none_of_them(
    inner: str, expected: dict[str, Any] | None, is_text: str
) -> None:
    tag = f'<｜DSML｜parameter name="arguments" string="{is_text}">{inner}</｜DSML｜parameter>'
    text = f'<｜DSML｜invoke name="f">{tag}</｜DSML｜invoke>'
    if expected is None:
        is_json = is_text == "false" and inner in ("{}", '{"other": 1}', SURROGATE)
        expected = {"arguments": json.loads(inner) if is_json else inner}
    for way in ([text], [*text]):
        ((_, told),) = read(tool_parser("deepseek_v32", TOOLS), *way).calls
        assert told.encode() and json.loads(told) == expected


def test_texts_come_as_they_are_written_and_other_values_whole() -> None:
    reader = tool_parser("qwen3_coder", TOOLS)
    told = [reader.feed(text) for text in ("<function=f><parameter=text>", "xy", 'z"b', "</")]
    assert told[1:] == [[CallArguments(0, one)] for one in ('"text": "xy', 'z\\"b')] + [[]]
    # a tag has ended when the next character comes
    assert reader.feed("parameter><parameter=list>") == [CallArguments(0, '"')]
    assert reader.feed("[1,") == [CallArguments(0, ', "list": ')]
    assert reader.feed("2]</parameter>") == [] and reader.feed(" ") == [CallArguments(0, "[1,2]")]
