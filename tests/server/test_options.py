"""The additions to a server's answers, and its routes, by its flags."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.errors import ValidationError
from server.app import create_app
from server.commands.edge_flags import KEY_VARIABLE, add_edge_flags, api_keys
from server.commands.surface_flags import add_surface_flags, options
from server.engine_route import engine_paths
from server.keys import ApiKey
from server.options import Options
from server.tools.choice import Parsers
from tests.server.fake_controls import FakeControls
from tests.server.fake_engine import FakeEngine
from tests.server.sse import events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


def client_of(engine: FakeEngine, keys: tuple[ApiKey, ...] = (), **chosen: Any) -> TestClient:
    app = create_app(engine, api_keys=keys, options=Options(**chosen))
    return TestClient(app, raise_server_exceptions=False)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_surface_flags(parser)
    add_edge_flags(parser)
    parser.set_defaults(scheduling_policy="fcfs")
    return parser.parse_args(words)


def test_flags_become_options() -> None:
    assert options(parsed()) == Options()
    chosen = options(
        parsed(
            "--enable-force-include-usage",
            "--no-enable-request-id-headers",
            "--enable-server-load-tracking",
            "--default-chat-template-kwargs",
            '{"enable_thinking": false}',
            "--root-path",
            "/api",
            "--profiler-config",
            '{"profiler": "torch", "torch_profiler_dir": "/folder"}',
        )
    )
    variables = {"enable_thinking": False}
    assert chosen == Options(
        includes_usage=True,
        sends_request_ids=False,
        tracks_load=True,
        template_variables=variables,
        root_path="/api",
        profile_folder="/folder",
    )
    with pytest.raises(ValidationError, match=r"--profiler-config\.max_iterations"):
        options(parsed("--profiler-config", '{"max_iterations": 3}'))
    for field, value in (("root_path", "api"), ("template_variables", {"messages": 1})):
        with pytest.raises(ValidationError):
            Options(**{field: value})  # type: ignore[arg-type]


def test_the_environment_has_one_more_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "hidden")
    assert [one.key for one in api_keys(parsed("--api-key", "seen"))] == ["seen", "hidden"]
    assert "hidden" not in repr(api_keys(parsed()))
    monkeypatch.setenv(KEY_VARIABLE, " ")
    with pytest.raises(ValidationError, match=KEY_VARIABLE):
        api_keys(parsed())


def test_keys_are_asked_for_by_the_route(engine: FakeEngine) -> None:
    client = client_of(engine, (ApiKey("k", "n"),), root_path="/api")
    key = {"Authorization": "Bearer k"}
    for root in ("", "/api"):
        assert client.get(f"{root}/health").status_code == 200
        assert client.get(f"{root}/v1/models").status_code == 401
        assert client.get(f"{root}/v1/models", headers=key).status_code == 200
    assert client.get("/apix/health").status_code == 401
    assert client.get("/api/api/health", headers=key).status_code == 404
    assert client.get("/api").status_code == 200, "the page"


def test_every_chunk_may_have_the_usage(engine: FakeEngine) -> None:
    for includes in (False, True):
        client = client_of(engine, includes_usage=includes)
        asked = {**MESSAGES, "stream": True, "stream_options": {"include_usage": False}}
        chunks = events(client.post(CHAT, json=asked).content)
        counts = [one["usage"]["completion_tokens"] for one in chunks if one.get("usage")]
        assert len(counts) == (len(chunks) if includes else 0)
        assert counts == sorted(counts)


def test_request_ids_may_be_left_out(engine: FakeEngine) -> None:
    assert "x-request-id" in client_of(engine).get("/health").headers
    client = client_of(engine, sends_request_ids=False)
    assert "x-request-id" not in client.get("/health").headers
    answer = client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"


def test_tokens_are_named_by_their_ids(engine: FakeEngine) -> None:
    client = client_of(engine, shows_token_ids=True)
    asked = {"prompt": "a", "logprobs": 0}
    for more, first in (({}, "token_id:104"), ({"return_tokens_as_token_ids": False}, "h")):
        answer = client.post(COMPLETIONS, json=asked | more).json()
        assert answer["choices"][0]["logprobs"]["tokens"][0] == first


def test_variables_of_the_template(engine: FakeEngine) -> None:
    client = client_of(engine, template_variables={"mood": "(sad)"})
    for more, expected in (
        ({}, "(sad)"),
        ({"chat_template_kwargs": {"mood": "(glad)"}}, "(glad)"),
        ({"reasoning_effort": "low"}, "(sad)lowTrue"),
        ({"reasoning_effort": "none"}, "(sad)noneFalse"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 0}},
            "(sad)low0",
        ),
    ):
        assert client.post(CHAT, json={**MESSAGES, **more}).status_code == 200
        prompt = engine.tokenizer.decode(engine.prompts[-1])
        assert prompt == f"[user]hi{expected}[assistant]"
    refused = client.post(CHAT, json={**MESSAGES, "reasoning_effort": "much"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_effort"


def test_routes_that_need_a_flag(engine: FakeEngine) -> None:
    for path, method, name, flag in (
        ("/load", "get", "tracks_load", "--enable-server-load-tracking"),
        ("/tokenizer_info", "get", "tells_tokenizer", "--enable-tokenizer-info-endpoint"),
        ("/reset_prefix_cache", "post", "has_control_routes", "--enable-control-routes"),
    ):
        absent = getattr(client_of(engine), method)(path)
        assert absent.status_code == 404 and flag in absent.json()["error"]["message"]
        there = getattr(client_of(engine, **{name: True}), method)(path)
        assert there.status_code == 200
    assert engine.num_resets == 1


def test_routes_of_sleep(engine: FakeEngine) -> None:
    client = client_of(engine, has_control_routes=True)
    controls = client.app.state.service.controls = FakeControls()  # type: ignore[attr-defined]
    assert client.post("/sleep").json() == {"status": "sleeping", "level": 1}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/sleep?level=2&mode=wait").status_code == 200
    refused = client.post("/sleep?level=3")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "level"
    told = client.post("/wake_up?tags=weights&tags=kv_cache").json()
    assert told == {"status": "sleeping", "tags": ["weights", "kv_cache"]}
    assert client.post("/wake_up").json() == {"status": "awake", "tags": None}
    tags = ("wake_up", ["weights", "kv_cache"])
    asked = [(1, "abort"), (2, "wait"), tags, ("wake_up", None)]
    assert controls.asked == asked
    for state in ("is_draining", "is_restarting", "is_dead"):
        setattr(engine, state, True)
        assert {client.post(path).status_code for path in ("/sleep", "/wake_up")} == {503}
        setattr(engine, state, False)
    engine.refusal = "the engine sleeps"
    assert client.post("/wake_up").status_code == 200, "it is what ends that"
    engine.is_ready = False
    assert client.post("/wake_up").headers["retry-after"] == "5"
    assert controls.asked == [*asked, asked[-1]]


def test_routes_of_caches(engine: FakeEngine) -> None:
    client = client_of(engine, has_control_routes=True)
    controls = client.app.state.service.controls = FakeControls()  # type: ignore[attr-defined]
    assert client.post("/reset_mm_cache").status_code == 200
    assert client.post("/reset_encoder_cache").status_code == 200
    told = client.post("/release_kv_cache_memory")
    assert told.json() == {"status": "kv_cache_released"}
    assert controls.asked == [("reset_mm_cache",)] * 2 + [("release_kv_cache_memory",)]


def test_routes_of_a_profile(engine: FakeEngine) -> None:
    absent = client_of(engine).post("/start_profile")
    assert absent.status_code == 404 and "--profiler-config" in absent.json()["error"]["message"]
    client = client_of(engine, profile_folder="/folder")
    controls = client.app.state.service.controls = FakeControls()  # type: ignore[attr-defined]
    bench = {"profile_prefix": "one", "prompt": "what benchmarks send"}
    for body in (None, bench):
        assert client.post("/start_profile", json=body).status_code == 200
    assert controls.asked == [("start_profile", None), ("start_profile", "one")]
    refused = client.post("/start_profile", json={"profile_prefix": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "profile_prefix"
    assert client.post("/stop_profile").json() == {"trace": "trace.gz"}


def test_a_paused_engine_is_healthy_and_takes_no_requests(engine: FakeEngine) -> None:
    client = client_of(engine)
    engine.refusal = "paused"
    assert client.get("/health").json() == {"status": "paused"}
    assert client.get("/health").status_code == 200
    refused = client.post(COMPLETIONS, json={"prompt": "a"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"


def test_the_load_is_what_is_being_answered(engine: FakeEngine) -> None:
    seen = []
    client = client_of(engine, tracks_load=True)
    original = engine.check_room

    def look(client_name: str = "", requests: int = 1) -> None:
        seen.append(client.app.state.service.load.num_running)  # type: ignore[attr-defined]
        original(client_name, requests)

    engine.check_room = look  # type: ignore[method-assign]
    assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
    assert set(seen) == {1} and client.get("/load").json() == {"server_load": 0}
    seen.clear()
    for path in engine_paths(client.app.routes).values():  # type: ignore[attr-defined]
        client.post(path, json={})
    assert set(seen) == {1}
    others = {"/tokenize", "/v1/messages/count_tokens", "/v1/responses/x/cancel"}
    assert not others & set(engine_paths(client.app.routes).values())  # type: ignore[attr-defined]


def test_timings_of_one_choice(engine: FakeEngine) -> None:
    client = client_of(engine, tells_timings=True)
    names = {
        "time_to_first_token_ms",
        "generation_time_ms",
        "queue_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
    }
    assert client.post(COMPLETIONS, json={"prompt": "a"}).json()["metrics"].keys() == names
    one = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).json()["metrics"]
    assert one.keys() == names - {"mean_itl_ms"}
    assert "metrics" not in client.post(COMPLETIONS, json={"prompt": "a", "n": 2}).json()
    assert "metrics" not in client_of(engine).post(COMPLETIONS, json={"prompt": "a"}).json()
    asked = {**MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post(CHAT, json=asked).content)
    assert chunks[-1]["metrics"].keys() == names
    assert not any("metrics" in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_defaults_are_the_models_and_requests_win(path: str) -> None:
    given = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 3}
    engine = FakeEngine(override_generation_config=given)
    client = client_of(engine)
    body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else dict(MESSAGES)
    assert client.post(path, json=body).status_code == 200
    assert client.post(path, json=body | {"temperature": 0.9, "max_tokens": 9}).status_code == 200
    assert client.post(path, json=body | {"max_tokens": 2}).status_code == 200
    assert [p.temperature for p in engine.params] == [0.5, 0.9, 0.5]
    assert [p.top_k for p in engine.params] == [7, 7, 7] and engine.limits == [3, 3, 2]


def test_prompts_are_cut(engine: FakeEngine, client: TestClient) -> None:
    text = "abcdefghij"

    def prompt(path: str = COMPLETIONS, **fields: Any) -> str:
        body = {"prompt": text} if path == COMPLETIONS else MESSAGES
        answer = client.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        return "".join(map(chr, engine.prompts[-1]))

    assert prompt() == "\x02abcdefghij"
    assert prompt(truncate_prompt_tokens=4) == "\x02hij"
    assert prompt(truncate_prompt_tokens=4, truncation_side="right") == "\x02abc"
    assert prompt(truncate_prompt_tokens=4, prompt=[97, 98, 99, 100, 101]) == "bcde"
    assert prompt(truncate_prompt_tokens=-1) == "\x02abcdefghij"
    long = "x" * 100_000 + text
    room = engine.max_model_len - 16
    assert prompt(truncate_prompt_tokens=-1, prompt=long) == "\x02" + long[1 - room :]
    assert prompt(CHAT, truncate_prompt_tokens=5) == "tant]"
    assert prompt(CHAT, truncate_prompt_tokens=5, truncation_side="right") == "[user"
    body = {"prompt": text, "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 1}
    assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "ijh"


def test_the_prompts_text(client: TestClient) -> None:
    answer = client.post(CHAT, json={**MESSAGES, "return_prompt_text": True}).json()
    assert answer["prompt_text"] == "[user]hi[assistant]"
    assert "prompt_text" not in client.post(CHAT, json=MESSAGES).json()
    asked = {**MESSAGES, "return_prompt_text": True, "stream": True}
    first, *others = events(client.post(CHAT, json=asked).content)
    assert first["prompt_text"] == "[user]hi[assistant]"
    assert not any("prompt_text" in other for other in others)


def test_errors_name_the_bound_and_every_bad_key(client: TestClient) -> None:
    def error(**fields: Any) -> str:
        answer = client.post(COMPLETIONS, json={"prompt": "a", **fields})
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    assert "less_than_equal" in error(seed=2**63) and "greater_than_equal" in error(
        seed=-(2**63) - 1
    )
    unknown = error(logit_bias={"1": 1, "1114112": 1, "1114113": 1})
    assert "[1114112, 1114113]" in unknown and "vocabulary size 1114112" in unknown
    assert "['x', '-1']" in error(logit_bias={"1": 1, "x": 1, "-1": 1})


def test_scores_of_a_prompt_alone(client: TestClient) -> None:
    body = {"prompt": "abc", "prompt_logprobs": 0}
    scored = client.post(COMPLETIONS, json=body).json()["choices"][0]["prompt_logprobs"]
    assert [None if one is None else list(one) for one in scored] == [None, ["97"], ["98"], ["99"]]
    many = client.post(COMPLETIONS, json=body | {"prompt_logprobs": -1})
    assert many.status_code == 400 and "max_logprobs=-1" in many.json()["error"]["message"]


def test_the_later_name_of_the_limit_wins(client: TestClient, engine: FakeEngine) -> None:
    body = {**MESSAGES, "max_tokens": 4, "max_completion_tokens": 2}
    assert client.post(CHAT, json=body).status_code == 200 and engine.limits == [2]


def test_invocations(client: TestClient) -> None:
    assert client.post("/invocations", json={"prompt": "a"}).json()["object"] == "text_completion"
    assert client.post("/invocations", json=MESSAGES).json()["object"] == "chat.completion"
    vectors = TestClient(create_app(FakeEngine(enable_embeddings=True)))
    body = {"input": ["a", "bc"]}
    told = vectors.post("/invocations", json=body).json()
    other = vectors.post("/v1/embeddings", json=body).json()
    assert told.pop("id") != other.pop("id") and told == other | {"created": told["created"]}
    assert [one["object"] for one in told["data"]] == ["embedding"] * 2
    refused = client.post("/invocations", json=body)
    assert refused.status_code == 400 and "--enable-embeddings" in refused.text
    for body in ({}, {**MESSAGES, "prompt": "a"}, {"input": "a", "prompt": "a"}):
        refused = client.post("/invocations", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"


def test_tools_are_tokenised(client: TestClient) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    plain = client.post("/tokenize", json=MESSAGES).json()["count"]
    assert client.post("/tokenize", json={**MESSAGES, "tools": tools}).json()["count"] == plain + 5


def test_the_document_has_every_route_and_field(client: TestClient) -> None:
    told = client.get("/openapi.json").json()
    assert told["openapi"].startswith("3.1")
    assert {COMPLETIONS, CHAT, "/v1/models/{name}", "/health", "/invocations"} <= set(told["paths"])
    assert "/load" not in told["paths"]
    fields = told["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "temperature", "truncate_prompt_tokens"} <= fields.keys()
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert COMPLETIONS in page.text and "truncate_prompt_tokens" in page.text
    assert "http://" not in page.text and "https://" not in page.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "count"),
    [("<think>abc</think>ok", 3), ("<think>abc</thi", 8), ("ok</think>", 0), ("<thin", 0)],
)
def test_thoughts_are_counted(engine: FakeEngine, stream: bool, reply: str, count: int) -> None:
    engine.reply = reply
    app = create_app(engine, parsers=Parsers(reasoning="qwen3"))
    asked = {**MESSAGES, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    response = TestClient(app).post(CHAT, json=asked)
    usage = (events(response.content)[-1] if stream else response.json())["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}


def test_templates_of_requests(engine: FakeEngine) -> None:
    asked = {**MESSAGES, "chat_template": "T"}
    for path in (CHAT, "/tokenize"):
        refused = client_of(engine).post(path, json=asked)
        assert refused.status_code == 400 and "--trust-request-chat-template" in refused.text
        client = client_of(engine, trusts_templates=True)
        assert client.post(path, json=asked).status_code == 200
        long = client.post(path, json={**asked, "chat_template": "T" * 65_537})
        assert long.json()["error"]["param"] == "chat_template"
    assert "".join(map(chr, engine.prompts[-1])).startswith("T[user]")
