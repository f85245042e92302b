"""The server process around the event loop."""

from __future__ import annotations

import argparse
import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import uvicorn

from jaxserve.errors import JaxServeError
from server import process_settings
from server.client_limits import Limits
from server.descriptors import Descriptors
from server.process_settings import workers_of
from server.server_process import _Server
from server.service import NO_PARSERS, Service
from tests.server.fake_engine import FakeEngine


def made(
    engine: FakeEngine,
    descriptors: Descriptors,
    num_workers: int | None = None,
    others: Sequence[FakeEngine] = (),
    hub: Any = None,
) -> _Server:
    args = argparse.Namespace(shutdown_timeout=0.0, log_format="json", num_workers=num_workers)
    service = Service(engine, Limits(max_connections=50))  # type: ignore[arg-type]
    for other in others:
        service.add_model(other, NO_PARSERS)  # type: ignore[arg-type]
    return _Server(uvicorn.Config("none"), args, service, descriptors, "http://127.0.0.1", hub)


def leave_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection of all that the tests have imported takes a second."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.mark.parametrize(
    ("room", "told", "code"),
    [
        (50, "fake on http", 0),
        (49, "--max-connections 50 is lowered to 49: the system lets this process have 99", 0),
        (0, "99 open files (ulimit -n) leave no connection", 1),
    ],
)
def test_what_descriptors_leave_for_connections_is_told_once_it_is_known(
    room: int, told: str, code: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    leave_garbage(monkeypatch)
    monkeypatch.setattr(Descriptors, "room", lambda self, connections: room)
    engine = FakeEngine(served_model_name=("fake",))
    engine.is_draining = True
    server = made(engine, Descriptors(99))
    with caplog.at_level("INFO", "jaxserve.server"):
        asyncio.run(server._announce())
    assert told in caplog.text and ("lowered" in caplog.text) == (room == 49)
    assert server.exit_code == code and server.should_exit == (code == 1)


def test_what_lives_as_long_as_the_server_is_left_out_of_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    engine = FakeEngine()
    engine.is_ready = False
    server = made(engine, Descriptors())

    async def announced() -> None:
        task = asyncio.ensure_future(server._announce())
        await asyncio.sleep(0.02)
        assert not done, "what it loads is not there yet"
        engine.is_ready = engine.is_draining = True
        await task

    asyncio.run(announced())
    assert done == ["collect", "freeze"], "garbage is not kept"


def test_workers_are_the_threads_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(uvicorn.Server, "startup", started)
    monkeypatch.setattr(_Server, "_announce", started)

    async def names() -> set[str]:
        await made(FakeEngine(), Descriptors(), 2).startup()
        calls = (asyncio.to_thread(lambda: threading.current_thread().name) for _ in range(20))
        return {*await asyncio.gather(*calls)}

    assert asyncio.run(names()) <= {"jaxserve-worker_0", "jaxserve-worker_1"}


def test_workers_are_at_most_the_cores(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(process_settings, "usable_cpus", lambda: 3.5)
    assert [workers_of(asked) for asked in (None, 2, 3)] == [None, 2, 3] and not caplog.text
    assert workers_of(8) == 3 and "--num-workers 8 is lowered to 3, the cores" in caplog.text


@pytest.mark.parametrize("loads", [True, False])
def test_several_models_let_in_requests_once_all_have_loaded(
    loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a start that fails has cut off no answer of a model that was loaded before."""
    leave_garbage(monkeypatch)
    first, other = FakeEngine(), FakeEngine(served_model_name=("b",))
    server = made(first, Descriptors(), others=(other,))
    services = server._service.models
    other.start = lambda: None  # type: ignore[attr-defined]

    async def wait_ready() -> None:
        assert [one.unready() is None for one in services] == [False, False]
        if not loads:
            raise JaxServeError("it does not fit")
        first.is_draining = True  # so that nothing watches on

    other.wait_ready = wait_ready  # type: ignore[method-assign]
    asyncio.run(server._announce())
    assert server.exit_code == (0 if loads else 1)
    assert [one.is_held for one in services] == [not loads, not loads]


class Hub:
    """Fronts that answer, or cannot be kept running."""

    def __init__(self, error: str | None):
        self.error = error
        self.told: list[bool] = []
        self.services: list[Service] = []

    def load(self) -> None:
        assert self.services[0].unready() is not None, "the start may still fail"

    async def wait_ready(self) -> None:
        self.load()

    def tell_standing(self) -> None:
        self.told.append(self.services[0].unready() is None)


@pytest.mark.parametrize("error", [None, "fronts cannot be kept running"])
def test_fronts_hear_of_requests_that_are_let_in_once_the_start_has_succeeded(
    error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_garbage(monkeypatch)
    engine, hub = FakeEngine(), Hub(error)
    server = made(engine, Descriptors(), hub=hub)
    hub.services = server._service.models
    engine.warm_up = lambda: None  # type: ignore[attr-defined]

    async def announced() -> None:
        await server._announce()
        engine.is_draining = True  # so that nothing watches on

    asyncio.run(announced())
    assert server.exit_code == (0 if error is None else 1)
    assert hub.told == ([True] if error is None else [])
    assert hub.services[0].is_held == (error is not None)
