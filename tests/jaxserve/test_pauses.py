"""Calls of `AsyncLLMEngine` that hold requests back, one in the middle of another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxserve.async_llm_engine import POLL_S, AsyncLLMEngine
from jaxserve.boundary.messages import Action
from jaxserve.client.engine_client import EngineClient
from jaxserve.errors import ValidationError
from jaxserve.observability.metrics import Metrics


class Client(EngineClient):
    """Notes what the engine is asked for."""

    has_work = False

    def __init__(self) -> None:
        self.is_paused, self.asleep = False, []
        self.metrics = Metrics("m")
        self.posted: list[Action] = []

    def _post(self, body: Any) -> None:
        self.posted.append(body.action)

    def check_alive(self) -> None: ...

    def outputs(self) -> list[Any]:
        raise AssertionError


class Engine:
    """Its live requests end after a few turns of the loop, unless they stand still or `hang`."""

    is_dead = False

    def __init__(self, *live: str, hang: bool = False) -> None:
        self.client, self.refusal, self.hang = Client(), None, hang
        self._live, self._turns = set(live), 3

    @property
    def live_requests(self) -> list[str]:
        self._turns -= not self.client.is_paused and not self.hang
        if self._turns < 0:
            self._live.clear()
        return [*self._live]

    async def wait_ready(self) -> None: ...

    async def abort(self, request_id: str) -> None:
        self._live.discard(request_id)

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def reset_prefix_cache(self) -> None: ...


def run(engine: Engine, *calls: str | tuple[str, dict[str, Any]]) -> tuple[list[Any], Any]:
    """What calls give that begin one after the other, each once the one before has begun."""

    async def main() -> tuple[list[Any], Any]:
        front, begun = AsyncLLMEngine(engine), []  # type: ignore[arg-type]
        for call in calls:
            name, given = (call, {}) if isinstance(call, str) else call
            begun.append(asyncio.create_task(getattr(front, name)(**given)))
            for _ in range(2):
                await asyncio.sleep(0)
        async with asyncio.timeout(100 * POLL_S):
            return await asyncio.gather(*begun, return_exceptions=True), front

    return asyncio.run(main())


def check(engine: Engine, front: AsyncLLMEngine, *, asleep: bool) -> None:
    assert asyncio.run(front.is_sleeping()) == asleep == (engine.refusal is not None)
    assert asyncio.run(front.is_paused()) == asleep


WAITING = "sleep", {"mode": "wait"}


@pytest.mark.parametrize(
    ("calls", "asleep"),
    [
        (("sleep", "wake_up"), False),
        (("sleep", "wake_up", "sleep"), True),
        (("sleep", "wake_up", "sleep", "wake_up"), False),
        (("pause_generation", "resume_generation", "sleep"), True),
    ],
)
def test_the_last_call_decides_whether_requests_are_let_in(
    calls: tuple[str, ...], asleep: bool
) -> None:
    engine = Engine("a")
    found, front = run(engine, *calls)
    assert not [one for one in found if isinstance(one, Exception)]
    check(engine, front, asleep=asleep)


def test_requests_are_not_let_in_while_it_falls_asleep() -> None:
    engine = Engine()
    found, front = run(engine, "sleep", "resume_generation")
    assert "wake_up" in str(found[1]), "it slept by then"
    check(engine, front, asleep=True)


@pytest.mark.parametrize(
    ("last", "asleep"), [("wake_up", False), ("resume_generation", False), ("sleep", True)]
)
def test_a_sleep_that_waits_gives_way_to_the_next_call(last: str, asleep: bool) -> None:
    engine = Engine("a", hang=True)
    found, front = run(engine, WAITING, last)
    assert isinstance(found[0], ValidationError) and "mode='wait'" in str(found[0])
    assert not isinstance(found[1], Exception)
    check(engine, front, asleep=asleep)
    assert engine.client.posted == ([Action.SLEEP] if asleep else [Action.RESUME])


def test_a_call_that_is_refused_leaves_a_sleep_that_waits_alone() -> None:
    engine = Engine("a")
    wrong = ("wake_up", {"tags": ["cache"]}), ("sleep", {"mode": "freeze"})
    found, front = run(engine, WAITING, *wrong)
    assert found[0] is None and all(isinstance(one, ValidationError) for one in found[1:])
    check(engine, front, asleep=True)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_that_stand_still_go_on_to_their_ends_before_it_sleeps(mode: str) -> None:
    engine = Engine("a")
    keep = ("sleep", {"level": 0, "mode": "keep"})
    found, front = run(engine, keep, ("sleep", {"mode": mode}))
    assert found == [None, None]
    check(engine, front, asleep=True)
    assert engine.client.posted == [Action.PAUSE, Action.RESUME, Action.SLEEP]
    assert not engine.client.is_paused
