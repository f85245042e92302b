"""The view of a scheduler for watchers: the map of its pages, its slots, its queues."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from jaxserve.boundary.engine_view import (
    MAX_CELLS,
    MAX_OWNER,
    MAX_SLOTS,
    EngineView,
    QueueView,
    SlotView,
)
from jaxserve.memory.manager import PageManager
from jaxserve.request.request import Request
from jaxserve.scheduling.scheduler import Scheduler


def view_of(scheduler: Scheduler, name_of: Callable[[Request], str]) -> EngineView:
    """What there is to see now; takes some 50 ns a page.

    Args:
        scheduler: between two steps.
        name_of: the name of a request that runs, see `SlotView.sequence_id`.
    """
    begin, now = time.perf_counter(), time.monotonic()
    pool = scheduler.pages.pool
    running = scheduler.running
    owners = np.zeros(pool.num_pages, np.uint16)
    for request in running:
        assert request.slot is not None
        owners[request.pages] = min(request.slot + 1, MAX_OWNER)
    codes = pool.states().astype("<u2") | owners[1:] << 2
    size = -(-len(codes) // MAX_CELLS)
    host_codes = pool.index.tier_states().astype("<u2")
    host_size = max(1, -(-len(host_codes) // MAX_CELLS))
    slots = [
        _slot_view(request, name_of(request), _rank(scheduler, request), now)
        for request in running[:MAX_SLOTS]
    ]
    return EngineView(
        num_slots=scheduler.limits.max_num_seqs,
        slots=sorted(slots),
        queues=_queues(scheduler, now),
        num_pages=len(codes),
        pages_per_cell=size,
        cells=_shrunk(codes, size).tobytes(),
        seconds=time.perf_counter() - begin,
        num_host_pages=len(host_codes),
        host_pages_per_cell=host_size,
        host_cells=_shrunk(host_codes, host_size).tobytes(),
    )


def _shrunk(codes: np.ndarray, size: int) -> np.ndarray:
    """Of every `size` codes uint16[n] the one with the highest state."""
    if size == 1:
        return codes
    rows = np.zeros((-(-len(codes) // size), size), codes.dtype)
    rows.reshape(-1)[: len(codes)] = codes
    return rows[np.arange(len(rows)), (rows & 3).argmax(axis=1)]


def _slot_view(request: Request, name: str, rank: int, now: float) -> SlotView:
    assert request.slot is not None
    return SlotView(
        slot=request.slot,
        sequence_id=name,
        rank=rank,
        num_prompt=request.num_prompt,
        num_output=len(request.output_token_ids),
        num_computed=request.num_computed,
        max_tokens=request.stop_rule.max_tokens,
        num_pages=PageManager.num_held(request),
        num_cached=request.num_cached or 0,
        is_prefilling=request.is_prefilling,
        num_preemptions=request.num_preemptions,
        age=now - request.queueing.arrival_time,
    )


def _queues(scheduler: Scheduler, now: float) -> list[QueueView]:
    """Those that wait; sequences behind the first of a group are of its class."""
    counts: dict[int, int] = {}
    arrivals: dict[int, float] = {}

    def count(request: Request, number: int) -> None:
        rank, arrival = _rank(scheduler, request), request.queueing.arrival_time
        counts[rank] = counts.get(rank, 0) + number
        arrivals[rank] = min(arrivals.get(rank, now), arrival)

    waiting = scheduler.waiting.requests()
    for request in waiting:
        count(request, 1)
    for group in {request.group for request in (*waiting, *scheduler.running)}:
        if group is not None and group.front is not None and group.num_behind:
            count(group.front, group.num_behind)
    return [QueueView(rank, counts[rank], now - arrivals[rank]) for rank in sorted(counts)]


def _rank(scheduler: Scheduler, request: Request) -> int:
    asked, priority = request.asked.num_output_asked, request.queueing.priority
    return scheduler.waiting.rank(request.num_prompt, priority, asked)
