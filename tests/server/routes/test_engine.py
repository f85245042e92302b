"""The engine's facts and events for the page, and the requests that each client may see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from jaxserve.boundary.engine_view import EngineView, QueueView, SlotView
from jaxserve.boundary.messages import EngineStats, PageStats
from jaxserve.boundary.step_history import StepHistory, StepRecord
from jaxserve.boundary.step_times import StepTimes
from jaxserve.boundary.work import Work
from server import watchers
from server.app import create_app
from server.errors import ApiError
from server.keys import ApiKey, Client
from server.options import Options
from server.service import Service
from tests.server.fake_engine import FakeEngine


def view(*names: str, cells: tuple[int, ...] = (0, 0, 1, 6, 7)) -> EngineView:
    slots = [
        SlotView(slot, name, 0, 20, 4, 23, 16, 2, 7, False, 1, 1.25)
        for slot, name in enumerate(names)
    ]
    data = np.array(cells, "<u2").tobytes()
    return EngineView(4, slots, [QueueView(0, 3, 0.5)], len(cells), 1, data, 1e-4)


class Watched(FakeEngine):
    """An engine that can be looked at.

    Attributes:
        views: what is seen, one look after the other, the last one again and again.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.views = [view("a", "b")]
        self.history = StepHistory()
        self.histories = [self.history]
        stats = EngineStats(2, 3, 0.5, 1, 7, 2, StepTimes(), PageStats(5, 2, 1, 3, 30, 16, 40, 10))
        self.metrics.stats = stats
        self.metrics.totals = lambda: {"generation_tokens": 9}
        self.num_looks = 0

    async def view(self) -> EngineView:
        self.num_looks += 1
        return self.views.pop(0) if len(self.views) > 1 else self.views[0]


@pytest.fixture
def engine() -> Watched:
    return Watched()


def parsed(data: bytes) -> list[dict[str, Any]]:
    lines = [line for line in data.split(b"\n\n") if line]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def watch(service: Service, client: Client | None, count: int) -> list[dict[str, Any]]:
    """The first events that a watcher is sent."""

    async def read() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        events = service.watch.events(client)
        async for data in events:
            found += parsed(data)
            if len(found) >= count:
                break
        await events.aclose()
        return found

    return asyncio.run(read())


def service_of(
    engine: Watched, *, has_keys: bool = False, tells_cached_tokens: bool = False
) -> Service:
    options = Options(tells_cached_tokens=tells_cached_tokens)
    keys = [ApiKey("k", "a")] if has_keys else []
    return Service(engine, api_keys=keys, options=options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "INTERVAL_S", 0.001)


def test_facts(client: TestClient) -> None:
    response = client.get("/engine/facts")
    assert response.headers["cache-control"] == "no-store"
    told = response.json()
    assert told["models"] == ["fake"] or told["models"][0].endswith("fake")
    assert told["chat"] is True and told["has_keys"] is False
    assert told["device_flops"] == told["device_bytes"] == 0, "nobody has said what it can do"
    assert told["context"] == 64 and told["slots"] > 0 and told["page_size"] > 0


@pytest.fixture
def client(engine: Watched) -> Iterator[TestClient]:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


def test_the_first_frame_is_whole_and_the_next_ones_tell_what_changed(engine: Watched) -> None:
    engine.views = [view("a", "b"), view("a", "b", cells=(0, 6, 6, 6, 7)), view("a")]
    host = {"num_host_pages": 3, "host_cells": np.array([1, 0, 0], "<u2").tobytes()}
    engine.views[1] = engine.views[1]._replace(**host)
    engine.metrics.stats = engine.metrics.stats._replace(work=Work(9, 8, 7))
    status, names, first, second, fewer, third = watch(service_of(engine), None, 6)
    assert status == {"status": "ok"}
    assert first["pool"] == {"pages": 5, "per": 1, "cells": [2, 0, 1, 1, 1, 6, 1, 7]}
    assert second["pool"] == {"pages": 5, "per": 1, "changed": [1, 2, 6]}
    assert third["pool"]["changed"] == [1, 1, 0, 2, 1, 1]
    assert [one["frame"] for one in (first, second, third)] == [1, 2, 3]
    assert first["slots"][0] == [0, 0, 20, 4, 23, 16, 2, 7, False, 1, 1.25]
    assert first["queues"] == [[0, 3, 0.5]]
    assert first["host"] == {"pages": 0, "per": 1, "cells": []}, "no page leaves the device"
    assert second["host"] == {"pages": 3, "per": 1, "cells": [1, 1, 2, 0]}
    assert first["counts"]["work"] == [9, 8], "operations and bytes read"
    assert first["counts"]["generation_tokens"] == 9 and first["counts"]["found"] == 10
    assert names == {"names": {"0": "a", "1": "b"}}, "told again once they are others"
    assert fewer == {"names": {"0": "a"}}


def test_an_engine_that_is_silent_is_not_looked_at(engine: Watched) -> None:
    engine.silence = "no step for 7 s"
    assert watch(service_of(engine), None, 1) == [{"status": "silent"}]
    assert engine.num_looks == 0


