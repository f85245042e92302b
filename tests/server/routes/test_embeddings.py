"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from jaxserve import PoolingParams
from server.app import create_app
from tests.server.fake_engine import FakeEngine

PATH = "/v1/embeddings"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(served_model_name=("fake",), enable_embeddings=True)


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [[2, 97, 98]]),
        (["ab", "c"], [[2, 97, 98], [2, 99]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_each_prompt_has_a_vector(
    client: TestClient, engine: FakeEngine, given: Any, tokens: list[list[int]]
) -> None:
    answer = client.post(PATH, json={"input": given, "model": "fake"}).json()
    assert answer == {
        "object": "list",
        "model": "fake",
        "data": [
            {"object": "embedding", "index": index, "embedding": [float(prompt[0]), 0.1]}
            for index, prompt in enumerate(tokens)
        ],
        "usage": {"prompt_tokens": sum(map(len, tokens)), "total_tokens": sum(map(len, tokens))},
    }
    assert sorted(engine.prompts) == sorted(tokens)
    assert engine.poolings == [PoolingParams()] * len(tokens) and not engine.aborted


def test_base64_is_float32(client: TestClient) -> None:
    body = {"input": [5], "encoding_format": "base64"}
    (found,) = client.post(PATH, json=body).json()["data"]
    numbers = np.frombuffer(base64.b64decode(found["embedding"]), "<f4")
    np.testing.assert_array_equal(numbers, np.array([5, 0.1], "f"))


def test_many_numbers_are_encoded_beside_the_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"input": [[5], [6]]}
    whole = client.post(PATH, json=asked)
    monkeypatch.setattr("server.routes.embeddings.QUICK_ENTRIES", 3)
    monkeypatch.delattr("server.routes.embeddings.JSONResponse")
    piecewise = client.post(PATH, json=asked)
    assert piecewise.content == whole.content
    assert piecewise.headers["content-length"] == whole.headers["content-length"]


def test_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    body = {"input": "a", "pooling": "mean", "normalize": False, "layer": 1, "cache_salt": "s"}
    more = {"add_special_tokens": False, "timeout": 3.0, "user": "u", "encoding_format": "float"}
    assert client.post(PATH, json=body | more).status_code == 200
    assert engine.poolings == [PoolingParams("mean", False, 1)]
    assert (engine.prompts, engine.cache_salts) == ([[97]], ["s"])
    assert engine.turns[0].timeout == 3.0


def test_prompts_wait_until_they_are_answered(engine: FakeEngine) -> None:
    ledger, seen = engine.ledger, list[tuple[int, int]]()
    app = create_app(engine)

    async def let_in(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["entry"] = entry = ledger.enter("")
            entry.arrive()
        await app(scope, receive, send)

    original = engine.stream

    async def stream(prepared: Any) -> Any:
        seen.append((ledger.num_entering, ledger.num_waiting))
        async for output in original(prepared):
            yield output

    engine.stream = stream  # type: ignore[method-assign,assignment]
    with TestClient(let_in) as client:
        assert client.post(PATH, json={"input": [[5], [6, 7]]}).status_code == 200
    assert seen == [(0, 2)] * 2 and not ledger.num_waiting


def test_a_request_whose_time_is_over_is_told_so(client: TestClient, engine: FakeEngine) -> None:
    engine.abort_after = 0
    response = client.post(PATH, json={"input": [5]})
    assert response.status_code == 504 and response.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": "a" * 10**6}, "input"),
        ({"input": [5] * 64}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [5], "pooling": "max"}, "pooling"),
        ({"input": [5], "layer": 3}, "layer"),
        ({"input": [5], "encoding_format": "int8"}, "encoding_format"),
        ({"input": [5], "dimensions": 8}, "dimensions"),
        ({"input": [5], "cache_salt": ""}, "cache_salt"),
    ],
)
def test_bad_input(client: TestClient, body: dict[str, Any], param: str) -> None:
    response = client.post(PATH, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_server_without_embeddings_says_so() -> None:
    with TestClient(create_app(FakeEngine()), raise_server_exceptions=False) as client:
        error = client.post(PATH, json={"input": [5]}).json()["error"]
    assert error["param"] == "model" and error["code"] == 400
    assert "--enable-embeddings" in error["message"]
