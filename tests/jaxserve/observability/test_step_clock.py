"""The time from arrival to the first step: the engine's own part, and the device's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxserve.boundary.messages import Action, AddGroup, Control, FirstStep
from jaxserve.boundary.step_history import StepHistory
from jaxserve.boundary.step_times import StepTimes
from jaxserve.engine.loop import Engine
from jaxserve.execution.results import PackedStep, StepInFlight, StepResult
from jaxserve.execution.row_packer import StepNeeds
from jaxserve.memory.manager import PageManager
from jaxserve.observability import step_clock
from jaxserve.observability.step_clock import ClientClock, StepClock
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import StopRule
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
    features = ropes = ()
    write_rows = None
    put_state = None

    def __init__(self, clock: Clock):
        self.clock = clock
        self.pack_s = 0.0
        self._free = 0.0

    def check_alive(self):
        """Never fails."""

    def pack(self, plan):
        self.clock.now += self.pack_s

    def dispatch(self, plan, packed):
        end = self._free = max(self._free, self.clock()) + STEP_S
        result = SimpleNamespace(end=end, is_ready=lambda: self.clock() >= end)
        return StepInFlight(
            plan, PackedStep(None, StepNeeds(frozenset(), [], [], []), None), result, {}
        )

    def fetch(self, step):
        self.clock.now = max(self.clock(), step.result.end)
        return StepResult([5] * len(step.plan.samples), None, {}, {})


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_clock, "monotonic", clock)
    return clock


class Run:
    """An engine, and what it has said of first steps."""

    def __init__(
        self, clock: Clock, slots: int, *, overlap: bool, pages: int = 20, num_groups: int = 1
    ):
        limits = SchedulerLimits(slots, 16, 16, 4, 64, num_groups=num_groups)
        scheduler = Scheduler(limits, PageManager(pages, 16))
        self.device = SimulatedDevice(clock)
        self.engine = Engine(scheduler, self.device, overlap=overlap)
        self.first_steps: dict[str, FirstStep] = {}
        self.page_waits: list[float] = []

    def add(self, name: str, arrived: float, max_tokens: int = 40) -> None:
        rule = StopRule(frozenset(), frozenset(), 0, max_tokens)
        body = AddGroup([name], [0], [3, 4], SamplingParams(), rule, [], Queueing(arrived))
        self.engine.handle(body)

    def step(self) -> None:
        output = self.engine.step()
        self.first_steps |= output.first_steps
        self.page_waits += output.page_waits


@pytest.mark.parametrize("overlap", [True, False])
def test_while_others_decode_the_step_in_flight_is_waited_for_and_no_overhead(clock, overlap):
    run = Run(clock, 2, overlap=overlap)
    run.add("first", clock())
    for _ in range(3):
        run.step()
    arrived = clock()
    run.step()  # it came before this step, whose host work is nothing, and is told of after it
    run.add("late", arrived)
    clock.now += 0.5
    run.step()
    assert run.first_steps["late"] == FirstStep(arrived + STEP_S + 0.5, 0.5, 0)


def test_so_it_is_where_stages_have_all_steps_that_may_be_in_flight(clock):
    run = Run(clock, 3, overlap=True, num_groups=2)
    run.add("first", clock())
    run.add("second", clock())
    for _ in range(5):
        run.step()
    arrived = clock()
    run.add("late", arrived)
    clock.now += 0.5
    while "late" not in run.first_steps:
        run.step()  # it is planned once a step has ended, and told of with the next one
    assert run.first_steps["late"] == FirstStep(arrived + STEP_S, 0.5, 0)


def test_a_pause_is_no_overhead(clock):
    run = Run(clock, 2, overlap=True)
    run.engine.handle(Control(Action.PAUSE))
    run.add("late", clock())
    run.step()
    run.engine.handle(Control(Action.RESUME))
    run.step()
    assert run.first_steps["late"].queue_overhead is None


def test_what_the_host_does_is_overhead(clock):
    run = Run(clock, 1, overlap=True)
    run.device.pack_s = 2.0
    run.add("first", clock())
    run.step()
    assert run.first_steps == {"first": FirstStep(102.0, 2.0, 0)}


def test_a_request_that_waited_for_a_slot_has_no_overhead(clock):
    run = Run(clock, 1, overlap=True)
    run.add("first", clock(), max_tokens=3)
    run.step()
    run.add("late", clock())
    while "late" not in run.first_steps:
        run.step()
    assert run.first_steps["late"].queue_overhead is None


def test_an_aborted_sequence_is_forgotten(clock):
    steps = StepClock()
    for name in ("a", "b"):
        steps.added(name, clock())
    steps.aborted("a")
    steps.start()
    steps.packed(None)
    steps.dispatched(
        (
            SimpleNamespace(request_id=name, num_cached=count, lacks_pages_since=None)
            for name, count in (("a", 8), ("b", 16))
        ),
        {},
    )
    told = steps.committed(backlog=False)
    assert list(told) == ["b"] and told["b"].num_cached_tokens == 16
    assert steps.committed(backlog=False) == {}


@pytest.mark.parametrize(("overlap", "idle_steps"), [(True, 0.5), (False, 1.5)])
def test_a_late_host_is_counted_as_the_devices_idleness(clock, overlap, idle_steps):
    run = Run(clock, 1, overlap=overlap)
    run.device.pack_s = 1.5 * STEP_S
    run.add("one", clock(), max_tokens=5)
    while run.engine.scheduler.has_unfinished:
        run.step()
    # four steps came after another; the host takes the time since its last dispatch for idle
    counted = run.engine.stats().times.device_idle
    assert 4 * idle_steps * STEP_S <= counted <= 4 * run.device.pack_s
    assert run.engine.stats().times.device_busy <= 5 * STEP_S


@pytest.mark.parametrize("overlap", [True, False])
def test_a_device_that_always_has_a_step_is_counted_as_busy(clock, overlap):
    run = Run(clock, 1, overlap=overlap)
    run.add("one", clock(), max_tokens=5)
    while run.engine.has_work:
        run.step()
    times = run.engine.stats().times
    assert times.device_busy == 5 * STEP_S and times.device_idle == 0


def test_what_the_loop_computes_while_idle_is_of_no_step(clock, monkeypatch):
    moments = iter([100.0, 100.25, 200.0, 200.5])  # processor seconds: resume, step, resume, step
    monkeypatch.setattr(step_clock, "thread_time", lambda: next(moments))
    client = ClientClock(whole_thread=True)
    client.begin_text()
    clock.now += 0.125
    client.end_text()
    client.resume()
    assert client.add_to(StepTimes()).http == 0.125
    client.resume()
    times = client.add_to(StepTimes(plan=1.0))
    assert (times.plan, times.detokenise, times.http) == (1.0, 0.125, 0.625)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_step_is_told_of_once_with_its_rows_and_times(clock, overlap):
    run = Run(clock, 2, overlap=overlap)
    run.device.pack_s = 0.5
    run.add("one", clock(), max_tokens=3)
    run.add("two", clock(), max_tokens=2)
    history = StepHistory()
    while run.engine.has_work:
        done = run.engine.step().step
        if done is not None:
            history.record(done)
    steps = history.snapshot()
    assert [step.number for step in steps] == [0, 1, 2]
    assert [(step.num_prefill, step.num_decode) for step in steps] == [(2, 0), (0, 2), (0, 1)]
    assert [step.num_tokens for step in steps] == [4, 2, 1]
    assert [(step.num_running, step.num_waiting, step.num_pages) for step in steps[:2]] == [
        (2, 0, 2)
    ] * 2
    for step in steps:
        assert step.begin + step.pack == step.dispatched <= step.fetched - step.wait
        assert step.pack == 0.5
    busy = sum(step.device_busy for step in steps)
    assert busy == run.engine.stats().times.device_busy > 0


def test_who_waits_for_a_slot_waits_for_no_page(clock):
    run = Run(clock, 1, overlap=True)
    run.add("one", clock(), max_tokens=3)
    run.add("two", clock(), max_tokens=3)
    while run.engine.has_work:
        run.step()
    assert run.page_waits == [0.0, 0.0]


def test_pages_that_are_short_are_waited_for_with_a_slot_free(clock):
    run = Run(clock, 2, overlap=False, pages=5)  # four for requests
    run.add("long", clock(), max_tokens=50)
    for _ in range(47):  # until its fourth page
        run.step()
    assert len(run.engine.scheduler.running) == 1 and run.page_waits == [0.0]
    came = clock()
    run.add("late", came, max_tokens=3)
    run.step()
    assert len(run.engine.scheduler.running) == 1
    while run.engine.has_work:
        run.step()
    began = run.first_steps["late"].time
    assert run.page_waits == [0.0, began - came] and began > came


def test_what_a_preemption_takes_is_a_wait_for_pages(clock):
    run = Run(clock, 2, overlap=False, pages=5)
    run.add("first", clock(), max_tokens=40)
    run.add("second", clock(), max_tokens=40)
    lost = None
    while run.engine.has_work:
        before = run.engine.scheduler.num_preemptions
        run.step()
        if run.engine.scheduler.num_preemptions > before:
            assert lost is None
            lost = clock() - STEP_S
    assert lost is not None
    assert run.page_waits[:2] == [0.0, 0.0] and len(run.page_waits) == 3
    assert STEP_S < run.page_waits[2] <= clock() - lost
