"""Several engines as one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.boundary.engine_view import MAX_OWNER, EngineView, QueueView, SlotView
from jaxserve.boundary.messages import EngineStats, PageStats, TierStats
from jaxserve.boundary.step_times import StepTimes
from jaxserve.boundary.united import united_stats, united_view
from jaxserve.boundary.work import Work


def stats(running: int, active: int, work: Work | None = None) -> EngineStats:
    pages = PageStats(10, active, 1, 2, 30, 16, 40, 20, TierStats(num_out=3))
    times = StepTimes(plan=1.0)
    return EngineStats(running, 2, active / 10, 1, 7, 3, times, pages, 0, 1, work, 5, 2)


def test_counts_are_added_up() -> None:
    found = united_stats([stats(1, 4, Work(5, 6, 7)), stats(2, 6), stats(3, 5, Work(1, 1, 1))])
    assert (found.num_running, found.num_waiting, found.num_steps) == (6, 6, 21)
    assert found.page_usage == 0.5 and found.num_programs == 3
    assert found.pages == PageStats(30, 15, 3, 6, 90, 16, 120, 60, TierStats(num_out=9))
    assert (found.num_images, found.num_known_images) == (15, 6)
    assert found.times.plan == 3.0 and found.work == Work(6, 7, 8)
    assert united_stats([stats(1, 4)]) == stats(1, 4)


def view(slots: int, cells: list[int], per: int, used: list[int]) -> EngineView:
    taken = [SlotView(slot, f"s{slot}", 0, 3, 1, 3, 9, 1, 0, False, 0, 0.1) for slot in used]
    queues = [QueueView(0, 2, 0.5 * slots)]
    data = np.array(cells, "<u2").tobytes()
    return EngineView(slots, taken, queues, per * len(cells), per, data, 0.1 * slots)


def test_slots_and_pages_lie_behind_each_other() -> None:
    found = united_view([view(4, [0, 2 + 4 * 1, 1], 1, [0]), view(2, [2 + 4 * 2, 0], 1, [1])], "x")
    assert found.num_slots == 6 and found.num_pages == 5 and found.profile == "x"
    assert [one.slot for one in found.slots] == [0, 5]
    assert np.frombuffer(found.cells, "<u2").tolist() == [0, 6, 1, 2 + 4 * 6, 0]
    assert found.queues == [QueueView(0, 4, 2.0)] and found.seconds == 0.4


def test_slots_that_have_no_number_in_the_map_share_the_last_one() -> None:
    found = united_view([view(MAX_OWNER - 1, [2], 1, []), view(9, [2 + 4 * 1, 1 + 4 * 9], 1, [])])
    told = np.frombuffer(found.cells, "<u2").tolist()
    assert told == [2, 2 + 4 * MAX_OWNER, 1 + 4 * MAX_OWNER]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 3), st.integers(1, 3))
def test_a_finer_map_is_told_by_its_highest_states(cells: list[int], per: int, more: int) -> None:
    coarse = view(1, [0], per * more, [])
    found = united_view([view(20, cells, per, []), coarse])
    told = np.frombuffer(found.cells, "<u2").tolist()
    parts = [cells[at : at + more] for at in range(0, len(cells), more)]
    assert found.pages_per_cell == per * more
    assert [one & 3 for one in told] == [max(code & 3 for code in part) for part in parts] + [0]
    assert all(one in part for one, part in zip(told, parts))
    assert -(-found.num_pages // found.pages_per_cell) == len(told)
