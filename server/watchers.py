"""The frames that watchers of the engine are sent: one look at it serves them all.

Nothing is looked at without a watcher. A look costs the engine's thread some time, so they come
the more rarely the longer one takes, and seldom while the engine computes no step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.boundary.engine_view import EngineView, SlotView
from jaxserve.boundary.step_history import StepRecord
from server.errors import ApiError
from server.keys import Client
from server.timeline import Timeline

if TYPE_CHECKING:
    from server.service import Service

logger = logging.getLogger("jaxserve.server")

INTERVAL_S = 0.4  # between two looks
MOST_SHARE = 0.005  # of one core, that looking may take
MOST_INTERVAL_S = 5.0
MOST_WATCHERS = 64
QUIET = 5  # intervals between two looks at an engine that computes nothing


@dataclass(eq=False, slots=True)
class Frame:
    """One look at the engine, as server-sent events.

    Args:
        number: 1, 2, ... while there is a watcher.
        common: the part for all watchers, without the map and the time before.
        whole, changed: the map and the timeline, all of them, which is asked for until there is
            another frame, and what is new in them.
        slots: of requests that run.
        service: knows whose they are.
    """

    number: int
    common: dict[str, Any]
    whole: Callable[[], dict[str, Any]]
    changed: dict[str, Any]
    slots: list[SlotView]
    service: Service
    _events: dict[bool, bytes] = field(default_factory=dict)
    _names: dict[Client | None, bytes] = field(default_factory=dict)

    def event(self, seen: int) -> bytes:
        """The message to a watcher that has seen the frame of that number, 0 for none."""
        follows = seen == self.number - 1 and seen > 0
        if follows not in self._events:
            more = self.changed if follows else self.whole()
            self._events[follows] = _event({"frame": self.number, **self.common, **more})
        return self._events[follows]

    def names(self, client: Client | None) -> bytes:
        """Whose the slots are, as far as a client may know; goes before the frame."""
        if client not in self._names:
            holder = self.service.holders.of
            names = {
                one.slot: one.sequence_id
                for one in self.slots
                if client is None or holder(one.sequence_id) is client
            }
            self._names[client] = _event({"names": names})
        return self._names[client]


class Watch:
    """Looks at the engine as long as there is a watcher.

    Args:
        service: around the engine.
        tells_cached: watchers see how much of a running prompt was found in the prefix cache.
    """

    def __init__(self, service: Service, *, tells_cached: bool):
        self._service, self._tells_cached = service, tells_cached
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._forget()

    async def events(self, client: Client | None) -> AsyncGenerator[bytes, None]:
        """Frames as they come, until the server ends.

        Args:
            client: whose requests are shown with their ids; None: all are.

        Raises:
            ApiError: 503, too many watch.
        """
        if self._num_watchers >= MOST_WATCHERS:
            text = f"{MOST_WATCHERS} watch the engine already"
            raise ApiError(503, text, headers={"Retry-After": "10"})
        self._num_watchers += 1
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        seen, told, named = 0, "", b""
        try:
            while True:
                news, frame, status = self._news, self._frame, self._status
                if status != told:
                    told = status
                    yield _event({"status": status})
                    if status in ("draining", "dead"):
                        return
                if frame is not None and frame.number != seen:
                    names = frame.names(client)
                    yield frame.event(seen) if names == named else names + frame.event(seen)
                    seen, named = frame.number, names
                elif news is self._news:
                    if self._task is None or self._task.done():
                        raise ApiError(500, "the engine cannot be watched; the log says why")
                    await news.wait()
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._task.cancel()
                self._task = None
                self._forget()

    def _forget(self) -> None:
        self._news = asyncio.Event()  # set when there is something new, then replaced
        self._frame: Frame | None = None
        self._status = ""
        self._cells: np.ndarray = np.zeros(0, np.uint16)
        self._timeline = Timeline()
        self._last_steps: list[StepRecord | None] = []  # when the engine was looked at
        self._num_passed = QUIET  # times that it was not, since it had computed nothing

    async def _run(self) -> None:
        try:
            while True:
                why, seconds = self._service.unready(), INTERVAL_S
                status = "ok" if why is None else why[0]
                has_news, self._status = status != self._status, status
                if status == "ok" and self._is_worth_a_look():
                    view = await self._service.engine.view()
                    if view is None:
                        self._num_passed = QUIET
                    else:
                        begin = time.perf_counter()
                        self._frame, has_news = self._frame_of(view), True
                        cost = view.seconds + time.perf_counter() - begin
                        seconds = min(max(seconds, cost / MOST_SHARE), MOST_INTERVAL_S)
                if has_news:
                    self._tell()
                await asyncio.sleep(seconds)
        except Exception:  # nothing awaits this task
            logger.exception("the engine cannot be watched")
            raise
        finally:
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _is_worth_a_look(self) -> bool:
        """A step has run since the last one, or it is long ago."""
        steps = [history.last for history in self._service.engine.histories]
        self._num_passed += 1
        if steps == self._last_steps and self._num_passed < QUIET:
            return False
        self._last_steps, self._num_passed = steps, 0
        return True

    def _frame_of(self, view: EngineView) -> Frame:
        engine = self._service.engine
        cells, before = np.frombuffer(view.cells, "<u2"), self._cells
        host_cells = np.frombuffer(view.host_cells, "<u2")
        self._cells = cells
        now = time.monotonic()
        new_bins = self._timeline.take(engine.histories, now)
        sizes = {"pages": view.num_pages, "per": view.pages_per_cell}

        def whole() -> dict[str, Any]:
            return {"pool": {**sizes, "cells": runs(cells)}, "bins": self._timeline.bins()}

        same = before.shape == cells.shape
        told = {"changed": changes(before, cells)} if same else {"cells": runs(cells)}
        changed = {"pool": {**sizes, **told}, "bins": new_bins}
        rows = [
            (*one[:1], *one[2:8], one.num_cached if self._tells_cached else None, *one[9:11])
            for one in view.slots
        ]
        common = {
            "now": round(now, 3),
            "num_slots": view.num_slots,
            "slots": [[*row, round(one.age, 2)] for row, one in zip(rows, view.slots, strict=True)],
            "queues": [[one.rank, one.num_waiting, round(one.oldest, 2)] for one in view.queues],
            "counts": self._counts(),
            "host": {
                "pages": view.num_host_pages,
                "per": view.host_pages_per_cell,
                "cells": runs(host_cells),
            },
        }
        number = 1 if self._frame is None else self._frame.number + 1
        return Frame(number, common, whole, changed, view.slots, self._service)

    def _counts(self) -> dict[str, Any]:
        metrics = self._service.engine.metrics
        stats = metrics.stats
        pages = stats.pages
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "steps": stats.num_steps,
            "preempted": stats.num_preemptions,
            "programs": stats.num_programs,
            "cached_pages": pages.num_cached,
            "page_size": pages.page_size,
            "queried": pages.num_queried,
            "found": pages.num_found,
            "offloaded": pages.tiers.num_out,
            "restored": pages.tiers.num_back,
            "work": None if stats.work is None else [stats.work.flops, stats.work.read_bytes],
            **metrics.totals(),
        }


def runs(cells: np.ndarray) -> list[int]:
    """Cells uint16[n] as `[length, code, length, code, ...]`."""
    if not len(cells):
        return []
    begins = np.concatenate([[0], np.flatnonzero(np.diff(cells)) + 1])
    lengths: np.ndarray = np.diff(np.append(begins, len(cells)))
    told: list[int] = np.stack([lengths, cells[begins]], axis=1).ravel().tolist()
    return told


def changes(before: np.ndarray, cells: np.ndarray) -> list[int]:
    """What changed from uint16[n] to uint16[n] as `[begin, length, code, ...]`."""
    places = np.flatnonzero(before != cells)
    if not len(places):
        return []
    codes = cells[places]
    ends = (np.diff(places) != 1) | (np.diff(codes) != 0)
    begins = np.concatenate([[0], np.flatnonzero(ends) + 1])
    lengths: np.ndarray = np.diff(np.append(begins, len(places)))
    told: list[int] = np.stack([places[begins], lengths, codes[begins]], axis=1).ravel().tolist()
    return told


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
