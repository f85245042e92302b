"""Tools in the chat template: what training conversations say, and any tool that a client has."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checkpoints.tiny.corpus import encode_conversation, encode_question
from checkpoints.tiny.tasks import TASKS
from checkpoints.tiny.tokenizer import END_ID
from checkpoints.tiny.tool_text import Tool, call_text, result_text, system_text
from tests.checkpoints.tiny.bundled import FOLDER

RAW = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
ADD = Tool("add", (("a", "integer"), ("b", "integer?")), "Add two numbers.")
FIND = Tool("find", (("key", "string"),))
USER = {"role": "user", "content": "Add 2 and 3."}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_are_listed_in_the_system_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    tools = [ADD, FIND]
    listing = (
        'Tools:\nAdd two numbers. {"name": "add", "arguments": {"a": integer, "b": integer?}}\n'
        '{"name": "find", "arguments": {"key": string}}'
    )
    for system in ("", "Be brief."):
        messages = [*([{"role": "system", "content": system}] if system else []), USER]
        text = tokenizer.apply_chat_template(
            messages, tools=[tool.schema for tool in tools], tokenize=False
        )
        said = system_text(tools, system)
        assert said == (f"{system}\n\n{listing}" if system else listing)
        assert text == f"<|begin|><|system|>{said}<|end|><|user|>Add 2 and 3.<|end|>"


@pytest.mark.parametrize("arguments", [{"a": 2, "b": 3}, '{"a": 2, "b": 3}'])
def test_calls_and_results(tokenizer: PreTrainedTokenizerFast, arguments: Any) -> None:
    calls = [_call("add", arguments), _call("find", {"key": "Zürich"})]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "5\n"},
        {"role": "tool", "tool_call_id": "2", "content": "x"},
        {"role": "assistant", "content": "Now", "tool_calls": calls[:1]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    add, find = call_text("add", {"a": 2, "b": 3}), call_text("find", {"key": "Zürich"})
    assert text == (
        f"<|begin|><|user|>Add 2 and 3.<|end|><|assistant|>{add}\n{find}<|end|>"
        f"<|user|>{result_text('5')}\n{result_text('x')}<|end|><|assistant|>Now\n{add}<|end|>"
    )
    assert json.loads(add.split("\n")[1]) == {"name": "add", "arguments": {"a": 2, "b": 3}}


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.with_tools])
def test_training_conversations_are_what_the_template_gives(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    rng = Random(6)
    for _ in range(20):
        pair = TASKS[name].draw(rng)
        messages: list[dict[str, Any]] = [{"role": "system", "content": pair.system}]
        for turn in (*pair.before, pair):
            begin, end = "<tool_response> ", " </tool_response>"
            if turn.prompt.startswith(begin):
                result = turn.prompt.removeprefix(begin).removesuffix(end)
                messages.append({"role": "tool", "content": result})
            else:
                messages.append({"role": "user", "content": turn.prompt})
            if turn.answer.startswith("<tool_call>"):
                call = json.loads(turn.answer.split("\n")[1])
                calls = [_call(call["name"], call["arguments"])]
                messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            else:
                messages.append({"role": "assistant", "content": turn.answer})
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == encode_conversation(RAW, [*pair.before, pair], pair.system).ids
        question = encode_question(RAW, pair)
        assert question.ids == ids
        counted = [token for token, counts in zip(ids, question.learn) if counts]
        assert counted == [*RAW.encode(pair.answer, add_special_tokens=False).ids, END_ID]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = ("type", "properties", "required", "anyOf", "$ref", "enum", "items", "x")
SCHEMAS = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5) | st.fixed_dictionaries(
    {
        "properties": st.dictionaries(
            st.text(max_size=8), JSON | st.fixed_dictionaries({"type": JSON}), max_size=8
        )
    }
)


@given(parameters=JSON | SCHEMAS, description=st.none() | st.text(max_size=200))
@settings(max_examples=40, deadline=None)
def test_any_schema_renders(
    tokenizer: PreTrainedTokenizerFast, parameters: Any, description: str | None
) -> None:
    function = {"name": "f", "parameters": parameters, "description": description}
    for tool in ({"type": "function", "function": function}, {"type": "function", **function}):
        text = tokenizer.apply_chat_template([USER], tools=[tool], tokenize=False)
        assert '{"name": "f", "arguments": {' in text and text.endswith("Add 2 and 3.<|end|>")
        assert len(text) < 800  # eight names of eight characters, each written as six


def test_other_roles_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TemplateError, match="not function"):
        tokenizer.apply_chat_template([{"role": "function", "content": "x"}], tokenize=False)
