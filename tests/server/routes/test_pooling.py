"""`POST /v1/embeddings`, `/pooling` and `/classify`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from starlette.testclient import TestClient

from jaxserve import PoolingParams
from server.app import create_app
from server.routes import embed_v2
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
    assert answer.pop("id").startswith("embd-") and answer.pop("created") > 0
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
    assert engine.poolings == [PoolingParams(task="embed")] * len(tokens) and not engine.aborted


def test_base64_is_float32(client: TestClient) -> None:
    body = {"input": [5], "encoding_format": "base64"}
    (found,) = client.post(PATH, json=body).json()["data"]
    numbers = np.frombuffer(base64.b64decode(found["embedding"]), "<f4")
    np.testing.assert_array_equal(numbers, np.array([5, 0.1], "f"))


def test_many_numbers_are_encoded_beside_the_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"input": [[5], [6]], "request_id": "x"}
    monkeypatch.setattr("server.routes.pooled.time.time", lambda: 9.0)
    whole = client.post(PATH, json=asked)
    monkeypatch.setattr("server.routes.pooled.QUICK_ENTRIES", 3)
    monkeypatch.delattr("server.routes.pooled.JSONResponse")
    piecewise = client.post(PATH, json=asked)
    assert piecewise.content == whole.content
    assert piecewise.headers["content-length"] == whole.headers["content-length"]


def test_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    body = {"input": "a", "pooling": "mean", "layer": 1, "cache_salt": "s", "dimensions": 2}
    body |= {"use_activation": False}
    more = {"add_special_tokens": False, "timeout": 3.0, "user": "u", "encoding_format": "float"}
    assert client.post(PATH, json=body | more).status_code == 200
    assert engine.poolings == [PoolingParams("mean", False, 1, 2, "embed")]
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


@pytest.mark.parametrize(
    ("reason", "status", "header"),
    [("timeout", 504, ("x-should-retry", "false")), (None, 503, ("retry-after", "5"))],
)
def test_a_request_that_is_ended_early_is_told_whether_to_come_again(
    client: TestClient, engine: FakeEngine, reason: str | None, status: int, header: tuple[str, str]
) -> None:
    engine.abort_after, engine.abort_reason = 0, reason
    response = client.post(PATH, json={"input": [5]})
    assert response.status_code == status and header in response.headers.items()
    assert ("x-should-retry" in response.headers) == (status == 504)
    assert response.json()["error"]["param"] == (reason and "timeout")


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
        ({"input": [5], "dimensions": 9}, "dimensions"),
        ({"input": [5], "normalize": False}, "normalize"),
        ({"input": [5], "padding": "max_length"}, "padding"),
        ({"input": [5], "embed_dtype": "int8"}, "embed_dtype"),
        ({"input": [[5]] * 257, "encoding_format": "bytes"}, "encoding_format"),
        ({"input": [5], "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"messages": []}, "input"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ({"input": [5], "cache_salt": ""}, "cache_salt"),
    ],
)
def test_bad_input(client: TestClient, body: dict[str, Any], param: str) -> None:
    response = client.post(PATH, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_conversation_is_one_prompt(client: TestClient, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert len(client.post(PATH, json=body).json()["data"]) == 1
    more = {"add_generation_prompt": True, "add_special_tokens": True}
    assert client.post(PATH, json=body | more).status_code == 200
    plain = [*b"[user]hi"]
    assert engine.prompts == [plain, [2, *plain, *b"[assistant]"]]


TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_bytes_are_of_a_type_and_an_order(client: TestClient, dtype: str, endianness: str) -> None:
    asked = {"input": [[5], [6]], "embed_dtype": dtype, "endianness": endianness}
    in_json = client.post(PATH, json={**asked, "encoding_format": "base64"}).json()["data"]
    alone = client.post(PATH, json={**asked, "encoding_format": "bytes_only"})
    headed = client.post(PATH, json={**asked, "encoding_format": "bytes"})
    assert alone.headers["content-type"] == "application/octet-stream"
    assert alone.content == headed.content and "metadata" not in alone.headers
    told = json.loads(headed.headers["metadata"])
    assert told["usage"]["prompt_tokens"] == 2 and told["model"] == "fake"
    for index, (item, place) in enumerate(zip(in_json, told["data"], strict=True)):
        part = headed.content[place["start"] : place["end"]]
        assert part == base64.b64decode(item["embedding"])
        assert (place["index"], place["shape"]) == (index, [2])
        assert (place["embed_dtype"], place["endianness"]) == (dtype, endianness)
        numbers = np.frombuffer(part, f"u{np.dtype(TYPES[dtype]).itemsize}")
        numbers = numbers.byteswap() if endianness == "big" else numbers
        wanted = np.array([5 + index, 0.1], np.float32).astype(TYPES[dtype])
        np.testing.assert_array_equal(numbers.view(TYPES[dtype]), wanted)


def test_pooling_tells_what_the_model_makes(client: TestClient) -> None:
    answer = client.post("/pooling", json={"input": [5], "task": "embed"}).json()
    assert answer["object"] == "list" and answer["id"].startswith("pool-")
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": [5.0, 0.1]}]
    for task in ("classify", "token_embed", "plugin", 5):
        refused = client.post("/pooling", json={"input": [5], "task": task})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "task"


@pytest.fixture
def classifier() -> Iterator[TestClient]:
    engine = FakeEngine(labels=("bad", "good"), enable_embeddings=True)
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


def test_classes_have_labels_and_probabilities(classifier: TestClient) -> None:
    answer = classifier.post("/classify", json={"input": [[5], [0]]}).json()
    assert answer["id"].startswith("classify-") and answer["usage"]["total_tokens"] == 2
    assert answer["data"] == [
        {"index": 0, "label": "bad", "probs": [5.0, 0.1], "num_classes": 2},
        {"index": 1, "label": "good", "probs": [0.0, 0.1], "num_classes": 2},
    ]
    asked = {"messages": [{"role": "user", "content": "hi"}], "use_activation": False}
    for path in ("/classify", "/invocations"):
        (found,) = classifier.post(path, json=asked).json()["data"]
        assert found["num_classes"] == 2
    (found,) = classifier.post("/pooling", json={"input": [5]}).json()["data"]
    assert found["data"] == [5.0, 0.1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": [5]}),
        ("/score", {"queries": "a", "documents": "b"}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_model_of_two_labels_only_classifies(
    classifier: TestClient, path: str, body: dict[str, Any]
) -> None:
    response = classifier.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("model", "params")


def test_a_server_without_embeddings_says_so() -> None:
    with TestClient(create_app(FakeEngine()), raise_server_exceptions=False) as client:
        error = client.post(PATH, json={"input": [5]}).json()["error"]
        assert client.post("/classify", json={"input": [5]}).json()["error"] == error
    assert error["param"] == "model" and error["code"] == 400
    assert "--enable-embeddings" in error["message"]


TYPED = "/v2/embed"


def test_vectors_have_coheres_types(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    answer = client.post(TYPED, json={"texts": ["a", "bc"], "embedding_types": kinds}).json()
    assert answer.pop("id").startswith("embd-")
    numbers = base64.b64encode(np.array([2, 0.1], "<f4").tobytes()).decode()
    assert answer == {
        "embeddings": {
            "float": [[2.0, 0.1]] * 2,
            "base64": [numbers] * 2,
            "binary": [[64]] * 2,
            "ubinary": [[192]] * 2,
        },
        "texts": ["a", "bc"],
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": 5, "image_tokens": 0},
        },
        "response_type": "embeddings_by_type",
    }
    assert engine.poolings == [PoolingParams(task="embed")] * 2
    assert set(client.post(TYPED, json={"texts": ["a"]}).json()["embeddings"]) == {"float"}
    made: list[str] = []
    monkeypatch.setattr(embed_v2, "typed_vectors", lambda kind, vectors: made.append(kind))
    client.post(TYPED, json={"texts": ["a"], "embedding_types": ["binary"] * 4})
    assert made == ["binary"], "each once"


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, [2, *b"abcdefghij"]),
        ({"max_tokens": 3}, [2, *b"ab"]),
        ({"max_tokens": 3, "truncate": "START"}, [2, *b"ij"]),
        ({"truncate": "NONE"}, [2, *b"abcdefghij"]),
    ],
)
def test_texts_are_cut_at_an_end(
    client: TestClient, engine: FakeEngine, asked: dict[str, Any], kept: list[int]
) -> None:
    assert client.post(TYPED, json={"texts": ["abcdefghij"]} | asked).status_code == 200
    assert engine.prompts == [kept]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", ""]}, "texts"),
        ({"texts": "a"}, "texts"),
        ({"texts": ["a" * 99], "truncate": "NONE"}, "texts"),
        ({"texts": ["abc"], "truncate": "NONE", "max_tokens": 3}, "texts"),
        ({"texts": ["a"], "max_tokens": 99}, "max_tokens"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["base64"] * 5}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["base64"] * 170_000}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 4}, "embedding_types"),
        ({"texts": ["a"], "output_dimension": 9}, "output_dimension"),
        ({"texts": ["a"], "input_type": "search_query"}, "input_type"),
        ({"images": ["data:"]}, "images"),
    ],
)
def test_what_coheres_api_is_refused(client: TestClient, body: dict[str, Any], param: str) -> None:
    response = client.post(TYPED, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
