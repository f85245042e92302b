"""The asyncio front and its timer, with a client that knows deadlines alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.async_engine import AsyncEngine
from jaxserve.client.deadlines import Deadlines
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import PausedError
from jaxserve.outputs import RequestOutput


class Client:
    """Its requests get nothing until their time is over."""

    is_dead, is_ready, processes = False, True, None
    metrics = SimpleNamespace(watch_processes=lambda processes: None)

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self.num_asked = self.num_checked = 0
        self.views: list[Any] = []
        self.over: list[str] = []
        self.told: list[Any] = []  # what it has to say next

    def check_alive(self) -> None:
        self.num_checked += 1
        assert self.num_checked < 1000, "the loop stands still"

    def look(self) -> None:
        self.views.append(object())

    def take_view(self) -> Any:
        return self.views.pop() if self.views else None

    def num_generated(self, request_id: str) -> int:
        return 0

    def add(self, prepared: PreparedRequest) -> None:
        timeout = prepared.group.queueing.timeout
        assert timeout is not None
        self.deadlines.add(prepared.request_id, time.monotonic() + timeout)

    def drop(self, request_id: str) -> None:
        self.deadlines.discard(request_id)

    def next_deadline(self) -> float | None:
        return self.deadlines.next

    def outputs(self) -> list[Any]:
        self.num_asked += 1
        self.over = self.deadlines.due(time.monotonic())
        told, self.told = self.told, []
        return told

    def take_failures(self) -> dict[str, Exception]:
        return {name: TimeoutError(name) for name in self.over}


class Engine(AsyncEngine):
    def _make_client(self, *given: Any) -> Any:
        return Client()


@pytest.fixture
def engine() -> Any:
    return Engine(EngineConfig(model="none"), start=False)


def stream(engine: Any, name: str, timeout: float) -> AsyncGenerator[RequestOutput, None]:
    prepared: Any = SimpleNamespace(
        request_id=name,
        params=SimpleNamespace(output_kind=None),
        group=SimpleNamespace(queueing=SimpleNamespace(timeout=timeout)),
    )
    return engine.stream(prepared)


def begun(engine: Any, name: str, timeout: float) -> asyncio.Future[RequestOutput]:
    """A request that is waited for."""
    return asyncio.ensure_future(anext(stream(engine, name, timeout)))


def left_behind(engine: Any, name: str, timeout: float) -> AsyncGenerator[RequestOutput, None]:
    """A stream of which an output was read in a loop that is closed now."""
    left = stream(engine, name, timeout)

    async def read_one() -> None:
        reading = asyncio.ensure_future(anext(left))
        await asyncio.sleep(0)
        engine.client.told = [SimpleNamespace(request_id=name, finished=False)]
        engine._deliver()
        await reading

    loop = asyncio.new_event_loop()
    loop.run_until_complete(read_one())
    loop.close()
    return left


def test_a_timer_of_a_loop_that_was_closed_is_set_again(engine: Any) -> None:
    left = left_behind(engine, "a", 0.01)

    async def wait_for_b() -> None:
        with pytest.raises(TimeoutError, match="b"):
            await asyncio.wait_for(begun(engine, "b", 0.05), 20)

    asyncio.run(wait_for_b())
    asyncio.run(left.aclose())


def test_a_stream_of_a_loop_that_was_closed_ends(engine: Any) -> None:
    left = [left_behind(engine, "a", 60.0), left_behind(engine, "b", 90.0)]
    for one in left:
        asyncio.run(one.aclose())
    assert engine.client.deadlines.next is None


def test_no_timer_is_left_of_streams_that_have_ended(engine: Any) -> None:
    async def main() -> None:
        one, other = begun(engine, "a", 60.0), begun(engine, "b", 90.0)
        await asyncio.sleep(0)
        due = engine._due
        one.cancel()
        await asyncio.wait([one])
        assert engine._due == engine.client.deadlines.next > due + 20
        other.cancel()
        await asyncio.wait([other])
        assert engine._due is None and engine._timer is None

    asyncio.run(main())
    assert engine.client.num_asked == 0


def test_a_deadline_ends_a_stream(engine: Any) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="a"):
            await asyncio.wait_for(begun(engine, "a", 0.01), 20)

    for _ in range(2):
        asyncio.run(main())
    assert engine.client.num_asked == 2 and engine._timer is None


def test_the_loop_goes_on_while_another_engine_loads(engine: Any) -> None:
    def is_there() -> None:
        engine.client.is_ready = True

    async def main() -> None:
        await engine.wait_ready()
        engine.client.is_ready = False
        asyncio.get_running_loop().call_later(0.03, is_there)
        settled = asyncio.create_task(engine.settle())
        while not settled.done():
            await asyncio.sleep(0.001)
            engine._deliver()
        await settled

    asyncio.run(main())


def test_a_request_that_was_tokenised_while_a_pause_came_is_refused(engine: Any) -> None:
    async def prepare(*given: Any) -> Any:
        engine.refusal = "the engine is paused"
        return SimpleNamespace(params=SimpleNamespace(output_kind=None))

    async def main() -> None:
        engine.prepare = prepare
        with pytest.raises(PausedError, match="is paused"):
            await anext(engine.generate([1], None, "a"))
        assert not engine.live_requests

    asyncio.run(main())
