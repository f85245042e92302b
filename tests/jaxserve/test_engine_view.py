"""Looking at an engine that serves elsewhere."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from jaxserve.async_engine import AsyncEngine
from jaxserve.boundary.engine_view import EngineView
from jaxserve.config.engine_config import EngineConfig, Isolation

VIEW = EngineView(1, [], [], 1, 1, b"\0\0", 0.0)


class Client:
    """A client whose engine answers a look when the test says so."""

    def __init__(self) -> None:
        self.is_ready, self.is_dead = True, False
        self.looks = 0
        self.found: EngineView | None = None
        self.wake: Any = None

    def look(self) -> None:
        self.looks += 1

    def outputs(self) -> list[Any]:
        return []

    def take_failures(self) -> dict[str, Exception]:
        return {}

    def take_view(self) -> EngineView | None:
        found, self.found = self.found, None
        return found


def test_who_asks_meanwhile_gets_the_same_view(monkeypatch) -> None:
    async def run() -> None:
        client = Client()

        def make(*given: Any) -> Client:
            client.wake = given[2]
            return client

        monkeypatch.setattr("jaxserve.isolation.process_client.ProcessClient", make)
        engine = AsyncEngine(EngineConfig(model="m"), start=False, isolation=Isolation())
        views = asyncio.gather(engine.view(5), engine.view(5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.found = VIEW
        client.wake()
        assert await views == [VIEW, VIEW] and client.looks == 1
        assert await engine.view(0.01) is None, "an engine that says nothing"
        client.is_ready = False
        assert await engine.view(5) is None and client.looks == 2

    asyncio.run(run())


def test_slots_bear_the_ids_of_requests() -> None:
    from jaxserve.boundary.engine_view import SlotView
    from jaxserve.client.engine_client import EngineClient

    known = SimpleNamespace(request_of={"7.0": "cmpl-1"}.get)
    slots = [SlotView(n, name, 0, 1, 1, 1, 1, 1, 0, False, 0, 0.0) for n, name in enumerate("ab")]
    slots[0] = slots[0]._replace(sequence_id="7.0")
    client: Any = SimpleNamespace(_processor=known)
    view = EngineClient._with_request_ids(client, VIEW._replace(slots=slots))
    assert [one.sequence_id for one in view.slots] == ["cmpl-1", ""]
