"""How long steps take by those of an engine that was recorded: a fit, and what it leaves over."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from jaxserve.errors import ValidationError
from jaxserve.execution.step_shape import StepShape
from jaxserve.observability.load_trace import LoadTrace, TracedRequest, TracedStep, read_trace
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.setting import Setting
from jaxserve.simulation.step_time import Programs, StepSeconds

LEAST_STEPS = 50  # of a trace that says something
KNOWN = 8  # steps of a program from which its own constant is fitted
STRETCH = 32  # steps whose deviations are taken in their order: what disturbs one disturbs the next
DELAYS = tuple(0.00025 * n for n in range(400))  # seconds that are tried for the intake
PASSES = 3  # of least squares, each weighted by what the one before expects
SHORTEST_S = 1e-5  # of a step
IDLE_S = 0.005  # between two steps: longer, and the engine had nothing to do
SCALE = np.array([1e3, 1e5, 10.0, 100.0])  # of the columns of `_facts`, so that they are alike

Facts = tuple[float, float, float, float]


class Fitted:
    """Times of steps as a recorded engine had them.

    The seconds of a step are a constant of its program, and for each key that decode rows see, each
    pair of a prompt token and a key, each decode row and each prompt token a factor, none of which
    is negative: least squares over all recorded steps. What a step took beside that is kept, and
    simulated steps of the program deviate as the recorded ones did, in stretches of `STRETCH`.

    Args:
        setting: of the engine that is simulated.
        trace: of one with the same model, device and programs.
        seed: of where the deviations are taken from; None: there are none.

    Raises:
        ValidationError: the trace has too few steps.
    """

    def __init__(self, setting: Setting, trace: LoadTrace, seed: int | None = 0):
        steps = [one for one in trace.steps if one.fetched > one.dispatched]
        if len(steps) < LEAST_STEPS:
            allowed = f"a trace with at least {LEAST_STEPS} steps (jaxserve serve --record-trace)"
            raise ValidationError(str(trace.path), f"{len(steps)} steps", allowed)
        self._programs = Programs(setting)
        self._rng = None if seed is None else random.Random(seed)
        shapes = [self._shape_of(one) for one in steps]
        seconds = _seconds_of(steps)
        self._fit(shapes, np.array([_facts_of(one) for one in steps]), seconds)
        self._deviations: dict[StepShape, np.ndarray] = {}
        self._places: dict[StepShape, tuple[int, int]] = {}
        ratios = defaultdict[StepShape, list[float]](list)
        for shape, one, took in zip(shapes, steps, seconds):
            expected = self._expected(shape, _facts_of(one))
            ratios[shape].append(took / expected if expected > 0 else 1.0)
        self._deviations = {s: np.array(r) for s, r in ratios.items() if len(r) >= KNOWN}
        self._before = _median(one.plan + one.pack + one.dispatch for one in steps)
        self._before += _gap(steps)
        self._after = _median(one.commit for one in steps)
        self._deliveries = [one.delivery for one in trace.requests if one.delivery is not None]
        self._delivery = _median(self._deliveries)
        self.intake = _intake(trace.requests, steps, self._before)
        error = float(np.abs(np.concatenate([*ratios.values()]) - 1).mean())
        self.source = (
            f"steps: fitted from {len(steps)} steps of {trace.path.name} "
            f"({trace.about.get('model', 'a model that it does not name')}), "
            f"{len(ratios)} of {len(setting.shapes)} programs seen, mean deviation {error:.0%}"
            + ("" if seed is None else ", which simulated steps have too")
        )

    @classmethod
    def of_file(cls, setting: Setting, path: Path, seed: int | None = 0) -> Fitted:
        """Raises ValidationError that names file, line and field."""
        return cls(setting, read_trace(path), seed)

    def of(self, plan: StepPlan, num_pages: int) -> StepSeconds:
        shape = self._programs.of_plan(plan)
        rows, first = plan.rows, plan.num_decode
        pairs = sum(
            n * start + n * (n + 1) // 2
            for start, n in zip(rows.starts[first:], rows.lengths[first:])
        )
        facts = (sum(rows.starts[:first]) + first, pairs, first, sum(rows.lengths[first:]))
        seconds = self._expected(shape, facts) * self._deviation(shape)
        return StepSeconds(seconds, self._before, self._after, self._delivery)

    def first_delivery(self) -> float:
        if self._rng is None or not self._deliveries:
            return self._delivery
        return self._rng.choice(self._deliveries)

    def _shape_of(self, one: TracedStep) -> StepShape:
        if one.num_prefill_tokens == one.num_prefill:  # rows of one token are none of the region
            return self._programs.select(one.num_decode + one.num_prefill, 0, 0)
        return self._programs.select(one.num_decode, one.num_prefill_tokens, one.num_prefill)

    def _fit(self, shapes: Sequence[StepShape], facts: np.ndarray, seconds: np.ndarray) -> None:
        counts = defaultdict[StepShape, int](int)
        for shape in shapes:
            counts[shape] += 1
        known = [shape for shape, count in counts.items() if count >= KNOWN]
        place = {shape: number for number, shape in enumerate(known)}
        fitted = [number for number, shape in enumerate(shapes) if shape in place]
        if not known:
            raise ValidationError("--calibrate", f"{len(seconds)} steps", "more steps a program")
        table = np.zeros((len(fitted), len(known) + len(SCALE)))  # [steps, programs + facts]
        for row, number in enumerate(fitted):
            table[row, place[shapes[number]]] = 1.0
        table[:, len(known) :] = facts[fitted] / SCALE
        took, weight = seconds[fitted], np.ones(len(fitted))
        for _ in range(PASSES):  # a step deviates by a share of its time: weights are one over it
            found, _ = nnls(table * weight[:, None], took * weight)
            weight = 1.0 / np.maximum(table @ found, SHORTEST_S)
        self._factors: Facts = tuple(found[len(known) :] / SCALE)
        self._constants = dict(zip(known, found))
        # of programs that were not seen: by their rows and prompt tokens
        sizes = np.array([[1.0, s.num_decode, s.num_prefill] for s in known])
        weights = np.sqrt([counts[shape] for shape in known])
        self._by_size, _ = nnls(sizes * weights[:, None], found[: len(known)] * weights)

    def _expected(self, shape: StepShape, facts: Facts) -> float:
        constant = self._constants.get(shape)
        if constant is None:
            one, row, token = self._by_size
            constant = one + row * shape.num_decode + token * shape.num_prefill
            self._constants[shape] = constant
        a, b, c, d = self._factors
        return float(constant + a * facts[0] + b * facts[1] + c * facts[2] + d * facts[3])

    def _deviation(self, shape: StepShape) -> float:
        known = self._deviations.get(shape)
        if known is None or self._rng is None:
            return 1.0
        place, left = self._places.get(shape, (0, 0))
        if not left:
            place, left = self._rng.randrange(len(known)), STRETCH
        self._places[shape] = (place + 1) % len(known), left - 1
        return float(known[place])


def _facts_of(one: TracedStep) -> Facts:
    return one.num_decode_keys, one.num_prefill_keys, one.num_decode, one.num_prefill_tokens


def _seconds_of(steps: Sequence[TracedStep]) -> np.ndarray:
    """float64[steps]: since the device had the step and was done with the one before."""
    ends = np.array([0.0, *(one.fetched for one in steps[:-1])])
    # the device may run a step within the call that hands it over
    begins = np.array([one.dispatched - one.dispatch for one in steps])
    return np.array([one.fetched for one in steps]) - np.maximum(begins, ends)


def _gap(steps: Sequence[TracedStep]) -> float:
    """Median seconds of the engine's thread between a commit and the next plan."""
    ends = np.sort([one.fetched + one.commit for one in steps])
    begins = np.array([one.begin for one in steps])
    places = np.searchsorted(ends, begins, side="right") - 1
    gaps = (begins - ends[places])[places >= 0]
    return _median(gap for gap in gaps if gap < IDLE_S)


