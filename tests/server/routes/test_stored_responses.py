"""`/v1/responses` that are kept: told again, continued, run in the background, cancelled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.client_limits import Limits
from server.keys import ApiKey
from tests.server.fake_engine import FakeEngine
from tests.server.named_events import named_events
from tests.server.routes.responses import PARSERS, ROUTE, ask, prompt
from tests.server.test_errors import assert_error
from tests.server.unconstrained import UnconstrainedEngine
from tests.waiting import until


@pytest.fixture
def engine() -> UnconstrainedEngine:
    return UnconstrainedEngine(max_model_len=512)


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, parsers=PARSERS), raise_server_exceptions=False) as client:
        yield client


def test_a_conversation_goes_on(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "one"
    first = ask(client, instructions="I")
    engine.reply = "two"
    body = {"input": "more", "previous_response_id": first["id"], "stream": True}
    second = named_events(client.post(ROUTE, json=body).content)[-1][1]["response"]
    # instructions are those of one request alone
    assert prompt(engine) == "[user]hi[assistant]one[user]more[assistant]"
    assert second["previous_response_id"] == first["id"]
    ask(client, input=[{"role": "user", "content": "!"}], previous_response_id=second["id"])
    assert prompt(engine) == "[user]hi[assistant]one[user]more[assistant]two[user]![assistant]"
    assert client.get(f"{ROUTE}/{first['id']}").json() == first


def test_what_is_not_kept(client: TestClient) -> None:
    name = ask(client, store=False)["id"]
    for path, method in (
        (f"{ROUTE}/{name}", "GET"),
        (f"{ROUTE}/{name}", "DELETE"),
        (f"{ROUTE}/{name}/cancel", "POST"),
    ):
        assert_error(client.request(method, path), 404, "response_id")
    body = {"input": "a", "previous_response_id": name}
    assert_error(client.post(ROUTE, json=body), 404, "previous_response_id")
    body["previous_response_id"] = "../etc"
    assert_error(client.post(ROUTE, json=body), 404, "previous_response_id")
    assert_error(client.get(f"{ROUTE}/x%0d%0ay"), 404, "response_id")


def test_it_is_forgotten(client: TestClient) -> None:
    path = f"{ROUTE}/{ask(client)['id']}"
    assert_error(client.post(f"{path}/cancel"), 400, "response_id")
    assert_error(client.get(path, params={"stream": "true"}), 400, "stream")
    assert client.delete(path).json()["deleted"] is True
    assert client.get(path).status_code == 404


def test_a_client_does_not_choose_the_name(client: TestClient, engine: FakeEngine) -> None:
    headers = {"x-request-id": "mine"}
    response = client.post(ROUTE, json={"input": "a", "request_id": "other"}, headers=headers)
    assert response.headers["x-request-id"] == "mine" and "mine" in engine.started[-1]
    name = response.json()["id"]
    assert len(name) == len("resp_") + 48 and "mine" not in name and "other" not in name


def test_what_is_kept_is_bounded() -> None:
    limits = Limits(max_stored_responses=2)
    with TestClient(create_app(FakeEngine(max_model_len=512), limits=limits)) as client:
        first, second = (ask(client)["id"] for _ in range(2))
        client.get(f"{ROUTE}/{first}")
        third = ask(client)["id"]
        found = [client.get(f"{ROUTE}/{one}").status_code for one in (first, second, third)]
        assert found == [200, 404, 200], "what was used last is kept"
    with TestClient(
        create_app(FakeEngine(max_model_len=512), limits=Limits(max_stored_bytes=10_000))
    ) as client:
        for _ in range(50):
            ask(client, metadata={"a": "b" * 400})
        store = client.app.state.service.responses  # type: ignore[attr-defined]
        assert 0 < store.num_bytes <= 10_000 and 2 < store.count < 20
    with TestClient(
        create_app(FakeEngine(max_model_len=512), limits=Limits(max_stored_responses=0))
    ) as client:
        assert client.get(f"{ROUTE}/{ask(client)['id']}").status_code == 404
        body = {"input": "a", "background": True}
        assert_error(client.post(ROUTE, json=body), 503, "background")


def test_keys_have_nothing_in_common(engine: FakeEngine) -> None:
    keys = [ApiKey(one, one) for one in ("alice", "bob")]
    with TestClient(create_app(engine, api_keys=keys)) as client:
        client.headers["authorization"] = "Bearer alice"
        name = ask(client)["id"]
        assert client.get(f"{ROUTE}/{name}").status_code == 200
        client.headers["authorization"] = "Bearer bob"
        for method, path in (("GET", name), ("DELETE", name), ("POST", f"{name}/cancel")):
            assert_error(client.request(method, f"{ROUTE}/{path}"), 404, "response_id")
        body = {"input": "a", "previous_response_id": name}
        assert_error(client.post(ROUTE, json=body), 404, "previous_response_id")


def big_tool(number: int, size: int) -> dict[str, Any]:
    return {"type": "function", "name": f"f{number}", "description": "x" * size}


def test_a_key_cannot_drive_out_what_another_keeps(engine: FakeEngine) -> None:
    """By responses in the making, which cannot be dropped, with tools that are in no prompt."""
    engine.delay = 10
    keys = [ApiKey(one, one) for one in ("alice", "bob")]
    limits = Limits(max_stored_bytes=2**17)
    with TestClient(create_app(engine, api_keys=keys, parsers=PARSERS, limits=limits)) as client:
        client.headers["authorization"] = "Bearer bob"
        engine.delay = 0
        name = ask(client)["id"]
        client.headers["authorization"] = "Bearer alice"
        engine.delay = 10
        body = {"input": "a", "background": True, "tool_choice": "none"}
        answers = [
            client.post(ROUTE, json={**body, "tools": [big_tool(number, 8000)]})
            for number in range(16)
        ]
        assert [one.status_code for one in answers] == [200] * 7 + [503] * 9
        assert "65536 bytes" in assert_error(answers[-1], 503, "background")
        store = client.app.state.service.responses  # type: ignore[attr-defined]
        assert store.num_bytes < 2**17
        alone = {**body, "tools": [big_tool(0, 70_000)]}
        assert "65536 bytes" in assert_error(client.post(ROUTE, json=alone), 400, "background")
        again = client.post(ROUTE, json={**body, "tools": [big_tool(0, 8000)]})
        assert again.status_code == 200, "these tools are there already"
        client.headers["authorization"] = "Bearer bob"
        assert client.get(f"{ROUTE}/{name}").status_code == 200
        assert client.post(ROUTE, json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_encoded_once(
    client: TestClient, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often they are told: by three events, by `GET`, by what is kept."""
    encoded: list[str] = []

    class Encoder:
        def encode(self, value: Any) -> str:
            encoded.append(json.dumps(value, separators=(",", ":")))
            return encoded[-1]

    monkeypatch.setattr("server.protocol.responses._ENCODER", Encoder())
    tools = [big_tool(7, 40_000)]
    body = {"input": "a", "tools": tools, "tool_choice": "none", "stream": stream}
    response = client.post(ROUTE, json=body)
    if stream:
        told = [
            event["response"] for _, event in named_events(response.content) if "response" in event
        ]
        assert [one["status"] for one in told] == ["in_progress"] * 2 + ["completed"]
    else:
        told = [response.json()]
    told.append(client.get(f"{ROUTE}/{told[0]['id']}").json())
    assert told[-1] == told[-2] and all(one["tools"] == tools for one in told)
    assert sum("x" * 100 in one for one in encoded) == 1


