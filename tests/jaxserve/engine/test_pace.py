"""The expected time of steps in flight: by earlier steps, and by how much they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.boundary.messages import StepEstimate
from jaxserve.boundary.step_history import StepRecord
from jaxserve.engine.pace import WINDOW, Pace
from jaxserve.execution.flops import StepFlops
from jaxserve.execution.results import PackedStep
from jaxserve.execution.row_packer import StepNeeds
from jaxserve.execution.step_shape import StepShape
from jaxserve.liveness.pulse import BEAT_S, Pulse
from jaxserve.liveness.silence import AUTO, Silence
from jaxserve.observability import step_clock
from jaxserve.scheduling.plan import ComputeRows
from tests.jaxserve.observability.test_step_clock import STEP_S, Clock, Run, SimulatedDevice

LARGE = StepShape(4, 64, 4, frozenset(), 0)
MIDDLE = StepShape(4, 0, 0, frozenset(), 0)
SMALL = StepShape(1, 0, 0, frozenset(), 0)
FLOPS = StepFlops(100.0, 1.0, 1000)
IDLE = ComputeRows()
SLOW_S = 20.0


class Steps:
    """A pace, and what it has told; steps take as long as the test says."""

    def __init__(self, stages: int = 1, **first_runs: float):
        self.clock, self.told = Clock(), list[StepEstimate]()
        self.table = SimpleNamespace(is_compiling=False)
        shapes = {"large": LARGE, "middle": MIDDLE}
        runner: Any = SimpleNamespace(
            step_flops=FLOPS,
            num_stages=stages,
            programs=self.table,
            first_runs={shapes[name]: seconds for name, seconds in first_runs.items()},
        )
        self.pulse = Pulse(self.clock)
        self.pace = Pace(runner, self.told.append, self.pulse)

    def ends(self, dispatched: float, fetched: float) -> None:
        zeros = [0] * len(StepRecord._fields)
        record = StepRecord(*zeros)._replace(dispatched=dispatched, fetched=fetched)
        self.pace.ended(record)

    def run(self, shape: StepShape, seconds: float, rows: ComputeRows = IDLE) -> list[StepEstimate]:
        """What is told of one step while it runs alone."""
        self.told.clear()
        self.pace.begins(shape, rows)
        begin, told = self.clock(), [*self.told]
        while self.clock() < begin + seconds:
            self.clock.now += BEAT_S
            self.pulse.beat()
        self.ends(begin, begin + seconds)
        return told


def test_nothing_is_told_of_short_steps() -> None:
    steps = Steps(large=0.01, middle=0.001)
    for shape in (LARGE, SMALL, MIDDLE, SMALL):
        assert steps.run(shape, 0.01, ComputeRows([], [], [900], [64])) == []
    assert steps.told == []


def test_a_step_may_take_as_long_as_the_slowest_of_its_program() -> None:
    steps = Steps(large=30.0, middle=2.0)
    assert steps.run(LARGE, 20.0) == [StepEstimate(30.0, False)], "the idle run, before the first"
    assert steps.told[-1] == StepEstimate(0.0, False)
    assert steps.run(LARGE, 25.0) == [StepEstimate(20.0, False)]
    assert steps.run(LARGE, 20.0) == [StepEstimate(25.0, False)]
    assert steps.run(LARGE, 20.0) == [StepEstimate(25.0, False)]
    assert steps.run(MIDDLE, 0.5) == [StepEstimate(2.0, False)], "each program has its own"
    assert steps.run(MIDDLE, 0.5) == []


def test_what_was_slow_once_is_forgotten_and_what_is_slow_now_and_then_is_not() -> None:
    steps = Steps(large=0.25, middle=0.25)
    large = ComputeRows([], [], [898, 0], [2, 0])
    steps.run(MIDDLE, 0.25)
    steps.run(MIDDLE, 60.0, large)  # another process had the device
    told = [steps.run(MIDDLE, 0.25) for _ in range(2 * WINDOW)]
    forgotten = told.index([])
    assert WINDOW - 2 <= forgotten <= 2 * WINDOW
    assert all(one == [StepEstimate(60.0, False)] for one in told[:forgotten])
    assert not any(told[forgotten:])
    for number in range(4 * WINDOW):
        is_slow = number % WINDOW == 0
        found = steps.run(MIDDLE, 20.0 if is_slow else 0.25)
        assert number == 0 or found == [StepEstimate(20.0, False)]
    for _ in range(2 * WINDOW):
        steps.run(MIDDLE, 0.5)
    assert steps.run(MIDDLE, 2.0, large) == [StepEstimate(0.5 * (400 + 1800) / 400, False)], (
        "the largest of the steps that count has been forgotten with the slowest"
    )


def test_before_its_first_step_a_program_is_like_the_next_larger_one() -> None:
    assert Steps(large=30.0, middle=2.0).run(SMALL, 1.0) == [StepEstimate(2.0, False)]
    assert Steps(large=30.0).run(SMALL, 1.0) == [StepEstimate(30.0, False)]


def test_a_step_that_computes_more_than_any_before_may_take_longer() -> None:
    steps = Steps(large=30.0, middle=2.0)
    long = ComputeRows([], [], [898, 0], [2, 0])  # 1,800 pairs beside 400 for the tokens
    assert steps.run(MIDDLE, 5.0, long) == [StepEstimate(2.0 * (400 + 1800) / 400, False)]
    assert steps.run(MIDDLE, 5.0, long) == [StepEstimate(5.0, False)]
    assert steps.run(MIDDLE, 5.0) == [StepEstimate(5.0, False)], "less is not taken for faster"


def test_a_step_in_which_the_process_was_stopped_says_nothing_of_the_next() -> None:
    steps = Steps(large=0.01)
    assert steps.run(LARGE, 0.5) == []
    begin = steps.clock()
    steps.pace.begins(LARGE, IDLE)
    steps.clock.now += 60.0
    steps.ends(begin, steps.clock())
    steps.pulse.beat()
    assert steps.run(LARGE, 1.0) == []


def test_of_two_steps_in_flight_the_longer_counts_and_one_begins_as_the_other_ends() -> None:
    steps = Steps(large=30.0, middle=2.0)
    steps.pace.begins(LARGE, IDLE)
    steps.pace.begins(MIDDLE, IDLE)
    assert steps.told == [StepEstimate(30.0, False)]
    steps.ends(0.0, 30.0)
    assert steps.told[-1] == StepEstimate(2.0, False)
    steps.ends(0.0, 31.5)
    assert steps.run(MIDDLE, 1.0) == [StepEstimate(1.5, False)]


def test_over_stages_a_step_takes_as_long_as_it_was_in_flight() -> None:
    steps = Steps(2, large=30.0, middle=2.0)
    for end in (4.0, 6.0, 8.0):  # two seconds a stage, each step dispatched as another one ends
        steps.pace.begins(MIDDLE, IDLE)
        steps.ends(end - 4.0, end)
    assert steps.run(MIDDLE, 1.0) == [StepEstimate(4.0, False)], "the next one may be alone"


def test_what_is_compiled_beside_steps_is_told_while_there_are_steps() -> None:
    steps = Steps(large=0.01)
    steps.table.is_compiling = True
    assert steps.run(LARGE, 0.5) == [StepEstimate(0.0, True)]
    assert steps.told[-1] == StepEstimate(0.0, False)
    steps.table.is_compiling = False
    assert steps.run(LARGE, 0.5) == []


class SlowDevice(SimulatedDevice):
    """A model of 20 s a step, beside a thread that watches it."""

    step_flops, first_runs, num_stages = FLOPS, {LARGE: SLOW_S}, 1
    programs = SimpleNamespace(programs=[], is_compiling=False)

    def __init__(self, clock: Clock, silence: Silence, pulse: Pulse):
        super().__init__(clock)
        self._silence, self._pulse = silence, pulse
        self.reasons: list[str | None] = []
        self.hung = 0

    def pack(self, plan):
        shape = LARGE if plan.num_decode < len(plan.rows) else MIDDLE
        program = SimpleNamespace(layout=SimpleNamespace(shape=shape))
        return PackedStep(program, StepNeeds(frozenset(), [], [], []), None)  # type: ignore[arg-type]

    def dispatch(self, plan, packed):
        self._free = max(self._free, self.clock()) + SLOW_S - STEP_S
        return super().dispatch(plan, packed)._replace(step=packed)

    def fetch(self, step):
        while self.clock() < step.result.end:
            self.clock.now += BEAT_S
            self._silence.tick(self._pulse.beat(), has_work=True)
            self.reasons.append(self._silence.reason)
            self.hung += self._silence.is_hung
        return super().fetch(step)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_of_20_s_a_step_is_never_called_silent(clock_of_steps, overlap: bool) -> None:
    clock = clock_of_steps
    silence, pulse = Silence(AUTO), Pulse(clock)
    run = Run(clock, 2, overlap=overlap)
    device: Any = SlowDevice(clock, silence, pulse)
    run.engine.runner = device
    told: list[StepEstimate] = []

    def tell(expected: StepEstimate) -> None:
        told.append(expected)
        silence.expect(expected.seconds, compiles=expected.compiles)

    run.engine.pace = Pace(device, tell, pulse)
    run.add("a", clock(), max_tokens=6)
    run.add("b", clock(), max_tokens=3)
    while run.engine.has_work:
        run.step()
        silence.heard()
    assert len(device.reasons) >= 6 * SLOW_S / BEAT_S
    assert set(device.reasons) == {None} and not device.hung
    assert {one.seconds for one in told[:-1]} >= {SLOW_S} and told[-1] == StepEstimate(0.0, False)


def test_without_a_word_of_its_pace_it_would_be(clock_of_steps) -> None:
    clock = clock_of_steps
    silence, pulse = Silence(AUTO), Pulse(clock)
    run = Run(clock, 2, overlap=True)
    device: Any = SlowDevice(clock, silence, pulse)
    run.engine.runner = device
    run.add("a", clock(), max_tokens=2)
    while run.engine.has_work:
        run.step()
    assert device.hung and set(device.reasons) > {None}


@pytest.fixture
def clock_of_steps(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_clock, "monotonic", clock)
    return clock
