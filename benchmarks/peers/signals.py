"""A command that is told to end takes its workers along."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def held_back() -> Iterator[None]:
    """In this block signals to end wait: what they would interrupt could not be cleaned up."""
    arrived: list[int] = []
    before = {one: signal.signal(one, lambda n, frame: arrived.append(n)) for one in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in arrived[:1]:
        signal.raise_signal(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """In this block a signal to end raises SystemExit with the status that a shell would see.

    Workers are in sessions of their own and stopped, so no signal but this process's ends them.
    Further signals are passed over, so that what is cleaned up is cleaned up to the end.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for one in ENDING:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
