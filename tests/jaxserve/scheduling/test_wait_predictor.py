"""How soon a prediction follows the engine's speed, and that it needs requests to go by."""

from __future__ import annotations

import pytest

from jaxserve.scheduling.wait_predictor import LEAST_REQUESTS, LONG_S, SHORT_S, WaitPredictor


def begun(predictor: WaitPredictor, per_second: float, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        predictor.measured(0.1, round(per_second * 0.1), 0)


def wait(predictor: WaitPredictor, requests: int) -> float:
    return predictor.wait(requests, 0, slots_taken=True)


def test_an_engine_that_becomes_slower_is_seen_sooner_than_one_that_becomes_faster() -> None:
    slower, faster = WaitPredictor(), WaitPredictor()
    begun(slower, 200, 30)
    assert wait(slower, 199) == pytest.approx(1, rel=0.01)
    begun(slower, 50, 3 * SHORT_S)
    assert wait(slower, 49) == pytest.approx(1, rel=0.2)
    begun(faster, 50, 30)
    begun(faster, 200, 3 * SHORT_S)
    assert 1.2 < wait(faster, 199) < 4, "the careful one of two"
    begun(faster, 200, 5 * LONG_S)
    assert wait(faster, 199) == pytest.approx(1, rel=0.05)


def test_few_requests_say_nothing_in_a_short_time() -> None:
    """One that begins every 2 s: between two of them the engine has not become slower."""
    predictor = WaitPredictor()
    for _ in range(20):
        predictor.measured(2.0, 1, 0)
    before = wait(predictor, 0)
    predictor.measured(1.0, 0, 0)
    assert 1 < before <= wait(predictor, 0) < 1.3 * before
    assert LEAST_REQUESTS > 2 * SHORT_S
