"""Time in which a process was stopped is told from time in which it ran."""

from __future__ import annotations

from jaxserve.liveness.pulse import BEAT_S, LATE_S, Pulse
from tests.jaxserve.observability.test_step_clock import Clock


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    clock = Clock()
    pulse, begin = Pulse(clock), clock()
    clock.now += BEAT_S
    assert pulse.beat() == BEAT_S and not pulse.has_stopped_since(begin)
    clock.now += 30.0
    assert pulse.has_stopped_since(begin), "the thread that beats has not had its turn yet"
    assert pulse.beat() == 0.0
    resumed = clock()
    clock.now += LATE_S / 2
    assert pulse.beat() == LATE_S / 2, "a machine that is busy"
    assert pulse.has_stopped_since(begin) and not pulse.has_stopped_since(resumed)
