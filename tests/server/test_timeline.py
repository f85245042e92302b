"""Steps in slices of a tenth of a second."""

from __future__ import annotations

import pytest

from jaxserve.boundary.step_history import StepHistory, StepRecord
from server.timeline import Timeline


def step(begin: float, end: float, decode: int, prefill: int = 0) -> StepRecord:
    busy, tokens = end - begin, prefill * 10
    rows = decode, prefill, decode, tokens, decode + prefill, 0, 5
    return StepRecord(0, begin, begin, end, 0.0, 0.0, 0.0, 0.0, 0.0, busy, *rows)


def test_a_step_is_spread_over_the_slices_in_which_it_was_computed() -> None:
    history, timeline = StepHistory(), Timeline()
    history.record(step(10.05, 10.25, 4, 1))
    first, middle, last = timeline.take([history], 10.3)
    assert [first[0], middle[0], last[0]] == [100, 101, 102]
    assert [one[2] for one in (first, middle, last)] == pytest.approx([0.2, 0.4, 0.2])
    assert [one[3] for one in (first, middle, last)] == pytest.approx([0.05, 0.1, 0.05])
    assert [one[4] for one in (first, middle, last)] == pytest.approx([0.05, 0.1, 0.05])
    assert [one[1] for one in (first, middle, last)] == [0, 0, 1], "it ended once"
    assert last[5:] == [4, 10]


def test_what_is_new_is_told_once_and_what_is_old_is_forgotten() -> None:
    history, timeline = StepHistory(), Timeline()
    for number in range(10):
        history.record(step(10 + number / 50, 10 + (number + 1) / 50, 2))
    assert sum(one[1] for one in timeline.take([history], 10.2)) == 10
    assert timeline.take([history], 10.3) == []
    history.record(step(10.21, 10.22, 3))
    assert [one[1] for one in timeline.take([history], 10.4)] == [1]
    assert sum(one[1] for one in timeline.bins()) == 11
    history.record(step(10.2, 90.0, 1))
    timeline.take([history], 90.0)
    assert min(one[0] for one in timeline.bins()) >= 300
    assert sum(one[1] for one in timeline.bins()) == 1
