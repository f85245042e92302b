"""The watchdog on time in which its own process was stopped; no process is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.isolation import supervisor as module
from jaxserve.isolation.supervisor import LOAD_FACTOR, LOAD_SLACK_S, Supervisor
from jaxserve.liveness.pulse import BEAT_S, Pulse
from jaxserve.liveness.silence import HUNG_S
from tests.jaxserve.observability.test_step_clock import Clock

PAUSE_S = 600.0


class Watched:
    """A supervisor on a fake clock, of an engine that says nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, isolation: Isolation, is_serving: bool):
        self.clock = Clock()
        self.killed: list[float] = []
        monkeypatch.setattr(module, "Pulse", lambda: Pulse(self.clock))
        self.supervisor = Supervisor(
            EngineConfig(model="none"),
            isolation,
            on_start=lambda: None,
            on_ready=lambda ready: None,
            has_work=lambda: True,
            notify=lambda: None,
        )
        self.process: Any = self
        self.supervisor._current = self.process
        self.supervisor._is_busy = True
        if is_serving:
            self.supervisor.serving.set()
            self.supervisor.silence.begin()
        else:
            self.supervisor._load = module._Load()

    def kill(self) -> None:
        self.killed.append(self.clock())

    def watch(self, seconds: float, pauses: Callable[[int], bool]) -> None:
        """The watchdog's thread for so long, without the pauses before the looks that have one."""
        looks = 0

        def wait(timeout: float) -> bool:
            nonlocal looks
            looks += 1
            self.clock.now += timeout + (PAUSE_S if pauses(looks) else 0.0)
            return looks * timeout > seconds or bool(self.killed)

        self.supervisor.ended.wait = wait  # type: ignore[method-assign, assignment]
        self.supervisor._watch()


FIRST = Isolation(load_timeout=30.0)


@pytest.mark.parametrize("load_seconds", [None, 5.0], ids=["first", "again"])
def test_time_in_which_the_server_was_stopped_is_not_loading_time(
    monkeypatch: pytest.MonkeyPatch, load_seconds: float | None
) -> None:
    most = 30.0 if load_seconds is None else LOAD_SLACK_S + LOAD_FACTOR * load_seconds
    one = Watched(monkeypatch, FIRST, is_serving=False)
    one.supervisor._load_seconds = load_seconds
    begin = one.clock()
    one.watch(most - 2.0, lambda look: look in (3, 7, 8))
    assert one.killed == []
    one.watch(2 * most, lambda look: False)
    (killed,) = one.killed
    assert killed - begin - 3 * PAUSE_S == pytest.approx(most, abs=8 * BEAT_S), (
        "one that hangs is killed"
    )


def test_how_long_the_first_one_loads_is_told_without_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Watched(monkeypatch, Isolation(), is_serving=False)
    one.watch(20.0, lambda look: look == 5)
    assert one.supervisor._load is not None
    assert one.supervisor._load.seconds == pytest.approx(20.0, abs=8 * BEAT_S)


def test_time_in_which_the_server_was_stopped_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Watched(monkeypatch, Isolation(), is_serving=True)
    one.watch(HUNG_S - 2.0, lambda look: look % 9 == 0)
    assert one.killed == []
    paused = one.clock() - HUNG_S
    one.watch(2 * HUNG_S, lambda look: False)
    (killed,) = one.killed
    assert killed - paused < HUNG_S + 4.0, "an engine that hangs after that is killed in time"
