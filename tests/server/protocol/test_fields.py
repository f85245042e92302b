"""Every field of OpenAI's and vLLM's requests is implemented, passed over, or refused by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.fields_page import MODELS, PATHS, implemented, page
from server.protocol.unsupported import KNOWN, NEUTRAL, refusals
from tests.server.fake_engine import FakeEngine

PAGE = Path(__file__).parents[3] / "docs" / "http_fields.md"
OK: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "completions": {"prompt": "a"},
    "embeddings": {"input": "a"},
    "pooling": {"input": "a"},
    "classify": {"input": "a"},
    "score": {"queries": "a", "documents": ["b"]},
    "rerank": {"query": "a", "documents": ["b"]},
    "embed_v2": {"texts": ["a"]},
}
OTHERS: list[Any] = [True, 5, "x", [1], {"a": 1}]
ENGINE = FakeEngine(enable_embeddings=True)
CLASSIFIER = FakeEngine(enable_embeddings=True, labels=("good",))


def names(kind: str) -> list[str]:
    return sorted(name for known in KNOWN[kind].values() for name in known)


@functools.cache
def client(labels: bool) -> TestClient:
    return TestClient(create_app(CLASSIFIER if labels else ENGINE), raise_server_exceptions=False)


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    """Both applications run: a client that is not entered starts an event loop a request."""
    with client(False), client(True):
        yield


def post(kind: str, **fields: Any) -> Any:
    labels = kind in ("classify", "score", "rerank")
    return client(labels).post(PATHS[kind], json=OK[kind] | fields)


@pytest.mark.parametrize("kind", KNOWN)
def test_every_name_is_in_one_list(kind: str) -> None:
    own, refused = implemented(kind), refusals(kind)
    for name in names(kind):
        assert (name in own) + (name in NEUTRAL) + (name in refused and name not in own) == 1, name


def test_every_field_of_the_client_is_known() -> None:
    openai = pytest.importorskip("openai", reason="needs the extra `test`")
    chat = openai.types.chat.completion_create_params.CompletionCreateParamsBase
    completion = openai.types.completion_create_params.CompletionCreateParamsBase
    embedding = openai.types.embedding_create_params.EmbeddingCreateParams
    for kind, params in (("chat", chat), ("completions", completion), ("embeddings", embedding)):
        assert set(params.__annotations__) <= set(names(kind)), kind


@pytest.mark.parametrize("kind", KNOWN)
def test_neutral_fields_are_accepted_with_any_value(kind: str) -> None:
    asked = [name for name in names(kind) if name in NEUTRAL and name not in implemented(kind)]
    for value in OTHERS:
        response = post(kind, **dict.fromkeys(asked, value))
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("kind", KNOWN)
def test_refused_fields_are_named(kind: str) -> None:
    asked = [
        name for name in names(kind) if name in refusals(kind) and name not in implemented(kind)
    ]
    assert asked
    for name in asked:
        values = refusals(kind)[name].values
        for value in [None, *values]:
            assert post(kind, **{name: value}).status_code == 200, (name, value)
        for value in OTHERS:
            if value in values:
                continue
            response = post(kind, **{name: value})
            assert response.status_code == 400, (name, value)
            assert response.json()["error"]["param"] == name


def test_null_is_accepted_of_every_optional_field() -> None:
    for kind, model in MODELS.items():
        empty = {
            name: None
            for name, field in model.model_fields.items()
            if not field.is_required() and field.default is None and name not in OK[kind]
        }
        assert post(kind, **empty).status_code == 200


def test_the_page_is_that_of_the_lists() -> None:
    assert page() == PAGE.read_text(), "python -m server.fields_page > docs/http_fields.md"