def wait_for(client: TestClient, name: str, status: str) -> Any:
    deadline = time.monotonic() + 30
    while (told := client.get(f"{ROUTE}/{name}").json())["status"] != status:
        assert time.monotonic() < deadline, told
        time.sleep(0.01)
    return told


def test_in_the_background(client: TestClient, engine: FakeEngine) -> None:
    engine.delay = 0.01
    told = ask(client, background=True)
    assert told["status"] == "queued" and told["output"] == [] and told["usage"] is None
    assert client.get(f"{ROUTE}/{told['id']}").json()["status"] == "in_progress"
    body = {"input": "a", "previous_response_id": told["id"]}
    assert_error(client.post(ROUTE, json=body), 400, "previous_response_id")
    done = wait_for(client, told["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "hello" and done["background"] is True
    assert client.post(f"{ROUTE}/{told['id']}/cancel").json() == done, "it was there already"


def test_it_is_cancelled(client: TestClient, engine: FakeEngine) -> None:
    engine.delay = 10
    names = [ask(client, background=True)["id"] for _ in range(2)]
    until(lambda: len(engine.started) == 2, 10)
    assert client.post(f"{ROUTE}/{names[0]}/cancel").json()["status"] == "cancelled"
    assert client.get(f"{ROUTE}/{names[0]}").json()["status"] == "cancelled"
    assert client.delete(f"{ROUTE}/{names[1]}").status_code == 200
    assert len(engine.aborted) == 2


def test_it_is_cancelled_by_several_at_a_time(engine: FakeEngine) -> None:
    """What is kept meanwhile is not interrupted, and its place is free again."""
    app = create_app(engine, parsers=PARSERS, limits=Limits(max_stored_responses=2))
    with TestClient(app) as client:
        engine.delay = 10
        names = [ask(client, background=True)["id"] for _ in range(2)]
        for name in names:
            with ThreadPoolExecutor(4) as threads:
                path = f"{ROUTE}/{name}/cancel"
                told = list(threads.map(lambda _, path=path: client.post(path).json(), range(4)))
            assert {one["status"] for one in told} == {"cancelled"}
            assert client.get(f"{ROUTE}/{name}").json()["status"] == "cancelled"
        engine.delay = 0.0
        assert client.get(f"{ROUTE}/{ask(client)['id']}").status_code == 200


def test_a_failure_in_the_background(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_after = 2
    told = wait_for(client, ask(client, background=True)["id"], "failed")
    assert told["error"]["code"] == "server_error" and "secret" not in told["error"]["message"]
