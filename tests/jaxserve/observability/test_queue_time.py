"""From arrival to the first step: what is the engine's own, and what the device's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxserve import engine as engine_module
from jaxserve.engine import Engine
from jaxserve.execution.runner import Dispatched, StepResult
from jaxserve.memory.manager import PageManager
from jaxserve.request import Request, StopRule
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.scheduler import Scheduler, SchedulerLimits

STEP_S = 4.0


class Clock:
    """Seconds that pass only where somebody says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SimulatedDevice:
    """Runs one step after the other, each for STEP_S; packing takes `pack_s` of the host."""

    programs = SimpleNamespace(programs=[])

    def __init__(self, clock: Clock):
        self.clock = clock
        self.pack_s = 0.0
        self._free = 0.0

    def check_alive(self):
        pass

    def pack(self, plan):
        self.clock.now += self.pack_s

    def dispatch(self, plan, packed):
        end = self._free = max(self._free, self.clock()) + STEP_S
        result = SimpleNamespace(end=end, is_ready=lambda: self.clock() >= end)
        return Dispatched(plan, None, result)

    def fetch(self, step):
        self.clock.now = max(self.clock(), step.result.end)
        count = len(step.plan.decode) + len(step.plan.lanes)
        return StepResult([5] * count, {}, list(range(count)))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine_module, "monotonic", clock)
    return clock


def make_engine(clock: Clock, slots: int, *, overlap: bool) -> Engine:
    scheduler = Scheduler(SchedulerLimits(slots, 16, 16, 4, 64), PageManager(20, 16))
    return Engine(scheduler, SimulatedDevice(clock), overlap=overlap)


def request(name: str, clock: Clock, max_tokens: int = 40) -> Request:
    rule = StopRule(frozenset(), frozenset(), 0, max_tokens)
    return Request(name, [3, 4], SamplingParams(), rule, seed=0, arrival_time=clock())


@pytest.mark.parametrize("overlap", [True, False])
def test_while_others_decode_the_step_in_flight_is_waited_for_and_no_overhead(clock, overlap):
    engine = make_engine(clock, 2, overlap=overlap)
    engine.add(request("first", clock))
    for _ in range(3):
        engine.step()
    late = request("late", clock)
    engine.step()  # it came before this step, whose host work is nothing, and is told of after it
    engine.add(late)
    clock.now += 0.5
    engine.step()
    assert late.first_scheduled_time - late.arrival_time == STEP_S + 0.5
    assert late.queue_overhead == 0.5


def test_what_the_host_does_is_overhead(clock):
    engine = make_engine(clock, 1, overlap=True)
    engine.runner.pack_s = 2.0
    first = request("first", clock)
    engine.add(first)
    engine.step()
    assert first.queue_overhead == first.first_scheduled_time - first.arrival_time == 2.0


def test_a_request_that_waited_for_a_slot_has_no_overhead(clock):
    engine = make_engine(clock, 1, overlap=True)
    engine.add(request("first", clock, max_tokens=3))
    engine.step()
    late = request("late", clock)
    engine.add(late)
    while late.first_scheduled_time is None:
        engine.step()
    assert late.queue_overhead is None


@pytest.mark.parametrize(("overlap", "idle_steps"), [(True, 0.5), (False, 1.5)])
def test_a_late_host_is_counted_as_the_devices_idleness(clock, overlap, idle_steps):
    engine = make_engine(clock, 1, overlap=overlap)
    engine.runner.pack_s = 1.5 * STEP_S
    engine.add(request("one", clock, max_tokens=5))
    while engine.scheduler.has_unfinished:
        engine.step()
    # four steps came after another; the host takes the time since its last dispatch for idle
    counted = engine.stats().times.device_idle
    assert 4 * idle_steps * STEP_S <= counted <= 4 * engine.runner.pack_s
