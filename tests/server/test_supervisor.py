"""The server process around the event loop."""

from __future__ import annotations

import asyncio
import gc

import pytest
import uvicorn

from server.descriptors import Descriptors
from server.supervisor import _Server
from tests.server.fake_engine import FakeEngine


def test_what_lives_as_long_as_the_server_is_left_out_of_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    engine = FakeEngine()
    engine.is_ready = False
    server = _Server(
        uvicorn.Config("none"),
        engine,  # type: ignore[arg-type]
        "http://127.0.0.1",
        ("fake",),
        0.0,
        is_entering=bool,
        descriptors=Descriptors(),
        max_connections=1,
        logs_json=True,
    )

    async def announced() -> None:
        task = asyncio.ensure_future(server._announce())
        await asyncio.sleep(0.02)
        assert not done, "what it loads is not there yet"
        engine.is_ready = engine.is_draining = True
        await task

    asyncio.run(announced())
    assert done == ["collect", "freeze"], "garbage is not kept"
