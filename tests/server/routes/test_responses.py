"""`/v1/responses` with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.client_limits import Limits
from server.unread_answers import PIECE_BYTES
from tests.server.fake_engine import FakeEngine
from tests.server.named_events import named_events
from tests.server.routes.responses import PARSERS, ROUTE, ask, prompt
from tests.server.test_errors import assert_error
from tests.server.test_event_stream import Connection, wait_for
from tests.server.unconstrained import UnconstrainedEngine

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "stream": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def engine() -> UnconstrainedEngine:
    return UnconstrainedEngine(max_model_len=512)


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, parsers=PARSERS), raise_server_exceptions=False) as client:
        yield client


def test_text(client: TestClient, engine: FakeEngine) -> None:
    told = ask(client, instructions="Be short.", metadata={"a": "b"}, temperature=0.5)
    assert prompt(engine) == "[system]Be short.[user]hi[assistant]"
    assert told["object"] == "response" and told["status"] == "completed"
    (item,) = told["output"]
    assert item["type"] == "message" and item["role"] == "assistant"
    assert item["content"] == [{"type": "output_text", "text": "hello", "annotations": []}]
    assert told["instructions"] == "Be short." and told["metadata"] == {"a": "b"}
    assert told["temperature"] == 0.5 == engine.params[-1].temperature
    assert told["usage"] == {
        "input_tokens": len(engine.prompts[-1]),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(engine.prompts[-1]) + 5,
    }


def test_cut_off(client: TestClient) -> None:
    told = ask(client, max_output_tokens=2)
    assert told["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told["output"][0]["status"] == "incomplete"
    events = named_events(
        client.post(ROUTE, json={"input": "a", "max_output_tokens": 2, "stream": True}).content
    )
    assert events[-1][0] == "response.incomplete"


def test_items_become_messages(client: TestClient, engine: FakeEngine) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "T"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "R"},
    ]
    seen: list[Any] = []
    render = engine.tokenizer.render_chat
    engine.tokenizer.render_chat = lambda messages, **kw: (
        seen.append(messages),
        render(messages, **kw),
    )[1]
    ask(client, input=items, instructions="I")
    system, user, assistant, tool = seen[0]
    assert system == {"role": "system", "content": "I\n\nD"} and user["content"] == "U"
    assert assistant["content"] == "A" and assistant["reasoning"] == "T"
    assert [one["id"] for one in assistant["tool_calls"]] == ["c1", "c2"]
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "content": "R", "tool_call_id": "c1"}


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls_are_items(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    engine.reply = f"<think>Hm</think>Yes {CALL}{CALL}"
    given = {"input": "hi", "tools": [TOOL], "stream": stream}
    response = client.post(ROUTE, json=given)
    told = named_events(response.content)[-1][1]["response"] if stream else response.json()
    assert [one["type"] for one in told["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    thought, message, call, other = told["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert message["content"][0]["text"].strip() == "Yes"
    assert call["name"] == "f" and call["arguments"] == '{"a":1}' and call["status"] == "completed"
    assert call["call_id"] != other["call_id"] and call["id"].startswith("fc_")
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert "(f)" in prompt(engine)


def test_the_order_of_events(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = f"<think>Hm</think>Yes{CALL}"
    events = named_events(
        client.post(ROUTE, json={"input": "a", "tools": [TOOL], "stream": True}).content
    )
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in events]
    once = [name for at, name in enumerate(names) if name != names[at - 1]]
    content = ["content_part.added", "{0}.delta", "{0}.done", "content_part.done"]
    assert once == [
        "created",
        "in_progress",
        *("output_item.added", *(one.format("reasoning_text") for one in content)),
        "output_item.done",
        *("output_item.added", *(one.format("output_text") for one in content)),
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    final = events[-1][1]["response"]
    for name, data in events:
        if "output_index" in data and "item_id" in data:
            assert final["output"][data["output_index"]]["id"] == data["item_id"]
        if name == "response.output_item.added":
            item = data["item"]
            assert item.get("arguments", "") == "" and item.get("content", []) in ([], None), item
        if name == "response.content_part.added":
            assert data["part"]["text"] == ""
        if name == "response.output_item.done":
            assert final["output"][data["output_index"]] == data["item"]
    assert (
        events[0][1]["response"]["output"] == [] and events[0][1]["response"]["id"] == final["id"]
    )
    arguments = [data["delta"] for name, data in events if "arguments.delta" in name]
    assert "".join(arguments) == '{"a":1}' and len(arguments) > 3


def test_a_failure_in_a_stream(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_after = 2
    events = named_events(client.post(ROUTE, json={"input": "a", "stream": True}).content)
    name, data = events[-1]
    assert name == "response.failed" and data["response"]["status"] == "failed"
    assert "secret" not in str(data) and data["sequence_number"] == len(events) - 1


def test_formats_of_the_text(client: TestClient, engine: UnconstrainedEngine) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    told = ask(client, text={"format": form, "verbosity": "low"})
    asked = engine.constraint
    assert asked is not None and asked.json == SCHEMA and told["text"]["format"] == form
    assert asked.disable_additional_properties
    ask(client, text={"format": form | {"strict": False}})
    assert engine.constraint == replace(asked, disable_additional_properties=False)
    ask(client, text={"format": {"type": "json_object"}})
    asked = engine.constraint
    assert asked is not None and asked.json_object
    ask(client, text={"format": {"type": "text"}})
    assert engine.constraint is None


def test_choices_of_tools(client: TestClient, engine: UnconstrainedEngine) -> None:
    engine.reply = '[{"name":"f","parameters":{"a":1}}]'
    (item,) = ask(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)["output"]
    assert item["type"] == "function_call" and item["arguments"] == '{"a":1}'
    asked = engine.constraint
    assert asked is not None and asked.json["maxItems"] == 1
    engine.reply = '{"a":2}'
    named = {"type": "function", "name": "f"}
    (item,) = ask(client, tools=[TOOL], tool_choice=named)["output"]
    assert item["name"] == "f" and item["arguments"] == '{"a":2}'
    (item,) = ask(client, tools=[TOOL], tool_choice="none")["output"]
    assert item["type"] == "message"


def test_logprobs() -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with TestClient(create_app(FakeEngine(max_model_len=512))) as client:
        told = ask(client, **fields)["output"][0]["content"][0]["logprobs"]
        assert [one["token"] for one in told] == list("hello") and len(told[0]["top_logprobs"]) == 2
        body = {"input": "a", "stream": True, **fields}
        events = named_events(client.post(ROUTE, json=body).content)
        deltas = [data for name, data in events if name.endswith("output_text.delta")]
        assert [one["logprobs"][0] for one in deltas] == told
        assert events[-1][1]["response"]["output"][0]["content"][0]["logprobs"] == told
        assert "logprobs" not in ask(client, top_logprobs=2)["output"][0]["content"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_text_has_all_logprobs(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    """Those of thoughts and calls too, as a chat completion's choice."""
    engine.reply = f"<think>Hm</think>Yes{CALL}No"
    body = {"input": "a", "tools": [TOOL], **LOGPROBS, "top_logprobs": 0, "stream": stream}
    answer = client.post(ROUTE, json=body)
    told = named_events(answer.content)[-1][1]["response"] if stream else answer.json()
    texts = [one["content"][0] for one in told["output"] if one["type"] == "message"]
    assert [one["text"] for one in texts] == ["Yes", "No"]
    assert "".join(one["token"] for one in texts[0]["logprobs"]) == engine.reply
    assert texts[1]["logprobs"] == []


