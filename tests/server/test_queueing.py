"""Priority, deadlines and refusals over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.errors import QueueFullError
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.scheduling.ledger_accounts import RequestWork
from server.app import create_app
from server.keys import ApiKey, Client, client_name
from tests.server.fake_engine import FakeEngine
from tests.server.test_event_stream import Connection

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
}
paths = pytest.mark.parametrize("path", BODIES)


@pytest.fixture
def urgent() -> FakeEngine:
    return FakeEngine(scheduling_policy="priority")


def post(engine: FakeEngine, path: str, fields: dict[str, Any], **headers: str) -> Any:
    engine.is_dead = False  # as the application before left it
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.post(path, json=BODIES[path] | fields, headers=names)


@paths
def test_priority_and_timeout_reach_the_engine(urgent: FakeEngine, path: str) -> None:
    assert post(urgent, path, {"priority": -3, "timeout": 2}).status_code == 200
    assert post(urgent, path, {}).status_code == 200
    assert [(turn.priority, turn.timeout) for turn in urgent.turns] == [(-3, 2), (0, None)]


def test_headers_win_over_fields(urgent: FakeEngine) -> None:
    fields = {"priority": 7, "timeout": 9.0}
    headers = {"X_Vllm_Priority": "-4", "X_Request_Timeout": "0.25"}
    assert post(urgent, "/v1/completions", fields, **headers).status_code == 200
    assert [(turn.priority, turn.timeout) for turn in urgent.turns] == [(-4, 0.25)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Vllm-Priority", "1.5"),
        ("X-Vllm-Priority", "9" * 19),
        ("X-Vllm-Priority", ""),
        ("X-Request-Timeout", "nan"),
        ("X-Request-Timeout", "-1"),
        ("X-Request-Timeout", "1e3"),
        ("X-Request-Timeout", "inf"),
        ("X-Request-Timeout", "Infinity"),
        ("X-Request-Timeout", "0"),
        ("X-Request-Timeout", "0.0"),
        ("X-Request-Timeout", "-0"),
        ("X-Request-Timeout", "soon"),
        ("X-Request-Timeout", ""),
        ("X-Request-Timeout", "0x10"),
        ("X-Request-Timeout", "1_000"),
        ("X-Request-Timeout", "9" * 400),
    ],
)
def test_headers_that_are_no_numbers(urgent: FakeEngine, name: str, value: str) -> None:
    answer = post(urgent, "/v1/completions", {}, **{name.replace("-", "_"): value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("timeout", [0, -1, -0.0, "soon", True])
def test_no_time_at_all(urgent: FakeEngine, timeout: Any) -> None:
    answer = post(urgent, "/v1/completions", {"timeout": timeout})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


@paths
def test_a_priority_without_the_policy_is_refused(path: str) -> None:
    for headers in ({}, {"X_Vllm_Priority": "1"}):
        answer = post(FakeEngine(), path, {} if headers else {"priority": 1}, **headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


@paths
@pytest.mark.parametrize(("wait", "told"), [(0.0, "1"), (1.2, "2"), (9999.0, "60")])
def test_a_full_queue_is_503_with_retry_after(path: str, wait: float, told: str) -> None:
    engine = FakeEngine()
    engine.room_error = QueueFullError("max_num_queued_reqs", "7 requests wait, 7 may", wait)
    engine.tokenizer.encode = None  # nothing is tokenised
    answer = post(engine, path, {})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, told)
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
    assert "7 requests wait" in error["message"] and not engine.started


def test_the_queue_is_asked_before_the_body_is_read_and_for_all_prompts_at_once() -> None:
    engine = FakeEngine()
    assert post(engine, "/v1/completions", {"prompt": ["a", "b", "c"]}).status_code == 200
    assert engine.rooms == [("testclient", 1), ("testclient", 3)]
    engine.room_error = QueueFullError("max_queue_wait", "long", 1.0)
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        bad = client.post(
            "/v1/completions", content=b"{", headers={"content-type": "application/json"}
        )
    assert bad.status_code == 503


def test_a_refusal_reads_no_body() -> None:
    engine = FakeEngine()
    engine.room_error = QueueFullError("max_queue_wait", "long", 1.0)
    connection = Connection("/v1/completions", {"prompt": "a" * 1000})

    async def receive() -> Any:
        pytest.fail("the body was read")

    asyncio.run(create_app(engine)(connection.scope, receive, connection.send))
    assert connection.sent[0]["status"] == 503


@paths
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_when_the_request_is_added(path: str, stream: bool) -> None:
    engine = FakeEngine()
    engine.fail_after, engine.failure = 0, lambda: QueueFullError("max_queue_wait", "long", 3.5)
    answer = post(engine, path, {"stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "4")


class Late(FakeEngine):
    """Its requests' time is over after `told` tokens."""

    told = 0

    async def _outputs(self, token_ids: Any, params: Any, limit: int, request_id: str) -> Any:
        text = self.reply[: self.told]
        whole = self.told and params.output_kind.name == "DELTA"
        if whole:
            yield self._late(request_id, text, None)
        yield self._late(request_id, "" if whole else text, "abort")

    def _late(self, name: str, text: str, reason: str | None) -> RequestOutput:
        why = "timeout" if reason else None
        one = CompletionOutput(0, text, [ord(c) for c in text], None, None, reason, why)
        return RequestOutput(name, None, [1], [one], reason is not None)


