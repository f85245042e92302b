"""The engine behind an event loop: what it says of that loop's own time."""

from __future__ import annotations

import time
from types import SimpleNamespace

from jaxserve.async_engine import AsyncEngine
from jaxserve.config import EngineConfig
from jaxserve.observability.step_times import StepTimes


def test_what_the_loop_computes_while_idle_is_of_no_step(monkeypatch):
    moments = iter([100.0, 100.25, 200.0, 200.5])  # processor seconds: open, step, open, step
    monkeypatch.setattr(time, "thread_time", lambda: next(moments))
    engine = AsyncEngine(EngineConfig(model="m"), start=False)
    engine._outputs = SimpleNamespace(seconds=0.125)
    engine._open_stream("a")
    assert engine._with_loop_times(StepTimes()).http == 0.125
    del engine._streams["a"]
    engine._open_stream("b")
    engine._open_stream("c")  # not from idleness
    assert engine._with_loop_times(StepTimes()).http == 0.625
