"""`/v1/completions` against a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.outputs import Logprob
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.sampling_params import RequestOutputKind
from server.app import create_app
from server.options import Options
from server.protocol.logprobs import completion_logprobs
from tests.server.fake_engine import FakeEngine
from tests.server.sse import events, joined


def complete(client: TestClient, **body: Any) -> Any:
    response = client.post("/v1/completions", json={"model": "fake", "prompt": "abc", **body})
    assert response.status_code == 200, response.text
    return events(response.content) if body.get("stream") else response.json()


def test_answers_with_every_field(client: TestClient, engine: FakeEngine) -> None:
    answer = complete(client)
    assert answer["id"].startswith("cmpl-") and len(answer["id"]) == len("cmpl-") + 16
    assert answer["object"] == "text_completion" and answer["model"] == "fake"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": None,
    }
    params = engine.params[0]
    assert params.max_tokens == 16 and params.output_kind is RequestOutputKind.FINAL_ONLY
    assert engine.prompts == [[2, 97, 98, 99]] and engine.finished == engine.started


def test_stream_bytes_are_exactly_those_of_the_format(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.reply = "é😀"
    response = client.post(
        "/v1/completions", json={"prompt": "a", "stream": True, "request_id": "r1"}
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    lines = response.content.split(b"\n\n")
    created = json.loads(lines[0][6:])["created"]
    head = f'data: {{"id":"cmpl-r1","object":"text_completion","created":{created},"model":"fake"'
    rest = '"prompt_token_ids":null,"token_ids":null}]'
    fingerprint = json.loads(lines[1][6:])["system_fingerprint"]
    assert lines == [
        f'{head},"choices":[{{"index":0,"text":"é","logprobs":null,"finish_reason":null,'
        f'"stop_reason":null,{rest}}}'.encode(),
        f'{head},"choices":[{{"index":0,"text":"😀","logprobs":null,"finish_reason":"stop",'
        f'"stop_reason":null,{rest},"system_fingerprint":"{fingerprint}"}}'.encode(),
        b"data: [DONE]",
        b"",
    ]


def test_stream_usage(client: TestClient) -> None:
    plain = complete(client, stream=True)
    assert all("usage" not in chunk for chunk in plain)
    last_only = complete(client, stream=True, stream_options={"include_usage": True})
    assert all("usage" not in chunk for chunk in last_only[:-1])
    assert last_only[-1]["choices"] == []
    assert last_only[-1]["usage"]["completion_tokens"] == 5
    options = {"include_usage": True, "continuous_usage_stats": True}
    every = complete(client, stream=True, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in every] == [1, 2, 3, 4, 5, 5]


def test_cached_tokens_are_told_only_where_the_server_says_so(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, options=Options(tells_cached_tokens=True))) as client:
        told = {"cached_tokens": 3}
        assert complete(client)["usage"]["prompt_tokens_details"] == told
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = complete(client, stream=True, stream_options=options)
        assert all(chunk["usage"]["prompt_tokens_details"] == told for chunk in chunks)
    with TestClient(create_app(FakeEngine(served_model_name=("fake",)))) as client:
        chunks = complete(client, stream=True, stream_options=options)
        assert all(chunk["usage"]["prompt_tokens_details"] is None for chunk in chunks)


def test_a_cache_salt_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    complete(client, cache_salt="tenant")
    complete(client)
    assert engine.cache_salts == ["tenant", None]


def test_a_session_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    complete(client, session_id="s")
    complete(client)
    for path, prompt in (("chat/completions", "messages"), ("responses", "input")):
        body = {prompt: [{"role": "user", "content": "a"}], "prompt_cache_key": "k"}
        assert client.post(f"/v1/{path}", json=body).status_code == 200
    assert [turn.session for turn in engine.turns] == ["s", "", "k", "k"]
    refused = client.post("/v1/completions", json={"prompt": "a", "session_id": "x" * 1025})
    assert refused.status_code == 400 and "session_id" in refused.json()["error"]["message"]


def test_n_choices_interleave_and_each_finishes_once(client: TestClient) -> None:
    chunks = complete(client, stream=True, n=3)
    assert [joined(chunks, index) for index in range(3)] == ["0hello", "1hello", "2hello"]
    assert [chunk["choices"][0]["index"] for chunk in chunks[:6]] == [0, 1, 2, 0, 1, 2]
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[2, 97, 98]]),
        (["a", "b"], [[2, 97], [2, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompt_forms(
    client: TestClient, engine: FakeEngine, prompt: Any, expected: list[list[int]]
) -> None:
    answer = complete(client, prompt=prompt, n=2)
    assert sorted(engine.prompts) == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(len(one) for one in expected)
    assert answer["usage"]["completion_tokens"] == 12 * len(expected)


def test_streams_of_several_prompts(client: TestClient, engine: FakeEngine) -> None:
    chunks = complete(client, prompt=["a", "b"], n=2, stream=True)
    assert [joined(chunks, index) for index in range(4)] == ["0hello", "1hello"] * 2
    assert len(engine.finished) == 2 and not engine.aborted


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: TestClient, stream: bool) -> None:
    answer = complete(client, echo=True, stream=stream, add_special_tokens=False)
    text = joined(answer) if stream else answer["choices"][0]["text"]
    assert text == "abchello"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_scores_the_prompt(client: TestClient, stream: bool) -> None:
    answer = complete(client, echo=True, max_tokens=0, logprobs=1, stream=stream)
    choice = (answer[0] if stream else answer)["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["\x02", "a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    if not stream:
        assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: TestClient, stream: bool) -> None:
    answer = complete(client, logprobs=2, stream=stream)
    parts = [chunk["choices"][0]["logprobs"] for chunk in (answer if stream else [answer])]
    merged = {key: [one for part in parts for one in part[key]] for key in parts[0]}
    assert merged["tokens"] == list("hello")
    assert merged["text_offset"] == [0, 1, 2, 3, 4]
    assert merged["token_logprobs"] == [-0.5] * 5
    # rank 1 is the character after, rank 2 the token itself
    assert merged["top_logprobs"][0] == {"h": -0.5, "i": -0.25}


def test_zero_logprobs_lists_the_token_only(client: TestClient) -> None:
    shown = complete(client, logprobs=0)["choices"][0]["logprobs"]
    assert shown["top_logprobs"] == [{one: -0.5} for one in "hello"]


def test_minus_one_logprobs_lists_the_vocabulary() -> None:
    position = {5: Logprob(-2.0, 3), 7: Logprob(-0.5, 1), 6: Logprob(-1.0, 2)}
    shown = completion_logprobs([(5, position)], top=-1, first_offset=0, show=str)
    assert shown["top_logprobs"] == [{"5": -2.0, "7": -0.5, "6": -1.0}]


def test_prompt_logprobs(client: TestClient) -> None:
    shown = complete(client, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert shown[0] is None and len(shown) == 4
    assert shown[1]["97"] == {"logprob": -0.5, "rank": 2, "decoded_token": "a"}


def test_token_ids(client: TestClient) -> None:
    choice = complete(client, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [2, 97, 98, 99]
    assert choice["token_ids"] == [ord(one) for one in "hello"]
    shown = complete(client, logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert shown["tokens"][0] == "token_id:104"


def test_parameters_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [5],
        "bad_words": ["bad"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "allowed_token_ids": [1, 2],
    }
    complete(client, **given, logit_bias={"7": -1000})
    params = engine.params[0]
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == {7: -100.0}


def test_max_tokens_is_cut_to_the_context(client: TestClient, engine: FakeEngine) -> None:
    complete(client, max_tokens=64, prompt="a" * 50)
    assert engine.limits == [64 - 51]


def test_prompts_share_the_lists_of_their_parameters(
    client: TestClient, engine: FakeEngine
) -> None:
    allowed = list(range(1, 50))
    complete(client, prompt=["a" * 50, "b"], max_tokens=60, allowed_token_ids=allowed)
    one, two = engine.params
    assert engine.limits == [64 - 51, 60]
    assert one.allowed_token_ids == allowed and one.allowed_token_ids is two.allowed_token_ids


def test_tokens_asked_for_by_id(client: TestClient) -> None:
    asked = {"logprobs": 0, "logprob_token_ids": [ord("h"), ord("x")], "echo": True}
    (choice,) = complete(client, prompt="ab", **asked)["choices"]
    listed = [set(one) for one in choice["logprobs"]["top_logprobs"][-5:]]
    assert listed == [{"h", "x"}, {"e", "h", "x"}, *[{"l", "h", "x"}] * 2, {"o", "h", "x"}]


def test_no_field_is_needed_but_the_prompt(client: TestClient) -> None:
    response = client.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "application/json"}
    )
    assert response.status_code == 200 and response.json()["model"] == "fake"


def test_harmless_and_unknown_fields_are_accepted(client: TestClient) -> None:
    complete(
        client,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        best_of=1,
        suffix=None,
        use_beam_search=False,
        length_penalty=1.0,
        response_format={"type": "text"},
        never_heard_of={"this": 1},
    )


def test_a_beam_search_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    complete(
        client,
        use_beam_search=True,
        n=3,
        max_tokens=7,
        temperature=0.5,
        length_penalty=0.5,
        early_stopping="never",
        shrink_under_pressure=True,
        ignore_eos=True,
        top_p=1.0,
        top_k=-1,
        thinking_token_budget=-1,
        stop=[],
        stream=False,
    )
    expected = BeamSearchParams(
        3,
        7,
        length_penalty=0.5,
        early_stopping="never",
        shrink_under_pressure=True,
        ignore_eos=True,
        temperature=0.5,
    )
    assert engine.beams == [expected] and engine.limits == [7]


def test_a_search_beyond_the_servers_cap_is_refused_by_its_field() -> None:
    client = TestClient(create_app(FakeEngine(max_beam_width=2)))  # type: ignore[arg-type]
    body = {"prompt": "abc", "use_beam_search": True}
    refused = client.post("/v1/completions", json={**body, "n": 3})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "n"
    assert "n=3" in error["message"] and "max_beam_width" in error["message"]
    assert client.post("/v1/completions", json={**body, "n": 2}).status_code == 200


def test_an_abort_ends_only_what_had_not_ended(client: TestClient, engine: FakeEngine) -> None:
    engine.replies = ["a", "bcdef"]
    engine.abort_after = 3
    chunks = complete(client, stream=True, n=2)
    ends = [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert ends == [(0, "stop"), (1, "abort")]
