"""Tools and reasoning over chat completions, with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.client.input_processor import PreparedRequest
from jaxserve.errors import ValidationError
from jaxserve.outputs import GRAMMAR, CompletionOutput, RequestOutput
from jaxserve.params.sampling_params import RequestOutputKind
from server.app import create_app
from server.protocol.tool_messages import MAX_CALLS, rendered_calls
from server.protocol.tools import asked_tools
from server.tools.choice import Parsers
from tests.server.fake_engine import FakeEngine
from tests.server.sse import events

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 150}
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=256)


@pytest.fixture
def client(engine: FakeEngine):
    parsers = Parsers("hermes", True, "qwen3")
    with TestClient(create_app(engine, parsers=parsers), raise_server_exceptions=False) as client:
        yield client


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json=BODY | fields)


def test_a_call_is_found_whole_and_in_pieces(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = f"Hm. {CALL}"
    (choice,) = post(client, tools=[TOOL]).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Hm."
    assert call["function"] == {"name": "f", "arguments": '{"a":1}'} and call["type"] == "function"
    assert call["id"].startswith("call_")
    deltas = [c["choices"][0] for c in events(post(client, tools=[TOOL], stream=True).content)]
    content = "".join(d["delta"].get("content") or "" for d in deltas)
    calls = [call for d in deltas for call in d["delta"].get("tool_calls", ())]
    assert content == "Hm." and deltas[-1]["finish_reason"] == "tool_calls"
    assert calls[0]["function"]["name"] == "f" and calls[0]["id"] != call["id"]
    assert "".join(one["function"]["arguments"] for one in calls) == '{"a":1}'
    assert len(calls) > 3, "arguments come as they are written"
    assert not engine.params[-1].skip_special_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_max_tokens_cuts_off_is_not_whole(engine: FakeEngine, stream: bool) -> None:
    begin, end = "<function=f><parameter=a>1</parameter>", "</function>"
    app = create_app(engine, parsers=Parsers("qwen3_coder", True, None))
    with TestClient(app) as client:
        for engine.reply, most, wanted in (
            (begin, 150, '{"a": "1"}'),
            (begin + end, len(begin), '{"a": "1"'),
        ):
            response = post(client, tools=[TOOL], max_tokens=most, stream=stream)
            told = events(response.content) if stream else [response.json()]
            said = [one["choices"][0]["delta" if stream else "message"] for one in told]
            calls = [call for one in said for call in one.get("tool_calls", ())]
            assert "".join(one["function"]["arguments"] for one in calls) == wanted


def test_one_call_where_only_one_is_wanted(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = CALL + CALL
    both = post(client, tools=[TOOL]).json()["choices"][0]["message"]["tool_calls"]
    one = post(client, tools=[TOOL], parallel_tool_calls=False).json()
    assert len(both) == 2 and len(one["choices"][0]["message"]["tool_calls"]) == 1


def test_thoughts_are_a_field_of_their_own(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "<think>Hm</think>Yes"
    (choice,) = post(client).json()["choices"]
    assert choice["message"]["reasoning"] == "Hm" and choice["message"]["content"] == "Yes"
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    (choice,) = post(client, include_reasoning=False).json()["choices"]
    assert choice["message"]["reasoning"] is None and choice["message"]["content"] == "Yes"
    deltas = [c["choices"][0]["delta"] for c in events(post(client, stream=True).content)]
    assert "".join(d.get("reasoning") or "" for d in deltas) == "Hm"
    assert "".join(d.get("content") or "" for d in deltas) == "Yes"


def test_a_constrained_answer_has_no_thoughts() -> None:
    asked = asked_tools([TOOL], "required", None)
    parsers = Parsers("hermes", True, "deepseek_r1")
    for thinks, content in [(True, None), (False, "{}")]:
        reader = parsers.reader(
            asked_tools(None, None, None), "", thinks=thinks, tells_reasoning=True
        )
        assert reader.message("{}").get("content") == content
    reader = parsers.reader(asked, "", thinks=False, tells_reasoning=True)
    (call,) = reader.message('[{"name":"f","parameters":{}}]')["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}


def test_the_schema_of_demanded_calls() -> None:
    reference = {"$ref": "#/$defs/X"}
    schema = {"properties": {"default": reference, "a": {"default": reference}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for parallel, most in ((None, MAX_CALLS), (False, 1)):
        asked = asked_tools([tool], "required", parallel).constraint()
        assert asked is not None and isinstance(asked.params.json, dict)
        assert asked.params.json["maxItems"] == most, "as many as a message may come back with"
    found = asked.params.json["$defs"]["tool_0"]["properties"]
    assert found["default"] == {"$ref": "#/$defs/tool_0/$defs/X"}, "the name of a property"
    assert found["a"]["default"] == reference, "a value"


def test_arguments_that_are_nested_too_deep(client: TestClient) -> None:
    deep = "[" * 600 + "]" * 600
    call = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": {deep}}}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    refused = post(client, messages=messages)
    assert refused.status_code == 400 and "deeper" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        ('{"a":1}', {"a": 1}),
        ('{"a":', {"arguments": '{"a":'}),
        ("[1]", {"arguments": "[1]"}),
        ("", {}),
        ("null", {}),
    ],
)
def test_a_call_that_was_cut_off_does_not_end_the_conversation(
    written: str, rendered: dict[str, Any]
) -> None:
    (call,) = rendered_calls([{"function": {"name": "f", "arguments": written}}], "x")
    assert call["function"]["arguments"] == rendered


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1" + "0" * 400 + ".5"])
def test_numbers_that_no_response_could_tell(client: TestClient, number: str) -> None:
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {number}}}}}}}'
    content = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'
    headers = {"content-type": "application/json"}
    refused = client.post("/v1/chat/completions", content=content, headers=headers)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


def test_history_is_rendered(client: TestClient, engine: FakeEngine) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    assert post(client, messages=messages, tools=[TOOL]).status_code == 200
    assert "".join(map(chr, engine.prompts[-1])) == "(f)[assistant][tool]7[assistant]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": "f"}, "tools"),
        ({"tools": [TOOL] * 2}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "structured_outputs": {"json_object": True},
            },
            "tool_choice",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": "text"}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, 3]}]},
            "messages[0].tool_calls[1]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": [1]}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_bad_fields_are_refused_by_name(client: TestClient, fields, param: str) -> None:
    response = post(client, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


class FailingEngine(FakeEngine):
    """Its grammar allows nothing behind the second token."""

    async def stream(self, prepared: PreparedRequest) -> AsyncIterator[RequestOutput]:
        ended = (
            (None, "error")
            if prepared.params.output_kind is RequestOutputKind.DELTA
            else ("error",)
        )
        for reason in ended:
            made = CompletionOutput(0, "a", [97], finish_reason=reason, stop_reason=GRAMMAR)
            yield RequestOutput("x", None, [1], [made], reason is not None)


def test_a_constraint_that_fails_is_an_error() -> None:
    with TestClient(
        create_app(FailingEngine(max_model_len=256)), raise_server_exceptions=False
    ) as client:
        whole = post(client)
        assert whole.status_code == 400
        assert whole.json()["error"]["param"] == "structured_outputs"
        told = events(post(client, stream=True).content)
        assert told[-2]["choices"][0]["delta"]["content"] == "a"
        assert told[-1]["error"]["param"] == "structured_outputs"


def test_auto_needs_its_flags(engine: FakeEngine) -> None:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        error = post(client, tools=[TOOL]).json()["error"]
        assert error["param"] == "tool_choice" and "--tool-call-parser" in error["message"]
        assert post(client, tools=[TOOL], tool_choice="none").status_code == 200
    with pytest.raises(ValidationError, match="tool_call_parser"):
        Parsers(is_auto=True)
