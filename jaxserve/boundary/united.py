"""What several engines of one model tell, as if they were one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.boundary.engine_view import MAX_OWNER, EngineView, QueueView, SlotView
from jaxserve.boundary.messages import EngineStats

_STATE, _SLOT = 3, 2  # bits of a cell: the mask of its state, and where its slot begins


def united_stats(told: Sequence[EngineStats]) -> EngineStats:
    """The sums over engines; `page_usage` is that of all pages, `num_programs` the most of one."""
    first, *others = told
    if not others:
        return first
    pages = _summed([one.pages for one in told], page_size=first.pages.page_size)
    tiers = _summed([one.pages.tiers for one in told])
    times, work = first.times, first.work
    for one in others:
        times = times.plus(one.times)
        work = one.work if work is None else work if one.work is None else work.plus(one.work)
    return EngineStats(
        num_running=sum(one.num_running for one in told),
        num_waiting=sum(one.num_waiting for one in told),
        page_usage=pages.num_active / max(1, pages.num_pages),
        num_preemptions=sum(one.num_preemptions for one in told),
        num_steps=sum(one.num_steps for one in told),
        num_programs=max(one.num_programs for one in told),
        times=times,
        pages=pages._replace(tiers=tiers),
        num_integrity_failures=sum(one.num_integrity_failures for one in told),
        num_beam_shrinks=sum(one.num_beam_shrinks for one in told),
        work=work,
        num_images=sum(one.num_images for one in told),
        num_known_images=sum(one.num_known_images for one in told),
    )


def united_view(views: Sequence[EngineView], profile: str = "") -> EngineView:
    """One engine with the slots, queues and pages of all, one engine's behind another's.

    Args:
        views: of each engine.
        profile: the folder that the work of all of them is recorded into.
    """
    slots: list[SlotView] = []
    queues: dict[int, QueueView] = {}
    num_slots = 0
    cells, host_cells = [], []
    per = max(view.pages_per_cell for view in views)
    host_per = max(view.host_pages_per_cell for view in views)
    for view in views:
        slots += [one._replace(slot=one.slot + num_slots) for one in view.slots]
        for one in view.queues:
            known = queues.get(one.rank, QueueView(one.rank, 0, 0.0))
            waiting, oldest = known.num_waiting + one.num_waiting, max(known.oldest, one.oldest)
            queues[one.rank] = QueueView(one.rank, waiting, oldest)
        own = _coarser(np.frombuffer(view.cells, "<u2"), view.pages_per_cell, per)
        owners = np.minimum((own >> _SLOT) + np.uint32(num_slots), MAX_OWNER)
        cells.append(np.where(own >> _SLOT, owners << _SLOT | own & _STATE, own))
        host = np.frombuffer(view.host_cells, "<u2")
        host_cells.append(_coarser(host, view.host_pages_per_cell, host_per))
        num_slots += view.num_slots
    return EngineView(
        num_slots,
        slots,
        [queues[rank] for rank in sorted(queues)],
        _pages(cells, per, [view.num_pages for view in views]),
        per,
        np.concatenate(cells).astype("<u2").tobytes(),
        max(view.seconds for view in views),
        profile,
        _pages(host_cells, host_per, [view.num_host_pages for view in views]),
        host_per,
        np.concatenate(host_cells).astype("<u2").tobytes(),
    )


def _summed(told: Sequence[Any], **kept: int) -> Any:
    """The sums of named tuples of numbers, field by field, but for those that are kept."""
    kind: Any = type(told[0])
    sums = {
        name: sum(getattr(one, name) for one in told)
        for name in kind._fields
        if name not in kept and name != "tiers"
    }
    return kind(**sums, **kept)


def _coarser(cells: np.ndarray, per: int, wanted: int) -> np.ndarray:
    """A map uint16[n] of cells of `per` pages with cells of `wanted` pages, the highest states."""
    if per == wanted or not len(cells):
        return cells
    begins = np.arange(0, len(cells) * per, wanted) // per
    # the state goes before the slot, so that the highest one is the greatest number
    ordered = (cells & _STATE).astype(np.uint32) << 16 | cells
    return (np.maximum.reduceat(ordered, np.unique(begins)) & 0xFFFF).astype(np.uint16)


def _pages(cells: Sequence[np.ndarray], per: int, pages: Sequence[int]) -> int:
    """Pages of all maps, as many as their cells stand for where the last cells are not full."""
    return sum(pages) if per == 1 else per * sum(len(one) for one in cells)
