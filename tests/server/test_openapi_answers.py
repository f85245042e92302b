"""Answers of every route against the schemas of our own document."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.openapi import RERANK_PATHS, SCORE_PATHS
from server.options import Options
from tests.server.fake_controls import FakeControls
from tests.server.fake_engine import FakeEngine

MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": "a"}],
    "/v1/chat/completions": [MESSAGES],
    "/v1/responses": [{"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}],
    "/v1/messages": [MESSAGES],
    "/v1/messages/count_tokens": [{"messages": MESSAGES["messages"]}],
    "/v1/chat/completions/batch": [{"messages": [MESSAGES["messages"]] * 2}],
    "/v1/responses/input_tokens": [{"input": "hi"}],
    "/v1/embeddings": [{"input": "a"}, {"input": ["a", "b"], "encoding_format": "base64"}],
    "/pooling": [{"input": "a"}, {"messages": MESSAGES["messages"], "encoding_format": "base64"}],
    **{path: [{"queries": "a", "documents": ["b", "c"]}] for path in SCORE_PATHS},
    **{path: [{"query": "a", "documents": ["b", "c"]}] for path in RERANK_PATHS},
    "/invocations": [{"prompt": "a"}, MESSAGES, {"input": "a"}],
    "/classify": [{"input": "a"}],
    "/v2/embed": [{"texts": ["a"], "embedding_types": ["float", "ubinary"]}],
    "/tokenize": [{"prompt": "a"}, {"messages": MESSAGES["messages"]}],
    "/detokenize": [{"tokens": [97]}],
}
# what answers with no JSON
OTHERS = ("/metrics", "/docs", "/engine/stream", "/start_profile")
OTHERS += ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")
OPTIONS = Options(
    tracks_load=True, tells_tokenizer=True, has_control_routes=True, profile_folder="/folder"
)


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = create_app(FakeEngine(enable_embeddings=True), options=OPTIONS)
    app.state.service.controls = FakeControls()
    return TestClient(app)


@pytest.fixture(scope="module")
def paths(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()["paths"]


def check(told: dict[str, Any], answer: Any) -> None:
    """Every field of an object that a schema names has to be there."""
    schema = told["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, schema)
    assert schema.get("properties") or schema.get("anyOf") or schema == {"type": "object"}


@pytest.mark.parametrize("path", BODIES)
def test_answers_to_bodies(client: TestClient, paths: dict[str, Any], path: str) -> None:
    assert "$ref" in str(paths[path]["post"]["requestBody"])
    classifier = FakeEngine(enable_embeddings=True, labels=("good",))
    asked = TestClient(create_app(classifier)) if path == "/classify" else client
    for body in BODIES[path]:
        answer = asked.post(path, json=body)
        assert answer.status_code == 200, answer.text
        check(paths[path]["post"], answer.json())


def test_answers_of_the_other_routes(client: TestClient, paths: dict[str, Any]) -> None:
    kept = client.post("/v1/responses", json={"input": "hi"}).json()["id"]
    slow = client.post("/v1/responses", json={"input": "hi", "background": True}).json()["id"]
    model = client.get("/v1/models").json()["data"][0]["id"]
    names = {"{name}": model, "{response_id}": kept}
    asked = []
    for path, methods in paths.items():
        for method, told in methods.items():
            if path in BODIES or path in OTHERS or path == "/" or path.startswith("/page/"):
                continue
            url = path
            for name, value in names.items():
                url = url.replace(name, slow if path.endswith("/cancel") else value)
            asked.append((method == "delete", url, method, told))
    for _, url, method, told in sorted(asked, key=lambda one: one[:3]):
        answer = client.request(method, url)
        assert answer.status_code == 200, (url, answer.text)
        check(told, answer.json())
    for path, url in (("/v1/models", "/v1/models"), ("/v1/models/{name}", f"/v1/models/{model}")):
        answer = client.get(url, headers={"anthropic-version": "2023-06-01"})
        check(paths[path]["get"], answer.json())
    assert client.post("/reset_prefix_cache").status_code == 200
    assert client.get(f"/v1/responses/{kept}").status_code == 404


def test_errors_of_every_route_are_as_told(client: TestClient, paths: dict[str, Any]) -> None:
    told = client.get("/openapi.json").json()
    for path in BODIES:
        refused = client.post(path, json={"model": 5})
        assert refused.status_code == 400
        schema = paths[path]["post"]["responses"]["default"]["content"]["application/json"]
        name = schema["schema"]["$ref"].rpartition("/")[2]
        jsonschema.validate(refused.json(), told["components"]["schemas"][name])