@paths
@pytest.mark.parametrize("stream", [False, True])
def test_time_is_over_before_the_first_token(path: str, stream: bool) -> None:
    answer = post(Late(), path, {"timeout": 0.5, "stream": stream})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("TimeoutError", "timeout")
    assert "timeout=0.5 s" in error["message"]


@paths
@pytest.mark.parametrize("stream", [False, True])
def test_time_is_over_later(path: str, stream: bool) -> None:
    engine = Late()
    engine.told = 3
    answer = post(engine, path, {"timeout": 0.5, "stream": stream})
    assert answer.status_code == 200
    assert '"finish_reason":"abort","stop_reason":"timeout"' in answer.text
    assert "hel" in answer.text and "error" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n") == stream


@pytest.mark.parametrize(("path", "field"), [("completions", "prompt"), ("embeddings", "input")])
def test_a_batch_that_can_never_wait_is_the_clients_error(path: str, field: str) -> None:
    engine = FakeEngine(max_num_queued_reqs=3, max_num_queued_tokens=10, enable_embeddings=True)
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        for prompts, status in (([[5]] * 4, 400), ([[5] * 9] * 2, 400), ([[5] * 5] * 2, 200)):
            answer = client.post(f"/v1/{path}", json={field: prompts, "max_tokens": 1})
            if path == "embeddings" and answer.status_code == 200:
                continue
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),  # one host has all addresses of its network
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
        ("", ""),
    ],
)
def test_a_client_without_a_key_is_its_address(address: str, name: str) -> None:
    assert client_name({"client": (address, 1), "state": {}}) == name


def test_a_client_with_a_key_is_its_key() -> None:
    state = {"client": Client(ApiKey("secret", "search"))}
    assert client_name({"client": ("10.0.0.7", 1), "state": state}) == "key:search"


def test_requests_wait_until_they_are_answered_and_then_nothing_is_left() -> None:
    engine = FakeEngine(max_num_queued_reqs=1)
    ledger, seen = engine.ledger, []
    original = engine.stream

    async def stream(prepared: Any, **more: Any) -> Any:
        seen.append((ledger.num_entering, ledger.num_waiting))
        async for output in original(prepared, **more):
            yield output

    engine.stream = stream  # type: ignore[method-assign,assignment]
    body = {"prompt": "a", "n": 3}
    for _ in range(2):
        assert post(engine, "/v1/completions", body).status_code == 200
    assert seen == [(0, 1)] * 2 and not ledger.num_waiting
    engine.failure, engine.fail_after = lambda: RuntimeError("gone"), 0
    assert post(engine, "/v1/completions", body).status_code == 500
    assert not ledger.num_waiting


def test_a_call_of_more_prompts_than_may_wait_now_is_refused_before_it_is_tokenised() -> None:
    engine = FakeEngine(max_num_queued_reqs=3)
    engine.ledger.admit({"x": RequestWork("other", 1)})
    assert post(engine, "/v1/completions", {"prompt": ["a", "b"]}).status_code == 200
    engine.tokenizer.encode = None
    answer = post(engine, "/v1/completions", {"prompt": ["a", "b", "c"]})
    assert answer.status_code == 503 and "max_num_queued_reqs" in answer.text


def test_others_are_served_beside_a_key_that_fills_the_queue() -> None:
    engine = FakeEngine(max_num_queued_reqs=8)
    for name in range(8):
        engine.ledger.admit({str(name): RequestWork("key:a", 1)})
    keys = [ApiKey("a", "a"), ApiKey("b", "b")]
    with TestClient(create_app(engine, api_keys=keys)) as client:
        for key, status in (("a", 503), ("b", 200)):
            headers = {"authorization": f"Bearer {key}"}
            answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == status
