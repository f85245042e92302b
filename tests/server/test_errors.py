"""Every bad request gets its status and the OpenAI error body, quickly and briefly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.errors import CompilerBusyError, PausedError
from jaxserve.outputs import ERROR, NOT_COMPILED, CompletionOutput, RequestOutput
from jaxserve.params.sampling_params import TOKEN_FIELDS
from server.answers import check_served
from server.app import create_app
from server.client_limits import Limits
from server.errors import ApiError, as_api_error
from tests.server.fake_engine import FakeEngine

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK_CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def assert_error(response: Any, status: int, param: str | None = None) -> str:
    """The body has exactly the documented shape; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 8192
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status and body["error"]["param"] == param
    assert body["error"]["message"] and body["error"]["type"].endswith("Error")
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True, False]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [0x110000]}, "prompt"),
        ({"prompt": [[1], [10**18]]}, "prompt"),
        ({"prompt": ["a"] * 100_000}, "prompt"),
        ({"prompt": "a" * 64}, "prompt"),
        ({"prompt": "a" * 1_000_000}, "prompt"),
        ({"prompt": [1] * 100_000}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1_000_000_000}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"n": 100, "prompt": ["a"] * 1000}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": {"a": ["x" * 1000] * 1000}}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": list(range(100_000))}, "stop"),
        ({"stop_token_ids": [0x110000]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"] * 100_000}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [0x110000]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "much"}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(0x110000): 1}}, "logit_bias"),
        ({"logit_bias": {f"k{i}": [] for i in range(50_000)}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "x" * 65536}, "request_id"),
        ({"priority": 2**63}, "priority"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 21}, "n"),  # max_logprobs is 20
        ({"use_beam_search": True, "n": 2, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "skip_special_tokens": False}, "skip_special_tokens"),
        ({"use_beam_search": True, "early_stopping": "now"}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": 1}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"early_stopping": [1]}, "early_stopping"),
        ({"use_beam_search": True, "length_penalty": 99.0}, "length_penalty"),
        ({"use_beam_search": True, "shrink_under_pressure": 1}, "shrink_under_pressure"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"shrink_under_pressure": True}, "shrink_under_pressure"),
        ({"prompt_embeds": "gASV"}, "prompt_embeds"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"guided_regex": "(a+)+b"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),  # without logprobs
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "up"}, "truncation_side"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"model": 3}, "model"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_bad_completion_fields(client: TestClient, fields: dict[str, Any], param: str) -> None:
    message = assert_error(client.post(COMPLETIONS, json={"prompt": "abc", **fields}), 400, param)
    assert param in message
    assert client.post(COMPLETIONS, json={"prompt": "abc"}).status_code == 200


@pytest.mark.parametrize("name", TOKEN_FIELDS)
def test_more_tokens_than_the_model_has(client: TestClient, engine: FakeEngine, name: str) -> None:
    engine.model_config.vocab_size = 4
    ids = [0, 1, 2, 3, 0]
    many = {str(i): 1 for i in range(5)} if name == "logit_bias" else ids
    for path, body in ((COMPLETIONS, {"prompt": [1]}), (CHAT, OK_CHAT)):
        body = {**body, "logprobs": path == CHAT or 1, name: many}
        message = assert_error(client.post(path, json=body), 400, name)
        assert "5 tokens" in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1] * 100_000}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a" * 64}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 65}, "max_completion_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": 0}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"n": 1_000_000_000}, "n"),
        ({"temperature": 3}, "temperature"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_bad_chat_fields(client: TestClient, fields: dict[str, Any], param: str) -> None:
    message = assert_error(client.post(CHAT, json={**OK_CHAT, **fields}), 400, param)
    assert param in message
    assert client.post(CHAT, json=OK_CHAT).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"{" * 100_000,
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"\\ud800","messages":[],"tokens":[]}',
        b'{"n":' + b"9" * 100_000 + b"}",
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bodies_that_are_no_json_object(client: TestClient, path: str, content: bytes) -> None:
    assert_error(client.post(path, content=content, headers=JSON), 400)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "min_p"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_not_finite(client: TestClient, field: str, value: str) -> None:
    content = f'{{"prompt": "a", "{field}": {value}}}'
    assert_error(client.post(COMPLETIONS, content=content, headers=JSON), 400, field)
    content = f'{{"prompt": "a", "logit_bias": {{"1": {value}}}}}'
    assert_error(client.post(COMPLETIONS, content=content, headers=JSON), 400, "logit_bias")


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400"])
@pytest.mark.parametrize("place", ['{{"a": [1, {{"b": {}}}]}}', "[[{}]]"])
def test_numbers_that_are_not_finite_inside_of_others(
    client: TestClient, place: str, value: str
) -> None:
    """What is told back as it was would be no JSON."""
    content = f'{{"input": "a", "metadata": {{}}, "tools": {place.format(value)}}}'
    message = assert_error(
        client.post("/v1/responses", content=content, headers=JSON), 400, "tools"
    )
    assert "not finite" in message


def test_the_missing_field_is_named(client: TestClient) -> None:
    assert "prompt: field required" in assert_error(
        client.post(COMPLETIONS, json={}), 400, "prompt"
    )
    assert_error(client.post(CHAT, json={}), 400, "messages")


