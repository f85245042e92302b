"""From arrival to the first step: what is the engine's own, and what the device's."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from jaxserve.engine import Engine
from jaxserve.execution.runner import Dispatched, StepResult
from jaxserve.memory.manager import PageManager
from jaxserve.request import Request, StopRule
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.scheduler import Scheduler, SchedulerLimits

STEP_S = 0.04


class SleepingDevice:
    """Runs one step after the other, each for STEP_S; packing takes `pack_s` of the host."""

    def __init__(self):
        self.pack_s = 0.0
        self._free = 0.0

    def pack(self, plan):
        time.sleep(self.pack_s)

    def dispatch(self, plan, packed):
        end = self._free = max(self._free, time.monotonic()) + STEP_S
        result = SimpleNamespace(end=end, is_ready=lambda: time.monotonic() >= end)
        return Dispatched(plan, None, result)

    def fetch(self, step):
        time.sleep(max(0.0, step.result.end - time.monotonic()))
        count = len(step.plan.decode) + len(step.plan.lanes)
        return StepResult([5] * count, {}, list(range(count)))


def make_engine(slots: int, *, overlap: bool) -> Engine:
    scheduler = Scheduler(SchedulerLimits(slots, 16, 16, 4, 64), PageManager(20, 16))
    runner = SleepingDevice()
    runner.programs = SimpleNamespace(programs=[])
    return Engine(scheduler, runner, overlap=overlap)


def request(name: str, max_tokens: int = 40) -> Request:
    rule = StopRule(frozenset(), frozenset(), 0, max_tokens)
    return Request(name, [3, 4], SamplingParams(), rule, seed=0)


@pytest.mark.parametrize("overlap", [True, False])
def test_while_others_decode_the_step_in_flight_is_waited_for_and_no_overhead(overlap):
    engine = make_engine(2, overlap=overlap)
    engine.add(request("first"))
    for _ in range(3):
        engine.step()
    late = request("late")
    engine.step()  # it came before this step, whose host work is nothing, and is told of after it
    engine.add(late)
    engine.step()
    queued = late.first_scheduled_time - late.arrival_time
    assert STEP_S / 2 < queued < 2 * STEP_S
    assert 0 <= late.queue_overhead < STEP_S / 2


def test_what_the_host_does_is_overhead():
    engine = make_engine(1, overlap=True)
    engine.runner.pack_s = 0.02
    first = request("first")
    engine.add(first)
    engine.step()
    assert 0.02 <= first.queue_overhead == first.first_scheduled_time - first.arrival_time


def test_a_request_that_waited_for_a_slot_has_no_overhead():
    engine = make_engine(1, overlap=True)
    engine.add(request("first", max_tokens=3))
    engine.step()
    late = request("late")
    engine.add(late)
    while late.first_scheduled_time is None:
        engine.step()
    assert late.queue_overhead is None


@pytest.mark.parametrize("overlap", [True, False])
def test_a_late_host_is_counted_as_the_devices_idleness(overlap):
    engine = make_engine(1, overlap=overlap)
    engine.runner.pack_s = 1.5 * STEP_S
    engine.add(request("one", max_tokens=5))
    begin = time.monotonic()
    while engine.scheduler.has_unfinished:
        engine.step()
    idle, elapsed = engine.stats().times.device_idle, time.monotonic() - begin
    # four steps came after another; the device waited for half a step at least before each
    assert 4 * 0.5 * STEP_S < idle < elapsed - 1.5 * STEP_S
