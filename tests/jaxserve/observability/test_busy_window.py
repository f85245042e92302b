"""The device's busy share in a recent window."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.observability.busy_window import INTERVAL_S, WINDOW_S, BusyWindow


@pytest.mark.parametrize("seed", range(20))
def test_the_share_is_that_of_the_last_seconds(seed: int) -> None:
    """Within what is lost because moments are kept once an interval."""
    draw, now, busy = random.Random(seed), 0.0, 0.0
    window = BusyWindow(lambda: now)
    assert window.fraction() == 0.0
    times, sums = [0.0], [0.0]
    for _ in range(400):
        gap = draw.choice([0.0, 0.0, 0.01, 3.0 * (draw.random() < 0.1)])
        step = draw.random() * 0.3
        times += [now + gap, now + gap + step]
        sums += [busy, busy + step]
        now, busy = now + gap + step, busy + step
        window.record(busy)
        later = now
        now += draw.choice([0.0, 0.0, 0.02])
        since = max(0.0, now - WINDOW_S)
        exact = (busy - float(np.interp(since, times, sums))) / max(now - since, 1e-9)
        assert abs(window.fraction() - exact) <= 1.2 * INTERVAL_S / max(now - since, INTERVAL_S)
        now = later
    now += WINDOW_S
    assert window.fraction() == pytest.approx(0.0, abs=0.01)
