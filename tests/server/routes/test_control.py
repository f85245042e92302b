"""`/health`, `/ping`, `/version`, `/metrics`."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from server.app import create_app
from tests.server.fake_engine import FakeEngine


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_follows_the_engine(client: TestClient, engine: FakeEngine, path: str) -> None:
    assert client.get(path).status_code == 200
    engine.states = ["ok", "dead"]
    assert client.get(path).json() == {"status": "ok", "engines": ["ok", "dead"]}
    engine.states = []
    engine.silence = "no step for 7 s"
    silent = client.get(path)
    assert silent.status_code == 503 and silent.headers["retry-after"] == "2"
    assert silent.json() == {"status": "silent", "reason": "no step for 7 s"}
    engine.is_ready = False
    loading = client.get(path)
    assert loading.status_code == 503 and loading.json() == {"status": "loading"}
    engine.is_dead = True
    assert client.get(path).json() == {"status": "dead"}
    assert client.get(path).status_code == 503
    engine.is_draining = True
    draining = client.get(path)
    assert draining.json() == {"status": "draining"} and draining.headers["retry-after"] == "5"


def test_version(client: TestClient) -> None:
    assert client.get("/version").json()["version"]


def test_metrics_while_loading_too(client: TestClient, engine: FakeEngine) -> None:
    engine.is_ready = False
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    names = [family.name for family in text_string_to_metric_families(response.text)]
    assert "jaxserve:num_requests_running" in names


def test_the_engine_ends_with_the_application(engine: FakeEngine) -> None:
    with TestClient(create_app(engine)) as client:
        assert client.get("/health").status_code == 200
        assert not engine.shut_down
    assert engine.shut_down