def test_who_comes_late_is_sent_the_whole_and_one_look_serves_all(engine: Watched) -> None:
    service = service_of(engine)

    async def read() -> None:
        early = service.watch.events(None)
        for _ in range(3):
            await anext(early)
        looks = engine.num_looks
        late = service.watch.events(None)
        await anext(late)
        (_, frame) = parsed(await anext(late))
        assert frame["frame"] > 1 and "cells" in frame["pool"]
        assert engine.num_looks <= looks + 1
        await early.aclose()
        await late.aclose()
        looks = engine.num_looks
        await asyncio.sleep(0.02)
        assert engine.num_looks == looks, "nobody watches any more"

    asyncio.run(read())


@pytest.mark.parametrize("computes", [True, False])
def test_an_engine_that_computes_nothing_is_looked_at_seldom(computes: bool) -> None:
    class Asked(Watched):
        """Counts how often it is asked whether it drains, which is once a turn."""

        num_turns = 0

        @property
        def is_draining(self) -> bool:
            self.num_turns += 1
            if computes:
                numbers = (0.0,) * 6 + (2, 0, 2, 0, 2, 0, 5)
                self.history.record(StepRecord(0, 1.0, 1.0, 1.0 + self.num_turns, *numbers))
            return False

        @is_draining.setter
        def is_draining(self, value: bool) -> None:
            assert not value

    engine = Asked()
    told = watch(service_of(engine), None, 6)
    assert [one["frame"] for one in told[2:]] == [1, 2, 3, 4]
    every = 1 if computes else watchers.QUIET
    assert 3 * every < engine.num_turns <= 4 * every


def test_only_so_many_may_watch(engine: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "MOST_WATCHERS", 1)
    service = service_of(engine)

    async def read() -> None:
        one = service.watch.events(None)
        await anext(one)
        with pytest.raises(ApiError) as error:
            await anext(service.watch.events(None))
        assert error.value.status == 503
        await one.aclose()

    asyncio.run(read())


def test_a_client_sees_the_ids_of_its_own_requests_alone(engine: Watched) -> None:
    service = service_of(engine, has_keys=True)
    mine, other = (Client(ApiKey(name, name)) for name in ("mine", "other"))
    engine.views = [view("cmpl-mine-0", "cmpl-secret-0", "cmpl-of-nobody")]
    with ExitStack() as stack:
        stack.enter_context(service.holders.holding(["cmpl-mine-0"], mine))
        stack.enter_context(service.holders.holding(["cmpl-secret-0"], other))
        for who, names in ((mine, {"0": "cmpl-mine-0"}), (other, {"1": "cmpl-secret-0"})):
            _, told, frame = watch(service, who, 3)
            assert told == {"names": names}
            assert "cmpl" not in json.dumps(frame)
            assert frame["slots"][0][7] is None, "what was cached tells what others have asked"
    _, told, _ = watch(service, mine, 3)
    assert told == {"names": {}}, "a request is held while it runs"


def test_what_was_cached_is_told_where_usage_tells_it(engine: Watched) -> None:
    service = service_of(engine, has_keys=True, tells_cached_tokens=True)
    _, _, frame = watch(service, Client(ApiKey("k", "k")), 3)
    assert frame["slots"][0][7] == 7


def test_a_running_request_is_held_by_the_client_of_its_key() -> None:
    engine = Watched()
    engine.delay = 0.02
    seen: list[str] = []
    app = create_app(engine, api_keys=[ApiKey("k", "alice")])
    original = engine.stream

    async def stream(prepared: Any, **given: Any) -> Any:
        holder = app.state.service.holders.of(prepared.request_id)
        seen.append(getattr(holder, "name", "nobody"))
        async for output in original(prepared, **given):
            yield output

    engine.stream = stream  # type: ignore[method-assign]
    headers = {"authorization": "Bearer k"}
    with TestClient(app) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            assert client.post(path, json=body, headers=headers).status_code == 200
    assert seen == ["alice", "alice"]
    assert all(app.state.service.holders.of(name) is None for name in engine.started)


@pytest.mark.parametrize("state", ["is_draining", "is_dead"])
def test_the_stream_ends_with_the_server(client: TestClient, engine: Watched, state: str) -> None:
    setattr(engine, state, True)
    response = client.get("/engine/stream")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert parsed(response.content.removesuffix(b"data: [DONE]\n\n")) == [
        {"status": state.removeprefix("is_")}
    ]


def test_a_look_that_fails_ends_the_stream_with_an_error(
    client: TestClient, engine: Watched
) -> None:
    engine.metrics.totals = lambda: 1 / 0
    response = client.get("/engine/stream")
    assert '"code":500' in response.text.replace(" ", "") and "division" not in response.text


def test_changes_and_runs_say_all_of_a_map() -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 3, 200).astype(np.uint16)
    for _ in range(20):
        cells = np.where(rng.random(200) < 0.1, rng.integers(0, 3, 200), before).astype(np.uint16)
        found = before.copy()
        told = watchers.changes(before, cells)
        for begin, length, code in zip(told[::3], told[1::3], told[2::3], strict=True):
            found[begin : begin + length] = code
        assert (found == cells).all()
        told = watchers.runs(cells)
        assert (np.repeat(told[1::2], told[::2]) == cells).all()
        before = cells
