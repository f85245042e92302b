"""The compiled programs: which shapes exist, in what order they are compiled, which one serves."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

from jaxserve.errors import EngineDeadError
from jaxserve.execution.features import KINDS, Feature, FeatureSets, feature_sets
from jaxserve.execution.host_memory import trim
from jaxserve.execution.step_inputs import BlobLayout, ResultLayout, contained
from jaxserve.execution.step_shape import StepShape

logger = logging.getLogger(__name__)

# steps; with the control programs at most 24 are compiled, and decode programs with drafts beside
MOST_PROGRAMS = 21
FAST_DECODE_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FULL_DECODE_SIZES = (4, 16, 64)
MOST_FAST_DECODES = 7
FEW_ROWS = 16  # decode rows of the smaller mixed programs
MOST_SPECIAL = 32  # rows that the costly features work on, but in the largest programs
MOST_LANES = 32
TOKENS_PER_LANE = 16
MOST_COMPILE_THREADS = 16  # no more than the host has cores
MOST_CHOICES = 4096  # steps whose program is remembered
MOST_VARIANTS = 8  # sets of features on demand that keep their programs


class Program(NamedTuple):
    """One compiled step: `call(leaves, buffers, state, blob) -> (state, result, aside)`.

    `state` is donated.

    `device_bytes` is what one device holds while it runs: operands, result and temporaries.
    `before` are the calls of the stages before the last one, whose `call` takes hidden states then.
    """

    layout: BlobLayout
    result: ResultLayout
    call: Callable[..., Any]
    device_bytes: int
    before: tuple[Callable[..., Any], ...] = ()


def lanes_for(num_prefill: int, max_num_seqs: int) -> int:
    """Lanes of a prefill region: enough for short prompts, few enough that padding stays cheap."""
    return max(1, min(num_prefill // TOKENS_PER_LANE, max_num_seqs, MOST_LANES))


def decode_buckets(max_num_seqs: int, smallest: int) -> list[int]:
    """Row counts of the fast decode programs, ascending; the largest holds every slot."""
    most = max(max_num_seqs, smallest)
    sizes = sorted({max(size, smallest) for size in FAST_DECODE_SIZES} & set(range(most)))
    while len(sizes) >= MOST_FAST_DECODES:
        del sizes[1]  # a few rows cost little more than one
    return [*sizes, most]


def prefill_buckets(max_prefill_tokens: int) -> list[int]:
    """Token counts of the prefill region, ascending: the budget, a quarter and a sixteenth."""
    sizes = {max_prefill_tokens // part for part in (1, 4, 16)}
    return sorted(size for size in sizes if size >= min(16, max_prefill_tokens))


def wanted_shapes(
    max_num_seqs: int,
    max_prefill_tokens: int,
    smallest_bucket: int,
    sets: FeatureSets | None = None,
    num_queries: int = 1,
    drafts_for: Callable[[int], int] | None = None,
) -> list[StepShape]:
    """Every program worth having, the most needed first: at most `MOST_PROGRAMS`.

    The first one serves any step, so an engine is complete with it; the second any step without
    prompts, in much less time. `fast` programs hold what every request needs, in many sizes; `full`
    ones hold every feature, in few. Costly features work on `MOST_SPECIAL` rows, but in the two
    largest programs on all; those of the prefill region are in the largest one alone. Where drafts
    are verified, decode programs with and without them exist side by side, for as many rows as may
    have some; of those with a prefill region the largest alone has them. A missing program costs
    speed, never an error.

    Args:
        max_num_seqs: slots.
        max_prefill_tokens: most tokens of a prefill region.
        smallest_bucket: fewest decode rows that are worth a program of their own.
        sets: of the engine's features; None: of those that every engine has.
        num_queries: tokens of a decode row that verifies drafts; 1: there are none.
        drafts_for: see `Feature.drafts_for`; None: however many run, there may be some.
    """
    fast_set, full_decode_set, full_set = sets or feature_sets(KINDS)
    decodes = decode_buckets(max_num_seqs, smallest_bucket)
    prefills = prefill_buckets(max_prefill_tokens)
    most, few = decodes[-1], max(smallest_bucket, min(FEW_ROWS, decodes[-1]))

    def shape(
        rows: int, tokens: int, features: frozenset[str], special: int, queries: int = 1
    ) -> StepShape:
        lanes = lanes_for(tokens, max_num_seqs) if tokens else 0
        special = min(special, rows * queries + lanes) if features != fast_set else 0
        return StepShape(rows, tokens, lanes, features, special, queries)

    def fast(rows: int, tokens: int = 0) -> StepShape:
        return shape(rows, tokens, fast_set, 0)

    def full(rows: int, tokens: int = 0, special: int = MOST_SPECIAL) -> StepShape:
        return shape(rows, tokens, full_decode_set, special)

    every = most * num_queries + MOST_LANES
    shapes = [shape(most, prefills[-1], full_set, every, num_queries)]
    shapes.append(shape(most, 0, full_decode_set, every, num_queries))
    if num_queries > 1:
        shapes += [
            shape(rows, 0, fast_set, 0, num_queries)
            for fewer, rows in reversed([*pairwise([0, *decodes])])
            if drafts_for is None or any(map(drafts_for, range(fewer + 1, rows + 1)))
        ]
    shapes += [fast(most, prefills[-1]), fast(most), fast(few, prefills[0])]
    shapes += [fast(rows) for rows in decodes[:-1]]
    shapes += [fast(few, tokens) for tokens in prefills[1:]]
    shapes += [fast(most, tokens) for tokens in prefills[:-1]]
    shapes += [full(few, prefills[len(prefills) // 2]), full(most, prefills[0]), full(most)]
    shapes += [full(rows) for rows in FULL_DECODE_SIZES if smallest_bucket <= rows < most]
    named: dict[str, StepShape] = {}
    for one in shapes:  # of two that differ in nothing but features the first holds more
        named.setdefault(one.name, one)
    return list(named.values())


def predicted_cost(
    shape: StepShape, features: Sequence[Feature], numbers_per_token: float
) -> float:
    """float32 numbers that a step moves beside the weights, which every step reads once.

    A token's share of the matrix products counts as `numbers_per_token`.
    """
    tokens = shape.num_decode_tokens + shape.num_prefill
    costs = (feature.cost(shape) for feature in contained(features, shape))
    return tokens * numbers_per_token + sum(costs)


class ProgramQuery(NamedTuple):
    """What a step asks of its program; the fields are those of `StepShape`."""

    num_decode: int
    num_prefill: int
    num_lanes: int
    features: frozenset[str]
    num_special: int
    num_queries: int = 1

    def fits(self, shape: StepShape) -> bool:
        return (
            self.num_decode <= shape.num_decode
            and self.num_prefill <= shape.num_prefill
            and self.num_lanes <= shape.num_lanes
            and self.num_special <= shape.num_special
            and self.num_queries <= shape.num_queries
            and self.features <= shape.features
        )


class ProgramTable:
    """Compiled programs by shape.

    Args:
        shapes: wanted shapes, most needed first; the first one must serve every step.
        compile_program: compiles one shape.
        cost: of a shape: a step takes the cheapest program that holds it.
    """

    def __init__(
        self,
        shapes: Sequence[StepShape],
        compile_program: Callable[[StepShape], Program],
        cost: Callable[[StepShape], float],
    ):
        self.wanted = list(shapes)
        self._compile = compile_program
        self._cost = cost
        self._programs: dict[StepShape, Program] = {}
        self._choices: dict[ProgramQuery, Program] = {}
        self._variants: list[frozenset[str]] = []  # the one asked for last comes last
        self._stop = threading.Event()
        self._lock = threading.Lock()  # a program that is there too late is not kept
        self._thread: threading.Thread | None = None

    @property
    def programs(self) -> list[Program]:
        return list(self._programs.values())

    def named(self, name: str) -> Program:
        """A compiled program by the name of its shape.

        Raises:
            KeyError: there is none.
        """
        for shape, program in self._programs.items():
            if shape.name == name:
                return program
        raise KeyError(name)

    def compile_ahead(self, count: int, progress: Callable[[StepShape], None]) -> None:
        """Compile the `count` (at least one) most needed programs now; `progress` is told each.

        What has been compiled is not compiled again.
        """
        shapes = self.wanted[: max(1, count)]

        def work(shape: StepShape) -> Program:
            program = self._programs.get(shape) or self._compile(shape)
            progress(shape)
            return program

        # XLA compiles one program on one core and lets go of the interpreter lock
        with ThreadPoolExecutor(min(MOST_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            self._programs = {**self._programs, **dict(zip(shapes, pool.map(work, shapes)))}
            self._choices = {}

    def add_variant(self, shapes: Sequence[StepShape]) -> bool:
        """Compile the programs of a set of features on demand, unless they are there.

        Of more than MOST_VARIANTS sets the one that was asked for least recently is dropped.

        Returns:
            Whether any was compiled.
        """
        (names,) = {shape.on_demand for shape in shapes}
        missing = [shape for shape in shapes if shape not in self._programs]
        made = {shape: self._compile(shape) for shape in missing}
        with self._lock:
            kept = self._variants = [one for one in self._variants if one != names] + [names]
            self._variants = kept[-MOST_VARIANTS:]
            every = {**self._programs, **made}
            alive = {frozenset(), *self._variants}
            self._programs = {s: p for s, p in every.items() if s.on_demand in alive}
            self._choices = {}
        return bool(made)

    def compile_rest_in_background(self) -> None:
        """Compile the other programs in a thread, while the engine serves with those it has.

        What the compiler has freed goes back to the system after each.
        """
        rest = [shape for shape in self.wanted if shape not in self._programs]

        def work() -> None:
            for shape in rest:
                # the interpreter waits for this thread when it exits
                if self._stop.is_set() or not threading.main_thread().is_alive():
                    return
                try:
                    program = self._compile(shape)
                except EngineDeadError:
                    return  # no engine is left that would run it
                except Exception:
                    # a larger program serves these steps, so the engine goes on without this one
                    logger.exception("compiling %s in the background failed", shape.name)
                    return
                with self._lock:
                    if self._stop.is_set():
                        return
                    self._programs = {**self._programs, shape: program}
                    self._choices = {}
                del program
                trim()

        if rest:
            # no daemon, also where the thread that loads an engine is one: the interpreter would
            # cut it off inside XLA, which aborts the process
            self._thread = threading.Thread(target=work, name="jaxserve-compile", daemon=False)
            self._thread.start()

    @property
    def is_compiling(self) -> bool:
        """Whether programs are compiled in the background now."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Drop the programs, and the one that is being compiled once it is there.

        Nobody waits for that: the compiler cannot be interrupted, and may take many seconds. No
        other is begun. The interpreter's end does wait for it.
        """
        with self._lock:
            self._stop.set()
            self._programs, self._choices = {}, {}

    def substitute(self, shape: StepShape, program: Program) -> Program:
        """Let another program serve a compiled shape; returns the one that did so far."""
        before = self._programs[shape]
        self._programs, self._choices = {**self._programs, shape: program}, {}
        return before

    def select(self, wanted: ProgramQuery) -> Program:
        """The cheapest compiled program that holds the step."""
        choices = self._choices
        program = choices.get(wanted)
        if program is None:
            fitting = [shape for shape in self._programs if wanted.fits(shape)]
            fitting.sort(key=lambda shape: len(shape.on_demand))  # of equal cost the plainest
            if len(choices) >= MOST_CHOICES:
                choices.clear()
            program = choices[wanted] = self._programs[min(fitting, key=self._cost)]
        return program
