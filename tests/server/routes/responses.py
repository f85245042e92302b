"""The tests' requests to `/v1/responses`."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from server.tools.choice import Parsers
from tests.server.fake_engine import FakeEngine

ROUTE = "/v1/responses"
PARSERS = Parsers("hermes", True, "qwen3")


def ask(client: TestClient, **fields: Any) -> Any:
    given = {"input": "hi", "max_output_tokens": 100} | fields
    response = client.post(ROUTE, json=given)
    assert response.status_code == 200, response.text
    return response.json()


def prompt(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.prompts[-1]))
