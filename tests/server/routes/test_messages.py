"""`/v1/messages` with a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.keys import ApiKey
from server.options import Options
from server.tools.choice import Parsers
from tests.server.fake_engine import FakeEngine
from tests.server.named_events import named_events
from tests.server.unconstrained import UnconstrainedEngine

ROUTE = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
USER: dict[str, Any] = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "hi"}


@pytest.fixture
def engine() -> UnconstrainedEngine:
    return UnconstrainedEngine(max_model_len=512)


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    app = create_app(engine, parsers=Parsers("hermes", True, "qwen3"))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def ask(client: TestClient, **fields: Any) -> Any:
    response = client.post(ROUTE, json={"messages": [USER], "max_tokens": 100} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: Any, status: int, kind: str, field: str = "") -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == kind
    assert field in body["error"]["message"]


def prompt(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.prompts[-1]))


def test_text(client: TestClient, engine: FakeEngine) -> None:
    told = ask(
        client, system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    )
    assert prompt(engine) == "[system]S[user]hi[assistant]"
    assert (
        told["type"] == "message"
        and told["role"] == "assistant"
        and told["model"] == "/models/fake"
    )
    assert told["content"] == [{"type": "text", "text": "hello"}]
    assert told["stop_reason"] == "end_turn" and told["stop_sequence"] is None
    assert told["usage"] == {
        "input_tokens": len(engine.prompts[-1]),
        "output_tokens": 5,
        "cache_read_input_tokens": None,
        "cache_creation_input_tokens": None,
    }
    assert ask(client, max_tokens=2)["stop_reason"] == "max_tokens"


def test_parameters(client: TestClient, engine: FakeEngine) -> None:
    ask(
        client,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        stop_sequences=["x"],
        metadata={"user_id": "a"},
    )
    params = engine.params[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert params.stop == ["x"] and engine.limits[-1] == 100


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls_are_blocks(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    engine.reply = f"<think>Hm</think>Yes {CALL}{CALL}"
    body = {"messages": [USER], "max_tokens": 200, "tools": [TOOL], "stream": stream}
    response = client.post(ROUTE, json=body)
    if not stream:
        told = response.json()
        assert [one["type"] for one in told["content"]] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        thought, text, call, other = told["content"]
        assert thought["thinking"] == "Hm" and text["text"].strip() == "Yes"
        assert call["name"] == "f" and call["input"] == {"a": 1} and call["id"] != other["id"]
        assert told["stop_reason"] == "tool_use"
        return
    events = named_events(response.content)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"]
    once = [name for at, name in enumerate(names) if name != names[at - 1]][2:]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == [*block * 4, "message_delta", "message_stop"]
    texts: dict[int, str] = {}
    for _, data in events:
        if data["type"] == "content_block_delta":
            (piece,) = (v for k, v in data["delta"].items() if k != "type")
            texts[data["index"]] = texts.get(data["index"], "") + piece
    assert texts[0] == "Hm" and texts[2] == texts[3] == '{"a":1}'
    delta = events[-2][1]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(engine.reply)


def test_thoughts_are_left_out_where_they_are_not_wanted(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.reply = "<think>Hm</think>Yes"
    (block,) = ask(client, thinking={"type": "disabled"})["content"]
    assert block["text"] == "Yes"
    assert len(ask(client, thinking={"type": "enabled", "budget_tokens": 10})["content"]) == 2


def test_a_call_that_is_cut_off(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = '{"a":"long text'
    told = ask(client, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}, max_tokens=10)
    assert told["content"][0]["input"] == {"a": "long"} and told["stop_reason"] == "max_tokens"


def test_arguments_that_are_no_object(client: TestClient, engine: FakeEngine) -> None:
    choice = {"type": "tool", "name": "f"}
    for engine.reply in ("[1]", '{"a":"\\ud800"}'):
        told = ask(client, tools=[TOOL], tool_choice=choice)
        assert told["content"][0]["input"] == {"arguments": engine.reply}


def test_blocks_become_messages(client: TestClient, engine: FakeEngine) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": ""},
                {"type": "text", "text": "A"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "R", "is_error": True},
                {"type": "text", "text": "U"},
            ],
        },
    ]
    seen: list[Any] = []
    render = engine.tokenizer.render_chat
    engine.tokenizer.render_chat = lambda given, **kw: (seen.append(given), render(given, **kw))[1]
    ask(client, messages=messages)
    user, assistant, tool, last = seen[0]
    assert user["content"] == "a\nb" and last == {"role": "user", "content": "U"}
    assert assistant["content"] == "A" and assistant["reasoning"] == "T"
    (call,) = assistant["tool_calls"]
    assert call["id"] == "c1" and call["function"] == {"name": "f", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "content": "Error: R", "tool_call_id": "c1"}


def test_an_answer_that_has_begun_goes_on(client: TestClient, engine: FakeEngine) -> None:
    ask(client, messages=[USER, {"role": "assistant", "content": "He"}])
    assert prompt(engine) == "[user]hi[assistant]He"


def test_tokens_are_counted(client: TestClient) -> None:
    body = {"messages": [USER], "system": "S", "tools": [TOOL]}
    counted = client.post(COUNT, json=body).json()
    told = ask(client, **body)
    assert counted == {"input_tokens": told["usage"]["input_tokens"]}
    refused(client.post(COUNT, json={"messages": []}), 400, "invalid_request_error", "messages")


def test_choices_of_tools(client: TestClient, engine: UnconstrainedEngine) -> None:
    engine.reply = '[{"name":"f","parameters":{"a":1}}]'
    choice = {"type": "any", "disable_parallel_tool_use": True}
    (block,) = ask(client, tools=[TOOL], tool_choice=choice)["content"]
    assert block["type"] == "tool_use" and block["input"] == {"a": 1}
    asked = engine.constraint
    assert asked is not None and asked.json["maxItems"] == 1
    (block,) = ask(client, tools=[TOOL], tool_choice={"type": "none"})["content"]
    assert block["type"] == "text"


def test_an_answer_of_a_schema(client: TestClient, engine: UnconstrainedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    asked = engine.constraint
    assert asked is not None and asked.json == schema


def test_a_request_of_claude_code(client: TestClient, engine: FakeEngine) -> None:
    """Every field that it is seen to send, with values of each kind."""
    ephemeral = {"type": "ephemeral"}
    seen: list[dict[str, Any]] = []
    render = engine.tokenizer.render_chat

    def note(given: Any, **fields: Any) -> str:
        seen.append({"messages": given, **fields})
        return str(render(given, **fields))

    engine.tokenizer.render_chat = note
    engine.reply = "Yes"
    loaded = [{"type": "text", "text": "found"}, {"type": "tool_reference", "tool_name": "f"}]
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f2"},
            {"type": "text", "text": "You are an agent.", "cache_control": ephemeral},
        ],
        "messages": [
            {"role": "user", "content": [{**TEXT, "cache_control": ephemeral}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "c2VjcmV0"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": None},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": loaded,
                        "cache_control": ephemeral,
                    }
                ],
            },
        ],
        "tools": [
            {**TOOL, "strict": True, "defer_loading": True, "eager_input_streaming": True}
            | {"input_examples": [{"a": 1}], "cache_control": ephemeral, "type": "custom"}
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "max_tokens": 100,
        "temperature": 1,
        "cache_control": ephemeral,
        "diagnostics": {"previous_message_id": "msg_1"},
        "stream": True,
    }
    answer = client.post(f"{ROUTE}?beta=true", json=body, headers={"anthropic-beta": "x"})
    events = named_events(answer.content)
    assert events[-2][1]["context_management"] == {"applied_edits": []}, answer.text
    assert seen[0]["reasoning_effort"] == "high" and seen[0]["enable_thinking"]
    system, user, call, result = seen[0]["messages"]
    assert system["content"] == "You are an agent." and user["content"] == "hi"
    assert call["tool_calls"][0]["id"] == "c" and result["content"] == "found\nf"
    assert seen[0]["tools"][0]["function"]["strict"] is True
    body = {name: body[name] for name in ("system", "messages", "tools", "context_management")}
    counted = client.post(COUNT, json=body).json()
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}
    assert ask(client, **body)["context_management"] == {"applied_edits": []}


@pytest.mark.parametrize(
    ("thinking", "told"),
    [
        ("enabled", {"enable_thinking": True}),
        ("disabled", {"enable_thinking": False}),
        ("adaptive", {}),
    ],
)
def test_templates_are_told_of_thinking(
    client: TestClient, engine: FakeEngine, thinking: str, told: dict[str, Any]
) -> None:
    seen: list[dict[str, Any]] = []
    engine.tokenizer.render_chat = lambda given, **fields: (seen.append(fields), "a")[1]
    ask(client, thinking={"type": thinking}, chat_template_kwargs={"b": 1})
    assert seen[0].items() >= (told | {"b": 1}).items()
    assert ("enable_thinking" in seen[0]) == bool(told)
    ask(client, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert seen[1]["enable_thinking"] is False and seen[1]["reasoning_effort"] == "low"


def test_late_messages_of_the_system(client: TestClient, engine: FakeEngine) -> None:
    """A template that takes none gets them all at its head."""
    messages = [USER, {"role": "system", "content": "T"}, USER]
    ask(client, system="S", messages=messages)
    assert prompt(engine) == "[system]S[user]hi[system]T[user]hi[assistant]"
    engine.tokenizer.takes_late_system = False
    ask(client, system="S", messages=messages)
    assert prompt(engine) == "[system]S\n\nT[user]hi[user]hi[assistant]"
    assert client.post(COUNT, json={"system": "S", "messages": messages}).status_code == 200


def test_usage_of_the_prefix_cache(engine: FakeEngine) -> None:
    """Of what begins a stream all is input; its end says what of it was cached and will be."""
    with TestClient(create_app(engine, options=Options(tells_cached_tokens=True))) as client:
        messages = [{"role": "user", "content": "x" * 100}]
        body = {"messages": messages, "max_tokens": 9}
        told = client.post(ROUTE, json=body).json()["usage"]
        events = named_events(client.post(ROUTE, json=body | {"stream": True}).content)
    begun, ended = events[0][1]["message"]["usage"], events[-2][1]["usage"]
    size, page = len(engine.prompts[-1]), engine.config.cache.page_size
    read, made = "cache_read_input_tokens", "cache_creation_input_tokens"
    assert begun == {"input_tokens": size, "output_tokens": 0, read: 0, made: 0}
    assert ended == told and ended[read] == 3 and ended[made] == size // page * page - 3 > 0
    assert ended["input_tokens"] + ended[read] + ended[made] == size


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages[0].content[0].type='document'",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        "server_tool_use",
    ),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "edits[0].type"),
    ({"context_management": {"edits": 1}}, "context_management.edits"),
    ({"output_format": {"type": "json_schema"}}, "output_format"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}],
                }
            ]
        },
        "messages[0].content[0].content[0].type",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 1}],
                }
            ]
        },
        "messages[0].content[0].input",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                }
            ]
        },
        "messages",
    ),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [USER] * 2049}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}]}, "parts"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type='web_search_20250305'",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type='bash_20250124'"),
    ({"tools": [{"name": "[.*", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
    ({"mcp_servers": [{"url": "http://127.0.0.1:1"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"output_config": {"effort": "much"}}, "output_config.effort"),
    ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": None}}},
        "output_config.format.schema",
    ),
    ({"temperature": -1.0}, "temperature"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"n": 2}, "n=2"),
    ({"stop": ["a"]}, "stop="),
]


@pytest.mark.parametrize(
    ("fields", "field"), REFUSED, ids=lambda one: one if isinstance(one, str) else ""
)
def test_refusals(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], field: str
) -> None:
    body = {"messages": [USER], "max_tokens": 9} | fields
    refused(client.post(ROUTE, json=body), 400, "invalid_request_error", field)
    assert not engine.started


def test_clients_go_on_without_a_thread(client: TestClient) -> None:
    body = {"messages": [USER], "max_tokens": 9, "thread": {"type": "create"}}
    response = client.post(ROUTE, json=body)
    refused(response, 400, "invalid_request_error", "thread")
    assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_errors_have_anthropics_shape(engine: FakeEngine) -> None:
    body = {"messages": [USER], "max_tokens": 9}
    app = create_app(engine, api_keys=[ApiKey("k", "a", requests_per_minute=6)])
    with TestClient(app, raise_server_exceptions=False) as client:
        refused(client.post(ROUTE, json=body), 401, "authentication_error")
        refused(
            client.post(COUNT, json=body, headers={"x-api-key": "other"}),
            401,
            "authentication_error",
        )
        client.headers["x-api-key"] = "k"
        assert client.post(ROUTE, json=body).status_code == 200
        refused(client.post(ROUTE, json=body | {"model": "other"}), 404, "not_found_error")
        refused(client.post(f"{ROUTE}/other", json=body), 404, "not_found_error")
        refused(client.get(ROUTE), 405, "invalid_request_error")
        engine.room_error = RuntimeError("secret")
        refused(client.post(ROUTE, json=body), 500, "api_error")
        engine.is_ready = False
        refused(client.post(ROUTE, json=body), 503, "overloaded_error")
        refused(client.post(ROUTE, json=body), 429, "rate_limit_error")


def test_a_failure_in_a_stream(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_after = 2
    body = {"messages": [USER], "max_tokens": 9, "stream": True}
    name, data = named_events(client.post(ROUTE, json=body).content)[-1]
    assert name == "error" and data["error"]["type"] == "api_error" and "secret" not in str(data)


@pytest.mark.parametrize(
    ("reason", "kind", "status"),
    [("timeout", "timeout_error", 504), (None, "overloaded_error", 503)],
)
def test_an_answer_that_is_ended_early_is_an_error(
    client: TestClient, engine: FakeEngine, reason: str | None, kind: str, status: int
) -> None:
    engine.abort_after, engine.abort_reason = 2, reason
    body = {"messages": [USER], "max_tokens": 9, "timeout": 9}
    name, data = named_events(client.post(ROUTE, json=body | {"stream": True}).content)[-1]
    assert name == "error" and data["error"]["type"] == kind
    whole = client.post(ROUTE, json=body)
    assert whole.json()["error"]["type"] == kind and whole.status_code == status
