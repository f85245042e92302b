"""A step that fails under the server: requests end with an error, and /health says it."""

from __future__ import annotations

import time

import pytest
from starlette.testclient import TestClient

from jaxserve import EngineConfig
from jaxserve.async_engine import AsyncEngine
from server.app import create_app
from tests.jaxserve.test_engine_death import SIZES, engines_made, fail_dispatch


@pytest.mark.slow
def test_health_and_requests_after_a_failed_dispatch(monkeypatch) -> None:
    made = engines_made(monkeypatch)
    engine = AsyncEngine(EngineConfig.from_settings(**SIZES))
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        while client.get("/health").status_code == 503 and not engine.is_dead:
            time.sleep(0.05)
        assert client.get("/health").json() == {"status": "ok"}
        fail_dispatch(made[0])
        body = {"prompt": [1, 2, 3], "max_tokens": 4}
        failed = client.post("/v1/completions", json=body)
        assert failed.status_code == 500
        assert "engine has stopped" in failed.json()["error"]["message"]
        assert "out of memory" not in failed.text, "the log has the details, not the client"
        assert client.get("/health").json() == {"status": "dead"}
        late = client.post("/v1/completions", json=body)
        assert late.status_code == 503
        assert "must be restarted" in late.json()["error"]["message"]
