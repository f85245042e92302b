"""The front: what it sends on, and what it tells clients of replicas that end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from jaxserve.ray import build_openai_app
from server.client_limits import Limits
from server.on_ray.app import Replica
from server.on_ray.config import MAX_IN_FRONT, MAX_ONGOING, MAX_QUEUED
from server.on_ray.forwarding import Forwarded, Front, messages_of
from tests.server.server_process import ROOT

ray = pytest.importorskip("ray", reason="needs the extra `ray`")


class Answers:
    """What Ray's handle gives: messages, and then perhaps an error."""

    def __init__(self, messages: Any, errors: list[Exception | None]):
        self._messages, self._error = messages, errors.pop(0) if errors else None
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self) -> AsyncIterator[Any]:
        count = 0
        async for message in self._messages:
            count += 1
            if self._error is not None and count == getattr(self._error, "after", 1):
                raise self._error
            yield message


class Handle:
    def __init__(self, app: Any, *errors: Exception | None):
        self.app, self.errors = app, list(errors)
        self.asked: list[Forwarded] = []

    def remote(self, asked: Forwarded) -> Answers:
        self.asked.append(asked)
        return Answers(messages_of(self.app, asked), self.errors)


def lost(after: int = 1) -> Exception:
    error = ray.exceptions.ActorDiedError()
    error.after = after
    return error


async def told(request: Request) -> Response:
    return JSONResponse({"path": request.url.path, "body": (await request.body()).decode()})


async def events(request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        yield b"data: {"
        yield b"}\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


APP = Starlette(routes=[Route("/told", told, methods=["POST"]), Route("/{name:path}", events)])


LIMITS = Limits(max_body_bytes=100, max_pending_body_bytes=150)


def asked(handle: Handle) -> TestClient:
    return TestClient(Front(handle, LIMITS), raise_server_exceptions=False)


def test_a_request_is_answered_as_by_the_application() -> None:
    handle = Handle(APP)
    with asked(handle) as client:
        answer = client.post("/told", content="abc")
        assert answer.json() == {"path": "/told", "body": "abc"}
        assert client.get("/v1/x").text == "data: {}\n\ndata: {}\n\n"
        refused = client.post("/told", content="a" * 101)
    assert refused.status_code == 413 and "100 bytes" in refused.json()["error"]["message"]
    assert [one.body for one in handle.asked] == [b"abc", b""]


def test_what_a_lost_replica_has_not_begun_another_answers() -> None:
    handle = Handle(APP, lost())
    assert asked(handle).post("/told", content="x").status_code == 200
    assert len(handle.asked) == 2
    answer = asked(Handle(APP, lost(), lost(), lost())).post("/told", content="x")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "has ended" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "after", "end"),
    [
        ("/v1/completions", 3, ['{"error":', "[DONE]"]),
        ("/v1/completions", 4, ['{"error":', "[DONE]"]),  # in the middle of an event
        ("/v1/messages", 3, ['{"type":"error"']),
        ("/v1/responses", 3, ['{"type":"error"']),
    ],
)
def test_a_stream_that_is_cut_ends_with_an_error_event(
    path: str, after: int, end: list[str]
) -> None:
    text = asked(Handle(APP, lost(after))).get(path).text
    assert text.startswith("data: {}\n\n") and text.endswith("\n\n")
    last = [line[6:] for line in text.splitlines() if line.startswith("data: ")][-len(end) :]
    assert all(one.startswith(begin) for one, begin in zip(last, end)), text
    assert "has ended" in json.loads(last[0]).get("message", text)


def test_bodies_share_a_bound_until_their_answers_begin() -> None:
    async def main() -> None:
        may_begin, may_end, begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await may_begin.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            begun.set()
            await may_end.wait()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        front = Front(Handle(app), LIMITS)
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            first = asyncio.create_task(client.post("/told", content="a" * 100))
            while not front._bodies.pending:
                await asyncio.sleep(0)
            refused = await client.post("/told", content="a" * 51)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert "150 bytes" in refused.json()["error"]["message"]
            may_begin.set()
            await begun.wait()
            while front._bodies.pending:
                await asyncio.sleep(0)
            second = asyncio.create_task(client.post("/told", content="a" * 100))
            may_end.set()
            assert [(await one).status_code for one in (first, second)] == [200, 200]

    asyncio.run(main())


def test_full_replicas_and_a_failed_deployment_are_told() -> None:
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    full = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    failed = DeploymentUnavailableError(DeploymentID("d", "a"))
    for error, said in ((full, "all replicas are full"), (failed, "could not be deployed")):
        answer = asked(Handle(APP, error)).post("/told", content="x")
        assert answer.status_code == 503 and said in answer.json()["error"]["message"]


def test_the_front_has_room_for_all_that_wait_for_replicas() -> None:
    def front(**options: Any) -> Any:
        args = {"llm_configs": [{"model_loading_config": {"model_id": "tiny"}}]}
        return build_openai_app(args | {"ingress_deployment_config": options})._bound_deployment

    bounds = front().max_ongoing_requests, front().max_queued_requests
    assert bounds == (MAX_IN_FRONT, MAX_QUEUED) and MAX_IN_FRONT >= MAX_ONGOING + MAX_QUEUED
    assert front(max_ongoing_requests=7).max_ongoing_requests == 7


def test_what_the_page_and_the_manifest_deploy_is_built() -> None:
    """By Ray's own checks too, such as that a replica has room in its first bundle."""
    page = (ROOT / "docs" / "ray.md").read_text()
    whole, part = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    manifest = yaml.safe_load((ROOT / "deploy/kubernetes/rayservice.yaml").read_text())
    loading = {"model_loading_config": {"model_id": "tiny"}}
    several = {"llm_configs": [loading | yaml.safe_load(part)]}
    told = [yaml.safe_load(one) for one in (whole, manifest["spec"]["serveConfigV2"])]
    for args in [several, *(one["applications"][0]["args"] for one in told)]:
        (replicas,) = build_openai_app(args)._bound_deployment.init_args
        words, processes, actor = replicas._bound_deployment.init_args
        assert words[0] == "serve" and processes == (2 if args is several else 1)
        assert actor["num_gpus"] == (8 if args is several else 1)


def test_what_waits_in_a_replica_is_told_while_its_engine_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Replica, "__del__")  # Ray awaits it
    replica = Replica.__new__(Replica)
    engine: Any = SimpleNamespace(is_ready=False, ledger=SimpleNamespace(num_waiting_tokens=70))
    replica._app = Starlette()
    replica._app.state.service, replica._waiting = SimpleNamespace(engine=engine), 0
    told = []
    for engine.is_ready in (False, True, False):
        told.append(asyncio.run(replica.record_autoscaling_stats())["queued_tokens"])
        engine.ledger.num_waiting_tokens -= 1
    assert told == [0, 69, 69]


def test_a_client_that_leaves_ends_the_request() -> None:
    async def leave() -> None:
        ended = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while True:
                    await send({"type": "http.response.body", "body": b"x", "more_body": True})
            finally:
                ended.set()

        messages = messages_of(app, Forwarded({"type": "http"}, b""))
        assert (await anext(messages))["status"] == 200
        await messages.aclose()
        assert ended.is_set()

    asyncio.run(leave())
