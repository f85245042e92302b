"""The server process around the event loop."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import uvicorn

from server.descriptors import Descriptors
from server.supervisor import _Server
from tests.server.fake_engine import FakeEngine


def made(engine: FakeEngine, descriptors: Descriptors) -> _Server:
    return _Server(
        uvicorn.Config("none"),
        engine,  # type: ignore[arg-type]
        "http://127.0.0.1",
        ("fake",),
        0.0,
        is_entering=bool,
        descriptors=descriptors,
        max_connections=50,
        logs_json=True,
    )


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
    monkeypatch.setattr(gc, "freeze", lambda: None)
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
