"""When fronts are replaced, and when the server gives them up."""

from __future__ import annotations

import argparse
import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.boundary.front_messages import AboutModel, EngineStanding
from jaxserve.boundary.messages import EngineStats, StepOutput
from jaxserve.boundary.step_times import StepTimes
from server.counts import Cell
from server.fronts import hub as module
from server.fronts.front_process import HUNG_S, FrontProcess
from server.fronts.hub import MOST_DEATHS, Hub


class Front:
    is_hung = FrontProcess.is_hung

    def __init__(self, start: Any, *_: Any):
        self.name, self.row, self.is_ready = start.name, start.row, False
        self.is_lost = False
        self.kills = 0
        self._turns = self._silent_s = 0.0
        self.sent: list[Any] = []
        self.send = self.sent.append

    def kill(self) -> None:
        self.kills += 1

    def lost(self) -> None:
        self.is_lost = True


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Front] = []

    def make(*given: Any) -> Front:
        made.append(Front(*given))
        return made[-1]

    monkeypatch.setattr(module, "FrontProcess", make)
    with socket.socket() as listener:
        other = argparse.Namespace(func=None)
        hub: Any = Hub(argparse.Namespace(api_server_count=1, others=[other]), [], listener)
        models = [
            SimpleNamespace(engine=SimpleNamespace(asked=name), model_names=(name,), is_held=True)
            for name in ("a", "b")
        ]
        service: Any = SimpleNamespace(models=models, created=0)
        hub.serve(service, None)
        hub.made = made
        hub._start(0)
        yield hub


def test_a_front_that_has_answered_is_replaced_however_often_it_dies(hub: Any) -> None:
    hub._board.counts(1).put(Cell.CONNECTIONS, 7)
    for count in range(1, 2 * MOST_DEATHS):
        hub.made[-1].is_ready = True
        hub._ended(hub.made[-1], "was ended by signal 9 (SIGKILL)")
        assert hub.made[-2].is_lost and hub.error is None and len(hub.made) == 1 + count
    assert len({one.name for one in hub.made}) == len(hub.made), "no name comes again"
    assert {one.row for one in hub.made} == {1} and hub.counts.total(Cell.CONNECTIONS) == 0


def test_one_that_dies_before_it_answers_ends_the_server(hub: Any) -> None:
    for _ in range(MOST_DEATHS):
        assert hub.error is None
        hub._ended(hub.made[-1], "ended with exit code 1")
    assert len(hub.made) == MOST_DEATHS and "ended with exit code 1" in hub.error


def test_a_front_whose_loop_stands_still_is_killed_once(hub: Any) -> None:
    front = hub.made[0]
    hub._end_hung(1000.0)
    assert not front.kills, "it has not begun"
    hub._board.counts(1).put(Cell.TURNS, 1)
    hub._end_hung(1000.0)
    hub._end_hung(1000.0)
    assert not front.kills, "it is loading"
    front.is_ready = True
    for turns in (1, 2):
        hub._board.counts(1).put(Cell.TURNS, turns)
        hub._end_hung(1000.0)
        hub._end_hung(HUNG_S)
    assert not front.kills, "it has turned"
    hub._end_hung(0.1)
    hub._end_hung(0.1)
    assert front.kills == 1
    hub._ended(front, "was ended by signal 9 (SIGKILL)")
    hub._end_hung(1000.0)
    assert len(hub.made) == 2 and not hub.made[1].kills, "its successor has not begun"


def test_nothing_is_started_once_the_server_ends(hub: Any) -> None:
    hub._is_ending = True
    hub._ended(hub.made[-1], "ended with exit code 0")
    assert len(hub.made) == 1 and hub.made[0].is_lost and hub.error is None


class Clock:
    elsewhere = (0.0, 0.0)


class Metrics:
    def __init__(self) -> None:
        self.refused: list[tuple[str, int]] = []

    def record_refused(self, limit: str, count: int) -> None:
        self.refused.append((limit, count))


def test_fronts_hear_that_engines_serve_once_the_server_lets_in_requests(hub: Any) -> None:
    stats = [SimpleNamespace(num_waiting=2 + place, page_usage=0.25) for place in (0, 1)]
    for model, told in zip(hub._models, stats):
        engine = model.engine
        engine.client = SimpleNamespace(stats=lambda told=told: told, ready=f"{model.name} is")
        engine.is_dead = engine.is_restarting = False
        engine.is_ready, engine.refusal, engine.silence = True, None, None
    sent = hub.made[0].sent
    hub.tell_standing()
    assert sent == [
        AboutModel("a", EngineStanding("loading", "", 2, 0.25)),
        AboutModel("b", EngineStanding("loading", "", 3, 0.25)),
    ]
    hub.load()
    hub.tell_standing()
    assert sent[2:] == [
        AboutModel("a", "a is"),
        AboutModel("a", EngineStanding("loading", "", 2, 0.25)),
        AboutModel("b", "b is"),
        AboutModel("b", EngineStanding("loading", "", 3, 0.25)),
    ], "its start may still fail"
    for model in hub._service.models:
        model.is_held = False
    hub.tell_standing()
    assert sent[6:] == [
        AboutModel("a", EngineStanding("ok", "", 2, 0.25)),
        AboutModel("b", EngineStanding("ok", "", 3, 0.25)),
    ]
    stats[1].num_waiting = 4
    hub.tell_standing()
    assert sent[8:] == [AboutModel("b", EngineStanding("ok", "", 4, 0.25))]


def test_what_fronts_count_of_a_model_is_told_to_its_own_metrics(hub: Any) -> None:
    for model in hub._models:
        model.engine.clock, model.engine.metrics = Clock(), Metrics()
    for place, refused in ((0, 2), (1, 3)):
        counts = hub._board.counts(1, place)
        counts.put(Cell.TEXT_S, 0.5 + place)
        counts.add(Cell.REFUSED_WAITS, refused)
    for _ in range(2):
        hub._add_up()
    assert [one.engine.clock.elsewhere for one in hub._models] == [(0.5, 0.0), (1.5, 0.0)]
    told = [one.engine.metrics.refused for one in hub._models]
    assert told == [[("max_queue_wait", 2)], [("max_queue_wait", 3)]]


def test_a_step_of_one_model_goes_to_the_front_that_asked(hub: Any) -> None:
    stats = EngineStats(1, 0, 0.0, 0, 0, 0, StepTimes())
    hub._stepped("b", StepOutput(["1:0.0", "2:0.0", "3.0"], [5, 6, 7], {}, {}, {}, {}, stats))
    (told,) = hub.made[0].sent
    assert told.model == "b" and told.message.tokens == [5]


def test_a_look_that_fails_is_not_the_last(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []

    def fail() -> None:
        looks.append(None)
        raise ValueError

    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(hub, "tell_standing", fail)

    async def run() -> None:
        looking = asyncio.ensure_future(hub._look())
        while len(looks) < 2:
            await asyncio.sleep(0)
        looking.cancel()

    asyncio.run(asyncio.wait_for(run(), 5))
