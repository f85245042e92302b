"""What the server does for a front, and what it tells it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.boundary.front_messages import (
    AboutModel,
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


def run(test: Callable[[Any, list[Engine], list[Any]], Awaitable[None]]) -> None:
    async def with_a_front() -> None:
        engines, held = [Engine(), Engine()], Holders()
        models: list[Any] = [
            SimpleNamespace(engine=engine, holders=held, keys=None, model_names=(name,))
            for name, engine in zip("ab", engines)
        ]
        service, service.models = models[0], models
        start: Any = SimpleNamespace(name="1", row=1, board=0, listener=0)
        front: Any = FrontProcess(
            start, service, app, lambda *_: None, lambda: front.send("standing")
        )
        sent = front._process.sent
        sent.clear()
        await test(front, engines, sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EarlyProcess", lambda *_: None)
        patch.setattr(module, "EngineProcess", Process)
        asyncio.run(asyncio.wait_for(with_a_front(), 5))


def test_a_front_ends_its_own_requests_alone() -> None:
    async def test(front: Any, engines: list[Engine], sent: list[Any]) -> None:
        engine, other = engines
        front._take(AboutModel("a", AddCall(["1"], [GROUP], [[]])))
        for name in ("2", "1"):
            front._take(AboutModel("a", Left(name)))
        front._take(AboutModel("a", Stopped(["2:0.0", "7.0", "1:0.0"])))
        assert (engine.ended, engine.stopped, sent) == (["1"], ["1:0.0"], [])
        assert not other.stopped

    run(test)


def test_a_front_that_is_lost_ends_its_requests_of_every_model() -> None:
    async def test(front: Any, engines: list[Engine], sent: list[Any]) -> None:
        for model, name in (("a", "1"), ("b", "2"), ("b", "3")):
            front._take(AboutModel(model, AddCall([name], [GROUP], [[]])))
        front._take(AboutModel("b", Left("3")))
        front.lost()
        assert [one.ended for one in engines] == [["1"], ["3", "2"]]

    run(test)


def test_an_error_that_the_server_alone_has_met_is_told() -> None:
    async def test(front: Any, engines: list[Engine], sent: list[Any]) -> None:
        front._take(AboutModel("b", AddCall(["1"], [GROUP], [[]])))
        engines[1].tell("1", SimpleNamespace(outputs=[SimpleNamespace(finish_reason=ERROR)]))
        assert sent == [AboutModel("b", RequestFailure("1", "JaxServeError", FAILED))]

    run(test)


def test_an_answer_keeps_no_body_and_can_be_cut_off() -> None:
    async def test(front: Any, engines: list[Engine], sent: list[Any]) -> None:
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
