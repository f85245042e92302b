"""An engine's process that dies while it sleeps or is paused: the next one is as it was."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.boundary.messages import Action, Control
from jaxserve.client.sleep import TAGS, Sleep
from jaxserve.config.engine_config import Isolation
from jaxserve.errors import ValidationError
from jaxserve.isolation.process_client import ProcessClient
from jaxserve.isolation.supervisor import EngineDeath, EngineStart
from jaxserve.observability.step_clock import ClientClock
from jaxserve.processes.wire import ModelSizes, Ready
from tests.jaxserve.isolation.serving import CONFIG
from tests.resolved_config import resolved

CALLS = ["sleep", "deep", "release", "weights", "kv_cache", "wake", Action.PAUSE, Action.RESUME]


class Process:
    """Frees what it has and takes what it lacks, and fails where it is told otherwise."""

    def __init__(self) -> None:
        self.is_alive, self.is_paused = True, False
        self.away: set[Action] = set()

    def send(self, body: Any) -> None:
        assert isinstance(body, Control)
        match body.action:
            case _ if not self.is_alive:
                return
            case Action.PAUSE | Action.RESUME:
                self.is_paused = body.action is Action.PAUSE
            case Action.SLEEP | Action.DEEP_SLEEP:
                assert not self.away, "it sleeps already"
                self.away = set(TAGS.values())
            case Action.RELEASE_KV_CACHE:
                assert not self.away, "it sleeps already"
                self.away = {Action.WAKE_KV_CACHE}
            case action:
                self.away.remove(action)


def client_of(process: Process) -> ProcessClient:
    client = ProcessClient(CONFIG, ClientClock(), lambda: None, Isolation(module="none"))
    sizes = ModelSizes(60, 8, 1, (), (), None)
    client._bind_ready(Ready(resolved(CONFIG), sizes, "m", "m", 64))
    client._supervisor.loaded.set()
    client._supervisor.events.append(EngineStart(process))  # type: ignore[arg-type]
    client.outputs()
    return client


def call(client: ProcessClient, name: Any) -> None:
    sleep = Sleep(client)
    match name:
        case Action():
            client.control(name)
        case "sleep" | "deep":
            with suppress(ValidationError):  # only pages are away
                sleep.sleep(1 if name == "sleep" else 2)
        case "release":
            with suppress(ValidationError):  # it sleeps
                sleep.release_kv_cache()
        case "wake":
            sleep.wake_up(None)
        case tag:
            sleep.wake_up([tag])


# deaths and starts are known once they are taken
@given(st.lists(st.sampled_from([*CALLS, "die", "start", "take"]), max_size=12))
def test_it_is_told_what_the_one_before_was_told(names: list[Any]) -> None:
    process = Process()
    client = client_of(process)
    events = client._supervisor.events
    for name in [*names, "start", "take"]:
        if name == "die" and process.is_alive:
            process.is_alive = False
            events.append(EngineDeath("was killed"))
        elif name == "start" and not process.is_alive:
            process = Process()
            events.append(EngineStart(process))  # type: ignore[arg-type]
        elif name == "take":
            client.outputs()
        elif name not in ("die", "start"):
            call(client, name)
    assert process.is_paused == client.is_paused
    assert bool(process.away) == Sleep(client).is_sleeping
    call(client, "wake")
    assert not process.away and not Sleep(client).is_sleeping