def _intake(requests: Sequence[TracedRequest], steps: Sequence[TracedStep], before: float) -> float:
    """Seconds that the server takes to read a request and hand it over, one after the other.

    It is the delay with which the median of the queue times is that of the recording, where a
    request begins with the first step that is planned once the engine has it, and at once where
    none was in flight. Only requests count that a slot and pages were free for.

    Args:
        requests, steps: of the recording.
        before: seconds of the host before a step is handed over.
    """
    ends = np.maximum.accumulate([one.fetched + one.commit for one in steps])
    begins = np.array([one.begin for one in steps])
    known = [one for one in requests if one.queue is not None and one.overhead is not None]
    arrivals = np.array([one.arrival for one in known])
    if not len(known):
        return 0.0

    def queue(delay: float) -> float:
        each = accumulate(arrivals, lambda last, at: max(last, at) + delay, initial=0.0)
        read = np.array([*each])[1:]  # when the engine has them
        behind = np.searchsorted(begins, read)  # how many steps were planned before each
        idle = (behind == 0) | (ends[np.maximum(behind - 1, 0)] <= read)
        begin = np.where(idle, read, begins[np.minimum(behind, len(begins) - 1)])
        return float(np.median(np.maximum(begin, read) - arrivals)) + before

    median = _median(one.queue for one in known if one.queue is not None)
    return min(DELAYS, key=lambda delay: abs(queue(delay) - median))


def _median(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return float(np.median(found)) if found else 0.0
