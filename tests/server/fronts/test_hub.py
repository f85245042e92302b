"""When fronts are replaced, and when the server gives them up."""

from __future__ import annotations

import argparse
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from server.counts import Cell
from server.fronts import hub as module
from server.fronts.hub import MOST_DEATHS, Hub


class Front:
    def __init__(self, start: Any, *_: Any):
        self.name, self.row, self.is_ready = start.name, start.row, False
        self.is_lost = False

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
        hub: Any = Hub(argparse.Namespace(api_server_count=1), [], listener)
        service: Any = SimpleNamespace(engine=SimpleNamespace(asked=None), created=0)
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


def test_nothing_is_started_once_the_server_ends(hub: Any) -> None:
    hub._is_ending = True
    hub._ended(hub.made[-1], "ended with exit code 0")
    assert len(hub.made) == 1 and hub.made[0].is_lost and hub.error is None