def test_many_errors_are_summarised(client: TestClient) -> None:
    fields = ("n", "seed", "top_k", "min_tokens", "temperature", "top_p", "min_p", "priority",
              "echo", "ignore_eos", "stream", "bad_words", "model")  # fmt: skip
    body = {"prompt": "a", **{field: {"x": "secret" * 100} for field in fields}}
    message = assert_error(client.post(COMPLETIONS, json=body), 400, "model")
    assert message.count("got an object") == 10 and message.endswith("and 3 more")
    assert "secret" not in message


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_words", "stop"])
def test_a_list_stops_at_its_first_error(client: TestClient, field: str) -> None:
    """Else a small body would cost as many error lines as it has elements."""
    response = client.post(COMPLETIONS, json={"prompt": "a", field: [{}] * 50_000})
    message = assert_error(response, 400, field)
    assert message.count("got ") <= 2 and "more" not in message


def test_long_inputs_are_cut(client: TestClient) -> None:
    message = assert_error(
        client.post(COMPLETIONS, json={"prompt": "a", "n": "y" * 100_000}), 400, "n"
    )
    assert "y" * 150 in message and "y" * 201 not in message


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "x", ""])
def test_other_content_types(client: TestClient, kind: str) -> None:
    headers = {"content-type": kind}
    response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert kind in assert_error(response, 400)


def test_the_context_is_explained(client: TestClient) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "a" * 70, "add_special_tokens": False})
    message = assert_error(response, 400, "prompt")
    assert "70" in message and "64 tokens" in message


def test_unknown_model(client: TestClient) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, OK_CHAT)):
        response = client.post(path, json={**body, "model": "gpt-x"})
        assert "org/fake" in assert_error(response, 404, "model")
    assert_error(client.get("/v1/models/gpt-x"), 404, "model")


def test_routes_and_methods(client: TestClient) -> None:
    assert_error(client.get("/v1/nothing"), 404)
    assert_error(client.get("/v1/models/"), 404, "model")
    # no redirect: its target would be built from the Host header
    assert_error(client.get("/health/", follow_redirects=False), 404)
    response = client.get(COMPLETIONS)
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_large_bodies(engine: FakeEngine) -> None:
    with TestClient(
        create_app(engine, limits=Limits(max_body_bytes=1000, max_pending_body_bytes=2000))
    ) as client:
        body = json.dumps({"prompt": "a" * 1000}).encode()
        assert_error(client.post(COMPLETIONS, content=body, headers=JSON), 413)
        # chunked, without a content-length
        assert_error(
            client.post(COMPLETIONS, content=iter([body[:600], body[600:]]), headers=JSON), 413
        )
        assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_engine_dies_before_the_first_token(
    client: TestClient, engine: FakeEngine, path: str, stream: bool
) -> None:
    engine.fail_after = 0
    message = assert_error(
        client.post(path, json={**OK_CHAT, "prompt": "a", "stream": stream}), 500
    )
    assert "0x7f" not in message


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_in_mid_stream_is_an_event(
    client: TestClient, engine: FakeEngine, path: str
) -> None:
    engine.fail_after = 2
    engine.failure = lambda: RuntimeError("bug at /home/secret/0x7f00")
    response = client.post(path, json={**OK_CHAT, "prompt": "a", "stream": True})
    assert response.status_code == 200
    pieces = response.content.split(b"\n\n")
    assert pieces[-2:] == [b"data: [DONE]", b""]
    error = json.loads(pieces[-3].removeprefix(b"data: "))["error"]
    assert error["code"] == 500 and error["type"] == "InternalServerError"
    assert "secret" not in error["message"]
    assert len(engine.aborted) == 1


def test_unforeseen_errors_say_nothing_of_the_inside(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.fail_after = 1
    engine.failure = lambda: RuntimeError("bug at /home/secret/0x7f00")
    assert "secret" not in assert_error(client.post(COMPLETIONS, json={"prompt": "a"}), 500)
    engine.fail_after = None
    assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_one_of_several_prompts_fails(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_after = 3
    assert_error(client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]}), 500)
    assert len(engine.aborted) == 3


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", COMPLETIONS),
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
def test_before_and_after_the_engine(
    client: TestClient, engine: FakeEngine, method: str, path: str
) -> None:
    engine.silence = "no step for 7 s"
    response = client.request(method, path, json={})
    assert assert_error(response, 503) == "no step for 7 s"
    assert int(response.headers["retry-after"]) > 0
    engine.is_ready = False
    response = client.request(method, path, json={})
    assert_error(response, 503)
    assert int(response.headers["retry-after"]) > 0
    engine.is_dead = True
    assert "stopped" in assert_error(client.request(method, path, json={}), 503)


def test_what_may_come_again_is_503_with_the_time_to_wait() -> None:
    told = as_api_error(PausedError("the engine is paused"))
    assert (told.status, told.headers) == (503, {"Retry-After": "5"})
    told = as_api_error(CompilerBusyError("response_format", 4.2))
    assert (told.status, told.headers) == (503, {"Retry-After": "5"})
    assert "response_format could not be compiled yet" in told.message
    late = CompletionOutput(0, "", [2], finish_reason=ERROR, stop_reason=NOT_COMPILED)
    with pytest.raises(ApiError) as caught:
        check_served(RequestOutput("r", None, [1], [late], True))
    assert caught.value.status == 503 and "Retry-After" in caught.value.headers
