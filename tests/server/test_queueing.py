"""Priority, deadlines and refusals over HTTP."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from jaxserve.errors import QueueFullError
from jaxserve.outputs import CompletionOutput, RequestOutput
from server.app import create_app
from server.in_flight import InFlight
from server.keys import ApiKey, Client
from server.loop_lag import LoopLag
from server.service import client_name
from tests.server.fake_engine import FakeEngine
from tests.server.test_streaming import Connection

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
    engine.refusal = QueueFullError("max_num_queued_reqs", "7 requests wait, 7 may", wait)
    engine.tokenizer.encode = None  # nothing is tokenised
    answer = post(engine, path, {})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, told)
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
    assert "7 requests wait" in error["message"] and not engine.started


def test_the_queue_is_asked_before_the_body_is_read_and_for_all_prompts_at_once() -> None:
    engine = FakeEngine()
    assert post(engine, "/v1/completions", {"prompt": ["a", "b", "c"]}).status_code == 200
    assert engine.rooms == [1, 3]
    engine.refusal = QueueFullError("max_queue_wait", "long", 1.0)
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        bad = client.post(
            "/v1/completions", content=b"{", headers={"content-type": "application/json"}
        )
    assert bad.status_code == 503


def test_a_server_that_is_behind_refuses_before_it_reads() -> None:
    engine = FakeEngine(max_queue_wait=1.0)
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        lag = client.app.state.service.lag  # type: ignore[attr-defined]
        lag.stop()
        time.sleep(0.1)
        for seconds, status in ((0.2, 200), (1.5, 503), (0.0, 200)):
            lag.seconds = seconds
            answer = client.post("/v1/completions", json={"prompt": "a"})
            assert answer.status_code == status
            if status == 503:
                assert answer.headers["retry-after"] == "2" and "1.5 s behind" in answer.text
        assert engine.refused == ["event_loop"]
        lag.seconds = 1.5
        limits = replace(engine.config.server, max_queue_wait=math.inf)
        engine.config = replace(engine.config, server=limits)
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_what_is_in_flight_beyond_the_slots_waits() -> None:
    now = [0.0]
    flight = InFlight(lambda: now[0])
    with flight.one(100):
        assert flight.wait(64) == 0.0, "nothing was answered yet"
        for _ in range(20):
            now[0] += 0.05
            with flight.one(1):
                pass
        assert flight.wait(100) == 0.0 and flight.wait(101) == 0.0
        assert flight.wait(64) == pytest.approx(36 * 2 / 20)
        now[0] += 10
        assert flight.wait(64) == 0.0, "too long ago"
    assert flight.count == 0


def test_too_much_in_flight_is_refused() -> None:
    engine = FakeEngine(max_queue_wait=1.0, max_num_seqs=4)
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        flight = client.app.state.service.in_flight  # type: ignore[attr-defined]
        for _ in range(20):
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert flight.count == 0
        flight.count = 500
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert engine.refused == ["event_loop"]


def test_less_in_flight_is_let_in_where_less_is_allowed_and_who_enters_counts() -> None:
    engine = FakeEngine(max_queue_wait=1.0, max_num_seqs=4)
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        service = client.app.state.service  # type: ignore[attr-defined]
        for _ in range(20):
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        service.in_flight.count = 10  # 6 wait, and 10 a second were answered
        service.check_room()
        engine.allowed_share = 0.5
        with pytest.raises(QueueFullError, match=r"wait is 0\.6 s, 0\.5 s is allowed"):
            service.check_room()
        service.in_flight.count = 0
        entry = service.in_flight.enter()
        service.check_room()
        assert engine.enterings[-2:] == [0, 1]
        entry.leave()


def test_lag_is_measured() -> None:
    async def main() -> None:
        lag = LoopLag()
        lag.start()
        await asyncio.sleep(0.02)
        time.sleep(0.2)
        await asyncio.sleep(0.001)
        assert 0.1 < lag.seconds < 1
        await asyncio.sleep(0.12)
        assert lag.seconds < 0.1
        lag.stop()

    asyncio.run(main())


def test_a_refusal_reads_no_body() -> None:
    engine = FakeEngine()
    engine.refusal = QueueFullError("max_queue_wait", "long", 1.0)
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


def test_the_lag_of_the_loop_is_waiting_too() -> None:
    engine = FakeEngine(max_queue_wait=1.0)
    service = create_app(engine).state.service
    service.in_flight.wait = lambda slots: 0.7
    for lag, is_refused in ((0.1, False), (0.2, True)):
        service.lag.seconds = lag
        assert (service.refusal() is not None) is is_refused


def test_who_waits_for_its_reader_is_not_in_flight() -> None:
    flight = InFlight()
    with flight.one(3) as telling:
        assert flight.count == 3
        with telling():
            assert flight.count == 0
        assert flight.count == 3
    assert flight.count == 0


def test_a_stream_that_is_not_read_is_not_in_flight() -> None:
    engine = FakeEngine("ab" * 20)
    app = create_app(engine)
    flight = app.state.service.in_flight

    async def main() -> None:
        connection = Connection("/v1/completions", {"prompt": "a", "stream": True})
        goes_on = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            await connection.send(message)
            if message["type"] == "http.response.body":
                await goes_on.wait()

        serving = asyncio.ensure_future(app(connection.scope, connection.receive, send))
        await connection.some_data.wait()
        assert engine.started and flight.count == 0
        goes_on.set()
        await serving
        assert flight.count == 0

    asyncio.run(main())


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
    request = Request({"type": "http", "client": (address, 1), "headers": [], "state": {}})
    assert client_name(request) == name


def test_a_client_with_a_key_is_its_key() -> None:
    state = {"client": Client(ApiKey("secret", "search"))}
    request = Request({"type": "http", "client": ("10.0.0.7", 1), "headers": [], "state": state})
    assert client_name(request) == "key:search"
