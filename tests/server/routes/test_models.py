"""`/v1/models`."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.testclient import TestClient

from server.app import create_app
from tests.server.fake_engine import FakeEngine


def test_every_name_is_listed(client: TestClient) -> None:
    answer = client.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["fake", "org/fake"]
    assert all(card["max_model_len"] == 64 for card in answer["data"])


def test_one_model_by_name(client: TestClient) -> None:
    card = client.get("/v1/models/org/fake").json()
    assert card["id"] == "org/fake" and card["object"] == "model"


def test_anthropics_clients_get_its_shape(client: TestClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = client.get("/v1/models", headers=headers).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("fake", "org/fake", False)
    card = client.get("/v1/models/org/fake", headers=headers).json()
    assert page["data"][1] == card
    assert (card["type"], card["id"], card["display_name"]) == ("model", "org/fake", "org/fake")
    assert datetime.fromisoformat(card["created_at"]).tzinfo == UTC
    assert card["max_input_tokens"] == 64 and "object" not in card


def test_every_name_answers_with_itself(client: TestClient) -> None:
    for name in ("fake", "org/fake"):
        response = client.post("/v1/completions", json={"prompt": "a", "model": name})
        assert response.json()["model"] == name


def test_the_models_folder_is_another_name_of_it() -> None:
    engine = FakeEngine(served_model_name=("a",))
    with TestClient(create_app(engine)) as client:
        body = {"model": engine.asked.model, "prompt": "a"}
        assert client.post("/v1/completions", json=body).json()["model"] == "a"
        assert client.post("/v1/completions", json=body | {"model": "/models"}).status_code == 404