def test_a_format_is_that_of_texts_beside_a_demanded_call(
    client: TestClient, engine: UnconstrainedEngine
) -> None:
    engine.reply = '{"a":1}'
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    choice = {"type": "function", "name": "f"}
    (call,) = ask(client, tools=[TOOL], tool_choice=choice, text=text)["output"]
    assert call["type"] == "function_call" and call["arguments"] == '{"a":1}'
    assert engine.constraint is not None and engine.constraint.json == TOOL["parameters"]
    ask(client, tools=[TOOL], text=text)
    assert engine.constraint.json == SCHEMA


def test_an_output_goes_on_as_input(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = f"<think>Hm</think>Yes{CALL}"
    earlier = ask(client, tools=[TOOL])["output"]
    assert [one["type"] for one in earlier] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": earlier[2]["call_id"], "output": "R"}
    user = {"type": None, "role": "user", "content": "hi", "id": "msg_1", "status": "completed"}
    seen: list[Any] = []
    engine.tokenizer.render_chat = lambda given, **kw: (seen.append(given), "a")[1]
    ask(client, input=[user, *earlier, {**result, "id": None, "status": "completed"}])
    _, assistant, tool = seen[0]
    assert assistant["content"] == "Yes" and assistant["reasoning"] == "Hm"
    assert tool["tool_call_id"] == assistant["tool_calls"][0]["id"] == earlier[2]["call_id"]


def test_a_text_that_was_cut_off_goes_on(client: TestClient, engine: FakeEngine) -> None:
    (cut,) = ask(client, max_output_tokens=2)["output"]
    ask(client, input=[{"role": "user", "content": "hi"}, cut])
    assert prompt(engine) == "[user]hi[assistant]he"
    ask(client, input=[{"role": "user", "content": "hi"}, {**cut, "status": "completed"}])
    assert prompt(engine) == "[user]hi[assistant]he[assistant]"


def test_input_tokens(client: TestClient, engine: FakeEngine) -> None:
    body = {"input": "hi", "instructions": "S", "tools": [TOOL]}
    told = ask(client, **body)
    size = told["usage"]["input_tokens"]
    counted = client.post(f"{ROUTE}/input_tokens", json=body)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": size}
    more = {"input": "hi", "previous_response_id": told["id"]}
    assert client.post(f"{ROUTE}/input_tokens", json=more).json()["input_tokens"] > len("hihello")
    assert_error(client.post(f"{ROUTE}/input_tokens", json={"model": "x"}), 400, "input")
    assert_error(client.post(f"{ROUTE}/input_tokens", json=body | {"model": "x"}), 404, "model")
    assert len(engine.started) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_raw_messages(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    engine.reply = "<think>Hm</think>Yes"
    body = {"input": "hi", "enable_response_messages": True, "stream": stream}
    answer = client.post(ROUTE, json=body)
    told = named_events(answer.content)[-1][1]["response"] if stream else answer.json()
    for name, text in (("input", prompt(engine)), ("output", engine.reply)):
        tokens = [*map(ord, text)]
        kind = {"type": "raw_message_tokens"}
        assert told[f"{name}_messages"] == [{"message": text, "tokens": tokens, **kind}]
    assert "input_messages" not in ask(client)


def test_reasoning_of_responses(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "<think>Hm</think>Yes"
    (item,) = ask(client, include_reasoning=False, vllm_xargs={})["output"]
    assert item["type"] == "message"
    seen: list[dict[str, Any]] = []
    engine.tokenizer.render_chat = lambda given, **fields: (seen.append(fields), "a")[1]
    for effort, thinks in (("high", True), ("none", False)):
        ask(client, reasoning={"effort": effort})
        assert seen[-1].items() >= {"reasoning_effort": effort, "enable_thinking": thinks}.items()
    ask(client, reasoning={"effort": "high"}, chat_template_kwargs={"enable_thinking": 0})
    assert seen[-1]["enable_thinking"] == 0


def test_logprobs_of_a_stream_are_kept_once_and_counted() -> None:
    """They are told three times more at its end."""

    class Stuck(Connection):
        num_bytes, is_stuck, reads = 0, False, asyncio.Event()

        async def send(self, message: dict[str, Any]) -> None:
            if b"output_text.done" in bytes(message.get("body", b"")):
                self.is_stuck = True
                await self.reads.wait()
            self.num_bytes += 0 if self.is_stuck else len(message.get("body", b""))
            await super().send(message)

    async def main() -> None:
        app = create_app(FakeEngine("x" * 300, max_model_len=512))
        stuck = Stuck(ROUTE, {"input": "a", **LOGPROBS})
        call = asyncio.create_task(app(stuck.scope, stuck.receive, stuck.send))
        await wait_for(lambda: stuck.is_stuck)
        unread = app.state.service.unread
        assert stuck.num_bytes > 300_000 and 0.6 < unread.num_bytes / stuck.num_bytes < 1.0
        stuck.reads.set()
        await call
        assert unread.num_bytes == 0
        sizes = [len(one["body"]) for one in stuck.sent[1:]]
        assert max(sizes) < 2 * PIECE_BYTES
        events = named_events(b"".join(bytes(one["body"]) for one in stuck.sent[1:]))
        told = [one for _, data in events for one in data.get("logprobs", ())]
        assert len(told) == 600 and told[:300] == told[300:]
        assert events[-1][1]["response"]["output"][0]["content"][0]["logprobs"] == told[:300]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_one_answer_are_bounded(stream: bool) -> None:
    limits = Limits(max_unread_answer_bytes=40_000)
    with TestClient(create_app(FakeEngine("x" * 100, max_model_len=512), limits=limits)) as client:
        body = {"input": "a", **LOGPROBS, "stream": stream}
        response = client.post(ROUTE, json=body)
        if stream:
            name, data = named_events(response.content)[-1]
            assert name == "response.failed"
            message = data["response"]["error"]["message"]
        else:
            message = assert_error(response, 400)
        assert "--max-unread-answer-bytes" in message and "logprobs" in message
        assert client.app.state.service.unread.num_bytes == 0  # type: ignore[attr-defined]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, {"type": "file_search", "vector_store_ids": []}]}, "tools[1].type"),
    ({"tools": [{"type": "mcp", "server_url": "http://127.0.0.1:1"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "[.*"}]}, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
    (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc"}]}
            ]
        },
        "input[0].content[0].type",
    ),
    ({"input": [{"role": "user", "content": "a"}] * 2049}, "input"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 2049}]},
        "input[0].content",
    ),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"speed": 1}}, "text.speed"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"background": True, "stream": True}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "3"}, "max_output_tokens"),
    ({"n": 2}, "n"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"max_tokens": 9}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"temperature": -1}, "temperature"),
    ({"metadata": {"a" * 65: "b"}}, f"metadata.{'a' * 64}"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"input": "x" * 600}, "input"),
    ({"model": "other"}, "model"),
    ({"request_id": "a b"}, "request_id"),
]


@pytest.mark.parametrize(
    ("fields", "field"), REFUSED, ids=lambda one: one if isinstance(one, str) else ""
)
def test_refusals(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], field: str
) -> None:
    status = 404 if field == "model" else 400
    assert_error(client.post(ROUTE, json={"input": "a"} | fields), status, field)
    assert not engine.started


def test_a_background_answer_that_is_not_kept_is_refused_in_vllms_words(client: TestClient) -> None:
    answer = client.post(ROUTE, json={"input": "a", "background": True, "store": False})
    assert "background can only be used when `store` is true" in answer.json()["error"]["message"]


def test_what_has_no_effect_is_accepted(client: TestClient) -> None:
    ask(
        client,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        user="me",
        safety_identifier="me",
        prompt_cache_key="x",
        service_tier="flex",
        truncation="disabled",
        max_tool_calls=3,
        tools=[],
        unknown=1,
    )
