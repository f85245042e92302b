"""What the server does for a front, and what it tells it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.boundary.front_messages import (
    AddCall,
    HttpAnswer,
    HttpRequest,
    Left,
    RequestFailure,
    Stopped,
)
from jaxserve.outputs import ERROR
from jaxserve.params.sampling_params import SamplingParams
from server.fronts import front_process as module
from server.fronts.front_process import FAILED, FrontProcess
from server.holders import Holders

START = {"type": "http.response.start", "status": 200, "headers": []}
GROUP: Any = SimpleNamespace(params=SamplingParams(), queueing=SimpleNamespace(client=""))


class Process:
    def __init__(self, *_: Any):
        self.sent: list[Any] = []
        self.send = self.sent.append

    def receive(self) -> None:
        return None

    def wait(self, seconds: float) -> str:
        return "ended"


class Engine:
    def __init__(self) -> None:
        self.ended: list[str] = []
        self.stopped: list[str] = []

    def relay(self, prepared: Any, tell: Any) -> None:
        self.tell = tell

    def end_relayed(self, request_id: str) -> None:
        self.ended.append(request_id)

    def stop_relayed(self, sequence_ids: list[str]) -> list[str]:
        self.stopped += sequence_ids
        return []


async def app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send(START)
    await send({"type": "told", "transport": scope["state"]["transport"]})
    await asyncio.Event().wait()


def run(test: Callable[[Any, Engine, list[Any]], Awaitable[None]]) -> None:
    async def with_a_front() -> None:
        engine = Engine()
        service: Any = SimpleNamespace(engine=engine, holders=Holders(), keys=None)
        start: Any = SimpleNamespace(name="1", row=1, board=0, listener=0)
        front: Any = FrontProcess(
            start, service, app, lambda *_: None, lambda: front.send("standing")
        )
        sent = front._process.sent
        sent.clear()
        await test(front, engine, sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EarlyProcess", lambda *_: None)
        patch.setattr(module, "EngineProcess", Process)
        asyncio.run(asyncio.wait_for(with_a_front(), 5))


def test_a_front_ends_its_own_requests_alone() -> None:
    async def test(front: Any, engine: Engine, sent: list[Any]) -> None:
        front._take(AddCall(["a"], [GROUP], [[]]))
        for name in ("b", "a"):
            front._take(Left(name))
        front._take(Stopped(["2:0.0", "7.0", "1:0.0"]))
        assert (engine.ended, engine.stopped, sent) == (["a"], ["1:0.0"], [])

    run(test)


def test_an_error_that_the_server_alone_has_met_is_told() -> None:
    async def test(front: Any, engine: Engine, sent: list[Any]) -> None:
        front._take(AddCall(["a"], [GROUP], [[]]))
        engine.tell("a", SimpleNamespace(outputs=[SimpleNamespace(finish_reason=ERROR)]))
        assert sent == [RequestFailure("a", "JaxServeError", FAILED)]

    run(test)


def test_an_answer_keeps_no_body_and_can_be_cut_off() -> None:
    async def test(front: Any, engine: Engine, sent: list[Any]) -> None:
        body = bytes(1000)
        count = sys.getrefcount(body)
        front._take(HttpRequest(0, {"type": "http", "headers": []}, body))
        while not sent:
            await asyncio.sleep(0)
        assert sent == ["standing", HttpAnswer(0, START)], "what it has changed is known first"
        assert sys.getrefcount(body) == count
        front._went_on(0, gone=False)
        while len(sent) < 4:
            await asyncio.sleep(0)
        sent[-1].message["transport"].abort()
        while front.num_answers:
            await asyncio.sleep(0)
        assert sent[4:] == [HttpAnswer(0, {})]

    run(test)
