"""`/v1/chat/completions` against a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.fake_engine import FakeEngine
from tests.server.sse import events, joined

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(client: TestClient, **body: Any) -> Any:
    response = client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert response.status_code == 200, response.text
    return events(response.content) if body.get("stream") else response.json()


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.prompts[-1])


def test_answer(client: TestClient, engine: FakeEngine) -> None:
    answer = chat(client)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "reasoning": None,
                "content": "hello",
                "refusal": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    prompt = "[user]hi[assistant]"
    assert prompt_of(engine) == prompt
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert engine.limits == [engine.max_model_len - len(prompt)]


def test_another_engine_may_have_made_the_prompt(client: TestClient, engine: FakeEngine) -> None:
    given = {"prompt_token_ids": [*b"given"], "do_remote_decode": False, "remote_host": None}
    for stream in (False, True):
        chat(client, kv_transfer_params=given, return_token_ids=True, stream=stream)
        assert prompt_of(engine) == "given"
    chat(client, kv_transfer_params=given, truncate_prompt_tokens=3)
    assert prompt_of(engine) == "ven"
    chat(client, kv_transfer_params={})
    assert prompt_of(engine) == "[user]hi[assistant]"
    for name, value in (
        ("prompt_token_ids", "text"),
        ("prompt_token_ids", ["text"]),
        ("prompt_token_ids", [2**40]),
        ("prompt_token_ids", []),
        ("prompt_token_ids", [5] * engine.max_model_len),
        ("do_remote_prefill", True),
    ):
        body = {"messages": MESSAGES, "kv_transfer_params": {name: value}}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, value
        assert response.json()["error"]["param"] == f"kv_transfer_params.{name}"
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    seen = {"messages": [{"role": "user", "content": picture}], "kv_transfer_params": given}
    response = client.post("/v1/chat/completions", json=seen)
    assert response.status_code == 400 and "without images" in response.text
    batch = {"messages": [MESSAGES], "kv_transfer_params": given}
    assert client.post("/v1/chat/completions/batch", json=batch).status_code == 400


def test_stream_starts_with_the_role_and_ends_with_the_reason(client: TestClient) -> None:
    chunks = chat(client, stream=True, stream_options={"include_usage": True})
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"] for c in chunks[1:-1]] == [{"content": x} for x in "hello"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * 5 + ["stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_stream_of_two(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat(client, stream=True, n=2, stream_options=options)
    roles = [c["choices"][0]["index"] for c in chunks[:-1] if "role" in c["choices"][0]["delta"]]
    assert roles == [0, 1]
    assert [joined(chunks, i) for i in range(2)] == ["0hello", "1hello"]
    assert chunks[0]["usage"]["completion_tokens"] == 0
    assert chunks[-1]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs(client: TestClient, stream: bool, top: int | None) -> None:
    answer = chat(client, logprobs=True, top_logprobs=top, stream=stream)
    parts = answer[1:] if stream else [answer]
    content = [e for part in parts for e in part["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in content] == list("hello")
    assert all(len(entry["top_logprobs"]) == (top or 0) for entry in content)
    assert content[0]["bytes"] == [104] and content[0]["logprob"] == -0.5
    if top:
        assert [one["token"] for one in content[0]["top_logprobs"]] == ["i", "h", "k"]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_asked_for_by_id_are_the_alternatives(client: TestClient, stream: bool) -> None:
    asked = [ord("h"), ord("x")]
    answer = chat(client, logprobs=True, top_logprobs=3, logprob_token_ids=asked, stream=stream)
    parts = answer[1:] if stream else [answer]
    content = [e for part in parts for e in part["choices"][0]["logprobs"]["content"]]
    listed = [[one["token"] for one in entry["top_logprobs"]] for entry in content]
    assert listed == [["h", "x"], *([one, "h", "x"] for one in "ello")]
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]


def test_text_parts_are_joined(client: TestClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parts += [{"type": "output_text", "text": "c"}, {"type": "refusal", "refusal": "d"}]
    chat(client, messages=[{"role": "user", "content": parts}])
    assert prompt_of(engine) == "[user]a\nb\nc\nd[assistant]"


@pytest.mark.parametrize("stream", [False, True])
def test_continuing_the_last_message(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    answer = chat(
        client,
        messages=[*MESSAGES, {"role": "assistant", "content": "Well,"}],
        add_generation_prompt=False,
        continue_final_message=True,
        echo=True,
        stream=stream,
    )
    assert prompt_of(engine) == "[user]hi[assistant]Well,"
    text = joined(answer) if stream else answer["choices"][0]["message"]["content"]
    assert text == "Well,hello"


def test_template_variables(client: TestClient, engine: FakeEngine) -> None:
    chat(client, chat_template_kwargs={"mood": "(sad)"})
    assert prompt_of(engine) == "[user]hi(sad)[assistant]"


def test_either_name_of_the_limit(client: TestClient, engine: FakeEngine) -> None:
    chat(client, max_tokens=3)
    answer = chat(client, max_completion_tokens=3)
    assert [params.max_tokens for params in engine.params] == [3, 3]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_token_ids_and_prompt_logprobs(client: TestClient) -> None:
    answer = chat(client, return_token_ids=True, prompt_logprobs=0)
    assert answer["prompt_token_ids"][:2] == [ord("["), ord("u")]
    assert answer["choices"][0]["token_ids"] == [ord(one) for one in "hello"]
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 19
    first, *others = chat(client, return_token_ids=True, stream=True, n=2)
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in other for other in others)


def test_fields_of_other_servers_that_ask_for_nothing(client: TestClient) -> None:
    chat(client, tools=None, tool_choice="none", parallel_tool_calls=True, functions=None)


def test_an_abort_ends_only_what_had_not_ended(client: TestClient, engine: FakeEngine) -> None:
    engine.replies = ["a", "bcdef"]
    engine.abort_after = 3
    chunks = chat(client, stream=True, n=2)
    ends = [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert ends == [(0, "stop"), (1, "abort")]
