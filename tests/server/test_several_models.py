"""Several models behind one address: each request goes to the model that it names."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from checkpoints import bundled_model_path
from jaxserve.errors import QueueFullError
from server.app import create_app
from server.options import Options
from server.service import NO_PARSERS
from tests.server.fake_controls import FakeControls
from tests.server.fake_engine import FakeEngine
from tests.server.server_process import httpx, serving
from tests.waiting import until

CHAT = {"messages": [{"role": "user", "content": "a"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/invocations": {"prompt": "a"},
}


@pytest.fixture
def engines() -> list[FakeEngine]:
    return [
        FakeEngine("one", served_model_name=("a",)),
        FakeEngine("two", 32, served_model_name=("b", "org/b")),
    ]


@pytest.fixture
def client(engines: list[FakeEngine]) -> Iterator[TestClient]:
    first, other = engines
    app = create_app(first, others=[(other, NO_PARSERS)])  # type: ignore[arg-type]
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_a_request_goes_to_the_model_that_it_names(
    path: str, client: TestClient, engines: list[FakeEngine]
) -> None:
    for place, names in enumerate(((None, "a"), ("b", "org/b"))):
        for name in names:
            answer = client.post(path, json=BODIES[path] | ({"model": name} if name else {}))
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == (name or "a")
        assert [len(one.started) for one in engines] == [2, 2 * place]


def test_a_name_that_none_has_is_told_those_of_all(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "model": "c"})
    assert answer.status_code == 404 and "a, b, org/b" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "model": ["b"]}).status_code == 400


def test_all_are_listed_with_their_contexts(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one["max_model_len"]) for one in listed] == [
        ("a", 64),
        ("b", 32),
        ("org/b", 32),
    ]
    assert client.get("/v1/models/org/b").json()["max_model_len"] == 32


def test_prompts_are_counted_by_the_model_that_is_named(
    client: TestClient, engines: list[FakeEngine]
) -> None:
    for name, most in (("a", 64), ("b", 32)):
        body = {"model": name, "prompt": "x"}
        assert client.post("/tokenize", json=body).json()["max_model_len"] == most
    other = engines[1].tokenizer
    other.encode_chat = lambda *text, **how: [1, 2, 3]
    counts = [
        client.post("/v1/messages/count_tokens", json=CHAT | {"model": name}).json()
        for name in ("a", "b")
    ]
    assert counts[0]["input_tokens"] > 3 and counts[1] == {"input_tokens": 3}
    counted = client.post("/v1/responses/input_tokens", json={"model": "b", "input": "a"}).json()
    assert counted["input_tokens"] == 3
    assert client.post("/detokenize", json={"model": "b", "tokens": [65]}).json()["prompt"] == "A"


def test_one_that_does_not_serve_holds_up_none_other(
    client: TestClient, engines: list[FakeEngine]
) -> None:
    engines[0].is_ready = False
    assert client.post("/v1/completions", json={"prompt": "a", "model": "a"}).status_code == 503
    assert client.post("/v1/completions", json={"prompt": "a", "model": "b"}).status_code == 200
    told = client.get("/health")
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["b", "org/b"]
    unknown = client.post("/v1/completions", json={"prompt": "a", "model": "c"})
    assert unknown.status_code == 404, "whether the first one serves or not"
    assert told.status_code == 503 and told.json()["models"] == {"a": "loading", "b": "ok"}


def test_a_model_that_is_paused_hides_none_that_is_lost(
    client: TestClient, engines: list[FakeEngine]
) -> None:
    engines[0].refusal = "the engine sleeps"
    assert client.get("/health").json()["status"] == "paused"
    engines[1].is_dead = True
    told = client.get("/health")
    assert (told.status_code, told.json()["status"]) == (503, "dead")
    engines[1].is_dead = False


def test_control_is_of_all_models_or_of_one(engines: list[FakeEngine]) -> None:
    first, other = engines
    options = Options(has_control_routes=True)
    app = create_app(first, options=options, others=[(other, NO_PARSERS)])  # type: ignore[arg-type]
    controls = [FakeControls(), FakeControls()]
    for service, one in zip(app.state.service.models, controls):
        service.controls = one
    client = TestClient(app)
    assert client.post("/sleep?level=0").status_code == 200
    assert client.post("/release_kv_cache_memory?model=b").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/wake_up?model=org/b").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/release_kv_cache_memory?model=c").status_code == 404
    slept = (0, "abort")
    assert controls[0].asked == [slept]
    assert controls[1].asked == [slept, ("release_kv_cache_memory",), ("wake_up", None)]


def test_a_queue_that_is_full_is_one_models_own(
    client: TestClient, engines: list[FakeEngine]
) -> None:
    engines[1].room_error = QueueFullError("max_num_queued_reqs", "full", 1.0)
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert client.post("/v1/completions", json={"prompt": "a", "model": "b"}).status_code == 503


def kill_engines(pid: int, place: int) -> None:
    """Kill the engine that was started as the one at a place."""
    tasks = Path(f"/proc/{pid}/task")
    found = [
        int(one) for task in tasks.iterdir() for one in (task / "children").read_text().split()
    ]
    name = b"jaxserve.isolation.child"
    engines = [one for one in found if name in Path(f"/proc/{one}/cmdline").read_bytes()]
    os.kill(sorted(engines)[place], signal.SIGKILL)


@pytest.mark.slow
def test_two_real_models_and_the_death_of_one() -> None:
    flags = ("--model", str(bundled_model_path()), "--model", "bundled-picture")
    small = ("--max-num-seqs", "2", "--compile-ahead", "2", "--no-compile-in-background")
    with serving(*flags, *small, "--max-model-len", "512") as server:
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        text, pictures = [one["id"] for one in listed]
        assert pictures == "bundled-picture"

        def ask(name: str, count: int = 8) -> dict[str, Any]:
            body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
            more = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
            url = f"{server.url}/v1/chat/completions"
            answer = httpx.post(url, json=body | more, timeout=120)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            assert found["model"] == name
            return found["choices"][0]

        expected = {name: ask(name) for name in (text, pictures)}
        going_on: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: going_on.append(ask(text, 200)))
        thread.start()
        kill_engines(server.process.pid, 1)
        assert ask(text) == expected[text], "the other model's requests go on"
        thread.join()
        assert going_on
        until(lambda: server.health() == 200)
        assert ask(pictures) == expected[pictures], "it has come back"
        told = httpx.get(f"{server.url}/metrics").text
        restarts = {
            sample.labels["model_name"]: sample.value
            for family in text_string_to_metric_families(told)
            for sample in family.samples
            if sample.name == "jaxserve:engine_restarts_total"
        }
        assert {*restarts.values()} == {0.0, 1.0} and restarts[pictures] == 1.0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        assert not any("Traceback" in line for line in server.lines), "".join(server.lines)
