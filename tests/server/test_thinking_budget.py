"""Requests that bound their thoughts, on every route, against a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.params.structured_outputs_params import Thoughts
from server.app import create_app
from server.tools.choice import Parsers
from tests.server.unconstrained import UnconstrainedEngine

MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
BUDGET = {"thinking_token_budget": 5}
MESSAGE = MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": 5}}
ASKED = [
    ("/v1/chat/completions", MESSAGES | BUDGET),
    ("/v1/completions", {"prompt": "a"} | BUDGET),
    ("/v1/responses", {"input": "a"} | BUDGET),
    ("/v1/messages", MESSAGE),
]
CLOSED = Thoughts("<think>", "</think>", is_open=False)


@pytest.fixture
def engine() -> UnconstrainedEngine:
    return UnconstrainedEngine(max_model_len=512)


@pytest.fixture
def client(engine: UnconstrainedEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, parsers=Parsers("hermes", True, "qwen3"))) as client:
        yield client


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_the_engine_is_told_of_budget_and_tags(client, engine, path, body) -> None:
    assert client.post(path, json=body).status_code == 200
    params = engine.params[-1]
    assert (params.thinking_token_budget, params.thoughts) == (5, CLOSED)


def test_who_does_not_think_has_no_budget(client, engine) -> None:
    for thinking in ({"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled"}):
        body = MESSAGES | {"thinking": thinking}
        assert client.post("/v1/messages", json=body).status_code == 200
        assert engine.params[-1].thinking_token_budget is None


def test_the_prompt_may_open_thoughts_and_close_them(client, engine) -> None:
    for prompt, is_open in (("a<think>\n", True), ("a<think>b</think>\n", None)):
        client.post("/v1/completions", json={"prompt": prompt} | BUDGET)
        params = engine.params[-1]
        if is_open is None:
            assert params.thinking_token_budget is None and params.thoughts is None
        else:
            assert params.thoughts == CLOSED._replace(is_open=True)


@pytest.mark.parametrize(("path", "body"), ASKED[:3])
def test_without_a_parser_a_budget_is_refused_by_name(path, body) -> None:
    client = TestClient(create_app(UnconstrainedEngine(max_model_len=512)))
    refused = client.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thinking_token_budget"
    assert "--reasoning-parser" in refused.json()["error"]["message"]
    assert client.post(path, json=body | {"thinking_token_budget": -1}).status_code == 200


def test_messages_of_a_model_without_thoughts_may_bound_them() -> None:
    engine = UnconstrainedEngine(max_model_len=512)
    assert TestClient(create_app(engine)).post("/v1/messages", json=MESSAGE).status_code == 200
    assert engine.params[-1].thinking_token_budget is None


@pytest.mark.parametrize("wrong", [0, -1, True, "9", 1.5, 2**80])
def test_wrong_budgets_are_refused_by_name(client, wrong) -> None:
    body = MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": wrong}}
    refused = client.post("/v1/messages", json=body)
    assert refused.status_code == 400 and "thinking.budget_tokens" in refused.text
