"""How long steps take by those of an engine that was recorded: a fit, and what it leaves over."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from jaxserve.errors import ValidationError
from jaxserve.execution.step_shape import StepShape
from jaxserve.observability.load_trace import LoadTrace, TracedRequest, TracedStep, read_trace
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.setting import Setting
from jaxserve.simulation.step_time import Programs, StepSeconds

LEAST_STEPS = 50  # of a trace that says something
KNOWN = 8  # steps of a kind from which its own constant is fitted
STRETCH = 32  # steps whose deviations are taken in their order: what disturbs one disturbs the next
DELAYS = tuple(0.0001 * n for n in range(200))  # seconds that are tried for the intake
PASSES = 3  # of least squares, each weighted by what the one before expects
SHORTEST_S = 1e-5  # of a step
IDLE_S = 0.005  # between two steps: longer, and the engine had nothing to do
SCALE = np.array([1e3, 1e5, 10.0, 100.0])  # of the columns of `_facts`, so that they are alike

Facts = tuple[float, float, float, float]


class Kind(NamedTuple):
    """Steps of one program that do alike.

    Attributes:
        shape: of the program.
        rows: the decode rows that count, where there are no others: kernels divide them among
            registers, and 3 rows may take longer than 4; 0 beside prompts.
    """

    shape: StepShape
    rows: int


class Fitted:
    """Times of steps as a recorded engine had them.

    The seconds of a step are a constant of its kind, and for each key that decode rows see, each
    pair of a prompt token and a key, each decode row beside prompts and each prompt token a factor,
    none of which is negative: least squares over all recorded steps. What a step took beside that
    is kept, and simulated steps of the program deviate as the recorded ones did, in stretches of
    `STRETCH`.

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
        kinds = [self._kind_of(one) for one in steps]
        facts = [_facts_of(kind, one) for kind, one in zip(kinds, steps)]
        seconds = _seconds_of(steps)
        self._fit(kinds, np.array(facts), seconds)
        self._deviations: dict[StepShape, np.ndarray] = {}
        self._places: dict[StepShape, tuple[int, int]] = {}
        ratios = defaultdict[StepShape, list[float]](list)
        for kind, known, took in zip(kinds, facts, seconds):
            expected = self._expected(kind, known)
            ratios[kind.shape].append(took / expected if expected > 0 else 1.0)
        self._deviations = {s: np.array(r) for s, r in ratios.items() if len(r) >= KNOWN}
        self._before = _median(one.plan + one.pack + one.dispatch for one in steps)
        self._before += _gap(steps)
        self._after = _median(one.commit for one in steps)
        self._deliveries = [one.delivery for one in trace.requests if one.delivery is not None]
        self._delivery = _median(self._deliveries)
        self.intake, self.handover = _intake(trace.requests, steps, self._before)
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
        kind = Kind(shape, 0 if len(rows.starts) > first else first)
        beside = 0 if kind.rows else first
        facts = (sum(rows.starts[:first]) + first, pairs, beside, sum(rows.lengths[first:]))
        seconds = self._expected(kind, facts) * self._deviation(shape)
        return StepSeconds(seconds, self._before, self._after, self._delivery)

    def first_delivery(self) -> float:
        if self._rng is None or not self._deliveries:
            return self._delivery
        return self._rng.choice(self._deliveries)

    def _kind_of(self, one: TracedStep) -> Kind:
        if one.num_prefill_tokens == one.num_prefill:  # rows of one token are none of the region
            rows = one.num_decode + one.num_prefill
            return Kind(self._programs.select(rows, 0, 0), 0 if one.num_prefill else rows)
        shape = self._programs.select(one.num_decode, one.num_prefill_tokens, one.num_prefill)
        return Kind(shape, 0)

    def _fit(self, kinds: Sequence[Kind], facts: np.ndarray, seconds: np.ndarray) -> None:
        counts = Counter(kinds)
        known = [kind for kind, count in counts.items() if count >= KNOWN]
        place = {kind: number for number, kind in enumerate(known)}
        fitted = [number for number, kind in enumerate(kinds) if kind in place]
        if not known:
            raise ValidationError("--calibrate", f"{len(seconds)} steps", "more steps a program")
        table = np.zeros((len(fitted), len(known) + len(SCALE)))  # [steps, kinds + facts]
        for row, number in enumerate(fitted):
            table[row, place[kinds[number]]] = 1.0
        table[:, len(known) :] = facts[fitted] / SCALE
        took, weight = seconds[fitted], np.ones(len(fitted))
        for _ in range(PASSES):  # a step deviates by a share of its time: weights are one over it
            found, _ = nnls(table * weight[:, None], took * weight)
            weight = 1.0 / np.maximum(table @ found, SHORTEST_S)
        self._factors: Facts = tuple(found[len(known) :] / SCALE)
        self._constants = dict(zip(known, found))
        # of programs that were not seen: by their rows and prompt tokens
        sizes = np.array([[1.0, k.shape.num_decode, k.shape.num_prefill] for k in known])
        weights = np.sqrt([counts[kind] for kind in known])
        self._by_size, _ = nnls(sizes * weights[:, None], found[: len(known)] * weights)

    def _expected(self, kind: Kind, facts: Facts) -> float:
        constant = self._constants.get(kind)
        if constant is None:
            constant = self._constants[kind] = self._guessed(kind)
        a, b, c, d = self._factors
        return float(constant + a * facts[0] + b * facts[1] + c * facts[2] + d * facts[3])

    def _guessed(self, kind: Kind) -> float:
        """The constant of the seen kind of the same program whose rows are nearest, if any."""
        alike = [one for one in self._constants if one.shape == kind.shape]
        if alike:
            return float(self._constants[min(alike, key=lambda one: abs(one.rows - kind.rows))])
        one, row, token = self._by_size
        return float(one + row * kind.shape.num_decode + token * kind.shape.num_prefill)

    def _deviation(self, shape: StepShape) -> float:
        known = self._deviations.get(shape)
        if known is None or self._rng is None:
            return 1.0
        place, left = self._places.get(shape, (0, 0))
        if not left:
            place, left = self._rng.randrange(len(known)), STRETCH
        self._places[shape] = (place + 1) % len(known), left - 1
        return float(known[place])


