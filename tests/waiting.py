"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(
    holds: Callable[[], Found],
    seconds: float = 60,
    told: Callable[[], object] = lambda: "it did not come true in time",
) -> Found:
    """What `holds` returns once that is true; after so many seconds it fails with what is told."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.01)
    return found
