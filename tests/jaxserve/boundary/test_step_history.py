"""The last steps are kept, and no more."""

from __future__ import annotations

import threading

from jaxserve.boundary import step_history
from jaxserve.boundary.step_history import StepHistory, StepRecord


def step(number: int, fetched: float = 0.0) -> StepRecord:
    return StepRecord(number, 0, 0, fetched, 0, 0, 0, 0, 0, 0, 3, 1, 3, 20, 4, 0, 9)


def test_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(step_history, "MOST_STEPS", 3)
    history = StepHistory()
    assert history.snapshot() == []
    for number in range(5):
        history.record(step(number))
    assert [one.number for one in history.snapshot()] == [2, 3, 4]
    assert history.snapshot()[0].num_tokens == 23


def test_steps_after_a_moment():
    history = StepHistory()
    assert history.last is None and history.after(0.0) == []
    for number, fetched in enumerate((1.0, 2.0, 2.5, 3.0)):
        history.record(step(number, fetched))
    assert [one.number for one in history.after(2.0)] == [2, 3]
    assert history.after(3.0) == [] and len(history.after(0.0)) == 4
    assert history.last is history.snapshot()[-1]


def test_one_thread_may_ask_while_another_records(monkeypatch):
    monkeypatch.setattr(step_history, "MOST_STEPS", 50)
    history, over = StepHistory(), threading.Event()

    def record() -> None:
        number = 0
        while not over.is_set():
            history.record(step(number))
            number += 1

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(2000):
            numbers = [one.number for one in history.snapshot()]
            assert numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else True
    finally:
        over.set()
        thread.join()
