"""A process that waits takes the place of one that has died."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.jaxserve.isolation.serving import MODULE, expected, serving
from tests.waiting import until


def children() -> set[int]:
    """Processes with engines."""
    return {one.pid for one in psutil.Process().children() if MODULE in one.cmdline()}


def wait_for_children(count: int) -> set[int]:
    until(lambda: len(children()) == count, 20, children)
    return children()


@pytest.mark.slow
def test_a_spare_process_takes_over_and_gets_a_successor(monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.processes.spare.DELAY_S", 0.1)
    before = children()
    with serving(spare=True) as one:
        for _ in range(2):
            one.until(lambda: one.client.is_ready)
            first = one.client.pid
            assert first is not None
            (spare,) = wait_for_children(2 + len(before)) - before - {first}
            os.kill(first, signal.SIGKILL)
            one.until(lambda first=first: one.client.pid not in (None, first))
            assert one.client.pid == spare
        one.add("r", [1, 2], 20)
        one.finish()
        assert one.tokens["r.0"] == expected("r", [1, 2], 20)
    assert children() == before, "the spare ends with the others"


@pytest.mark.slow
def test_a_spare_process_that_has_died_is_not_used(monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.processes.spare.DELAY_S", 0.1)
    before = children()
    with serving(spare=True) as one:
        first = one.client.pid
        assert first is not None
        (spare,) = wait_for_children(2 + len(before)) - before - {first}
        os.kill(spare, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        one.until(lambda: one.client.pid not in (None, first, spare) and one.client.is_ready)
        one.add("r", [1, 2], 20)
        one.finish()
        assert one.tokens["r.0"] == expected("r", [1, 2], 20)
