"""How long the steps in flight may take; clients hear of it where that is long.

Silence of an engine means that it hangs, unless its steps take as long as that. What they take is
known here alone: which program runs, and what its steps have taken so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.boundary.messages import StepEstimate
from jaxserve.boundary.step_history import StepRecord
from jaxserve.execution.runner import Runner
from jaxserve.execution.step_shape import StepShape
from jaxserve.liveness.pulse import Pulse
from jaxserve.liveness.silence import SLOW_STEP_S
from jaxserve.scheduling.plan import ComputeRows

WINDOW = 64  # steps of a program


@dataclass(slots=True)
class _Program:
    """Seconds of the slowest of its last `WINDOW` steps, and operations of the largest of them.

    What was slow once, because something else had the device or the memory, is forgotten. Before
    the first has ended, both are of another program or of an idle run.

    `idle` and `most` are operations of a step that attends to nothing, and to all that it could.
    """

    idle: float
    most: float
    seconds: float
    flops: float
    last_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    last_flops: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def take(self, seconds: float, flops: float) -> None:
        """One of its steps has ended."""
        self.last_seconds.append(seconds)
        self.last_flops.append(flops)
        self.seconds, self.flops = max(self.last_seconds), max(self.last_flops)


class _Step(NamedTuple):
    program: _Program
    flops: float
    seconds: float  # that it may take


class Pace:
    """An engine calls it before it dispatches a step and when the step is over, in their order.

    A step may take as long as the slowest of the last ones of its program, and more as it computes
    more than any of those. Before the first has ended, the program with the fewest operations
    stands for it that computes as much: one that computes as much as any runs before an engine is
    ready.

    Args:
        runner: runs the steps.
        tell: called with the time that the steps in flight may take, when that changes.
        pulse: the pulse of this process; a step during which it was stopped does not count.
    """

    def __init__(self, runner: Runner, tell: Callable[[StepEstimate], None], pulse: Pulse):
        self._flops, self._table = runner.step_flops, runner.programs
        self._num_stages = runner.num_stages
        self._tell, self._pulse = tell, pulse
        self._programs = {
            shape: self._program(shape, seconds, self._flops.idle(shape))
            for shape, seconds in runner.first_runs.items()
        }
        self._in_flight: deque[_Step] = deque()
        self._last_end = 0.0
        self._told = (0.0, False)

    def begins(self, shape: StepShape, rows: ComputeRows) -> None:
        """A step with these rows is about to be dispatched."""
        program = self._programs.get(shape)
        if program is None:
            program = self._programs[shape] = self._estimate(shape)
        flops, seconds = program.idle, program.seconds
        # most steps are short whatever they hold, and their rows are not looked at
        if seconds * program.most >= SLOW_STEP_S * program.flops:
            flops = self._flops.of(shape, rows)
            seconds *= max(1.0, flops / program.flops)
        self._in_flight.append(_Step(program, flops, seconds))
        self._say()

    def ended(self, step: StepRecord) -> None:
        """The oldest step in flight is over."""
        program, flops, _ = self._in_flight.popleft()
        # the device may run a step within the call that hands it over
        since = step.dispatched - step.dispatch
        if self._num_stages == 1:  # else stages work on the one before as well
            since = max(since, self._last_end)
        self._last_end = step.fetched
        if not self._pulse.has_stopped_since(since):
            program.take(step.fetched - since, flops)
        self._say()

    def _estimate(self, shape: StepShape) -> _Program:
        need, known = self._flops.idle(shape), self._programs.values()
        larger = [one for one in known if one.flops >= need]
        nearest = min(larger or known, key=lambda one: abs(one.flops - need))
        return self._program(shape, nearest.seconds, nearest.flops)

    def _program(self, shape: StepShape, seconds: float, flops: float) -> _Program:
        return _Program(self._flops.idle(shape), self._flops.most(shape), seconds, flops)

    def _say(self) -> None:
        seconds = 0.0
        for step in self._in_flight:
            if step.seconds >= SLOW_STEP_S:
                seconds = max(seconds, step.seconds)
        expected = seconds, bool(self._in_flight) and self._table.is_compiling
        if expected != self._told:
            self._told = expected
            self._tell(StepEstimate(*expected))
