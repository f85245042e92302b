"""Keeps an engine that takes requests while it steps at a given number in flight."""

from __future__ import annotations

from collections.abc import Callable


def feed(count: int, in_flight: int, add: Callable[[int], None], step: Callable[[], int]) -> None:
    """Run `count` requests, the next one added as soon as one ends.

    Args:
        count: requests in all.
        in_flight: most that run at a time.
        add: queues request number i with the engine.
        step: advances the engine; returns how many requests ended.
    """
    added = min(count, in_flight)
    for index in range(added):
        add(index)
    running = added
    while running:
        running -= step()
        while running < in_flight and added < count:
            add(added)
            added += 1
            running += 1
