"""Request ids, API keys, CORS."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from server.app import create_app
from server.keys import ApiKey
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def guarded(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(
        create_app(engine, api_keys=[ApiKey("first", "a"), ApiKey("schlüssel", "b")])
    ) as client:
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
    shown = client.post("/v1/messages", json={}, headers={"x-request-id": "mine-2"}).headers
    assert shown["request-id"] == shown["x-request-id"] == "mine-2"


def test_cors_is_off_until_asked_for(client: TestClient, engine: FakeEngine) -> None:
    headers = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in client.get("/version", headers=headers).headers
    with TestClient(create_app(engine, allowed_origins=["https://a.example"])) as open_client:
        response = open_client.get("/version", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000"],
)
def test_this_machines_names(engine: FakeEngine, host: str) -> None:
    with TestClient(create_app(engine, allowed_hosts=["localhost", "127.0.0.1", "::1"])) as client:
        assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "localhost@evil.example",
        "x/health?y=",
        "localhost:80:80",
        "localhost, evil",
        "",
        "127.0.0.1.evil.example:8000",
    ],
)
def test_other_names_are_refused(engine: FakeEngine, host: str) -> None:
    with TestClient(create_app(engine, allowed_hosts=["localhost", "127.0.0.1", "::1"])) as client:
        for path in ("/health", "/v1/models", "/metrics"):
            response = client.get(path, headers={"host": host})
            assert response.status_code == 400 and "allowed-hosts" in response.text


def test_websockets_are_refused(engine: FakeEngine) -> None:
    with (
        TestClient(create_app(engine, api_keys=[ApiKey("k", "a")])) as client,
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/v1/completions"),
    ):
        raise AssertionError("it was let in")


def test_keys_are_compared_by_digest_all_of_them(guarded: TestClient, monkeypatch: Any) -> None:
    """So that the time says neither how much of a key was right nor which key was meant."""
    compared: list[int] = []
    real = secrets.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return real(one, other)

    monkeypatch.setattr("server.keys.secrets.compare_digest", counted)
    for key in ("first", "firs", "x", ""):
        guarded.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert compared == [32] * 8


def test_the_load_is_told_in_the_format_that_is_asked_for(engine: FakeEngine) -> None:
    stats = SimpleNamespace(page_usage=0.5, num_waiting=3)
    engine.client = SimpleNamespace(stats=lambda: stats)
    client = TestClient(create_app(engine, api_keys=[ApiKey("k", "a")]))
    name, key = "endpoint-load-metrics", {"authorization": "Bearer k"}
    for form, told in (
        (
            "text",
            "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=3.0",
        ),
        (
            "JSON",
            'JSON {"named_metrics": {"kv_cache_usage_perc": 0.5, "num_requests_waiting": 3.0}}',
        ),
        ("BIN", None),
    ):
        asked = {f"{name}-format": form}
        for more in ({}, {"stream": True}):
            answer = client.post(
                "/v1/completions", json={"prompt": "a"} | more, headers=key | asked
            )
            assert answer.status_code == 200 and answer.headers.get(name) == told
        assert name not in client.post("/v1/completions", json={}, headers=asked).headers
    assert name not in client.get("/v1/models", headers=key).headers
