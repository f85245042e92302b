"""Request ids, API keys, CORS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def guarded(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, api_keys=["first", "schlüssel"])) as client:
        yield client


@pytest.mark.parametrize("key", ["first", "schlüssel"])
def test_a_valid_key_opens(guarded: TestClient, key: str) -> None:
    headers = {b"authorization": b"Bearer " + key.encode()}
    assert guarded.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "first"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic first"},
        {"host": "x/health?y="},
        {"host": "x/health#"},
        {"host": "x/health\\"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("path", ["/v1/models", "//v1/models", "/tokenize", "/nothing"])
def test_anything_else_is_refused(guarded: TestClient, headers: dict[str, str], path: str) -> None:
    response = guarded.get(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == 401
    assert response.headers["www-authenticate"] == "Bearer"


def test_probes_need_no_key(guarded: TestClient) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert guarded.get(path).status_code == 200


def test_request_ids(client: TestClient, engine: FakeEngine) -> None:
    def ask(request_id: str) -> tuple[str, str]:
        headers = {"x-request-id": request_id}
        response = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        return response.headers["x-request-id"], response.json()["id"]

    assert ask("mine-1") == ("mine-1", "cmpl-mine-1")
    assert ask("mine-1") == ("mine-1", "cmpl-mine-1")
    assert len(set(engine.started)) == 2, "in the engine ids are unique"
    for bad in ("a b", "x" * 65536, '"quoted"', ""):
        shown, body_id = ask(bad)
        assert bad == "" or bad not in shown + body_id
        assert shown.isalnum() and len(shown) == 32
    assert client.get("/nothing").headers["x-request-id"]


def test_cors_is_off_until_asked_for(client: TestClient, engine: FakeEngine) -> None:
    headers = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in client.get("/version", headers=headers).headers
    with TestClient(create_app(engine, allowed_origins=["https://a.example"])) as open_client:
        response = open_client.get("/version", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