def _facts_of(kind: Kind, one: TracedStep) -> Facts:
    beside = 0 if kind.rows else one.num_decode
    return one.num_decode_keys, one.num_prefill_keys, beside, one.num_prefill_tokens


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


def _intake(
    requests: Sequence[TracedRequest], steps: Sequence[TracedStep], before: float
) -> tuple[float, float]:
    """Seconds that the server takes to read a request, one after the other, and until the engine
    has it.

    With them the waits of half of the requests are nearest to those of the recording, where a
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
    queues = np.array([one.queue for one in known])
    if not len(known):
        return 0.0, 0.0

    def error(reading: float, handover: float) -> float:
        each = accumulate(arrivals, lambda last, at: max(last, at) + reading, initial=0.0)
        had = np.array([*each])[1:] + handover  # when the engine has them
        behind = np.searchsorted(begins, had)  # how many steps were planned before each
        idle = (behind == 0) | (ends[np.maximum(behind - 1, 0)] <= had)
        begin = np.where(idle, had, begins[np.minimum(behind, len(begins) - 1)])
        return float(np.median(np.abs(np.maximum(begin, had) - arrivals + before - queues)))

    # of both together first, as of requests that come alone
    both = min(DELAYS, key=lambda delay: error(0.0, delay))
    return min(
        ((reading, max(0.0, both - reading)) for reading in DELAYS if reading <= 2 * both),
        key=lambda pair: error(*pair),
    )


def _median(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return float(np.median(found)) if found else 0.0
