"""The compiled programs: which shapes exist, in what order they are compiled, which one serves."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxserve.execution.batch import BlobLayout, ResultLayout, StepShape
from jaxserve.sampling.variant import Variant

logger = logging.getLogger(__name__)

DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MOST_LANES = 32
TOKENS_PER_LANE = 16
MOST_COMPILE_THREADS = 4


class Program(NamedTuple):
    """One compiled step: `call(leaves, state, blob) -> (state, result)`; `state` is donated.

    `device_bytes` is what one device holds while it runs: operands, result and temporaries.
    """

    layout: BlobLayout
    result: ResultLayout
    call: Callable[..., Any]
    device_bytes: int


def lanes_for(num_prefill: int, max_num_seqs: int) -> int:
    """Lanes of a prefill region: enough for short prompts, few enough that padding stays cheap."""
    return max(1, min(num_prefill // TOKENS_PER_LANE, max_num_seqs, MOST_LANES))


def decode_buckets(max_num_seqs: int, smallest: int) -> list[int]:
    """Row counts of the decode programs, ascending; the largest holds every slot."""
    buckets = [b for b in DECODE_BUCKETS if smallest <= b < max_num_seqs]
    return [*buckets, max(max_num_seqs, smallest)]


def prefill_buckets(max_prefill_tokens: int) -> list[int]:
    """Token counts of the prefill region, ascending: the budget and 1/2, 1/4, 1/16 of it."""
    sizes = {max_prefill_tokens // part for part in (1, 2, 4, 16)}
    return sorted(size for size in sizes if size >= min(16, max_prefill_tokens))


def wanted_shapes(
    max_num_seqs: int,
    max_prefill_tokens: int,
    smallest_bucket: int,
    common: Sequence[Variant] = (Variant.FILTERED, Variant.GREEDY),
) -> list[StepShape]:
    """Every program worth having, the most needed first.

    The first two serve any step, so an engine is complete with them. The common variants follow in
    all sizes (filtered programs first, which serve greedy and plain requests too), then the largest
    sizes of the rare ones. A missing one costs speed, never an error. The number is kept small: on
    the CPU a deep model's program takes hundreds of the 65,530 memory mappings that Linux allows.
    """
    decodes = decode_buckets(max_num_seqs, smallest_bucket)
    prefills = prefill_buckets(max_prefill_tokens)
    few = decodes[min(2, len(decodes) - 1)]
    full = decodes[-1]

    def decode(rows: int, variant: Variant) -> StepShape:
        return StepShape(rows, 0, 0, variant)

    def mixed(rows: int, tokens: int, variant: Variant) -> StepShape:
        return StepShape(rows, tokens, lanes_for(tokens, max_num_seqs), variant)

    shapes = [mixed(full, prefills[-1], Variant.SCORED), decode(full, Variant.MASKED)]
    for variant in common:
        shapes.append(mixed(full, prefills[-1], variant))
        shapes.append(decode(full, variant))
        shapes.append(mixed(few, prefills[0], variant))
        shapes += [decode(rows, variant) for rows in decodes[:-1]]
        shapes += [mixed(few, tokens, variant) for tokens in prefills[1:]]
        shapes += [mixed(full, tokens, variant) for tokens in prefills[:-1]]
    shapes += [mixed(full, prefills[-1], Variant.RICH), decode(full, Variant.RICH)]
    shapes += [mixed(few, prefills[0], Variant.MASKED), decode(few, Variant.MASKED)]
    return list(dict.fromkeys(shapes))


class ProgramTable:
    """Compiled programs by shape.

    Args:
        shapes: wanted shapes, most needed first; the first two must serve every step.
        compile_program: compiles one shape.
    """

    def __init__(
        self, shapes: Sequence[StepShape], compile_program: Callable[[StepShape], Program]
    ):
        self.wanted = list(shapes)
        self._compile = compile_program
        self._programs: dict[StepShape, Program] = {}
        self._choices: dict[tuple[int, int, int, Variant], Program] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.background_error: Exception | None = None

    @property
    def programs(self) -> list[Program]:
        return list(self._programs.values())

    def compile_ahead(self, count: int, progress: Callable[[StepShape], None]) -> None:
        """Compile the `count` (at least two) most needed programs now; `progress` is told each.

        What has been compiled is not compiled again.
        """
        shapes = self.wanted[: max(2, count)]

        def work(shape: StepShape) -> Program:
            program = self._programs.get(shape) or self._compile(shape)
            progress(shape)
            return program

        # XLA compiles one program on one core and lets go of the interpreter lock
        with ThreadPoolExecutor(min(MOST_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            self._programs = dict(zip(shapes, pool.map(work, shapes)))
            self._choices = {}

    def compile_rest_in_background(self) -> None:
        """Compile the other programs in a thread, while the engine serves with those it has."""
        rest = [shape for shape in self.wanted if shape not in self._programs]

        def work() -> None:
            for shape in rest:
                # the interpreter waits for this thread when it exits: a thread that it cuts off
                # inside XLA aborts the process
                if self._stop.is_set() or not threading.main_thread().is_alive():
                    return
                try:
                    program = self._compile(shape)
                except Exception as error:
                    # a larger program serves these steps, so the engine goes on without this one
                    self.background_error = error
                    logger.exception("compiling %s in the background failed", shape.name)
                    return
                self._programs = {**self._programs, shape: program}
                self._choices = {}

        if rest:
            self._thread = threading.Thread(target=work, name="jaxserve-compile")
            self._thread.start()

    def close(self) -> None:
        """Stop the background thread after the program that it is compiling; drop the programs."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._programs, self._choices = {}, {}

    def select(
        self, num_decode: int, num_prefill: int, num_lanes: int, variant: Variant
    ) -> Program:
        """The cheapest compiled program that holds the step."""
        key = (num_decode, num_prefill, num_lanes, variant)
        choices = self._choices
        program = choices.get(key)
        if program is None:
            fitting = [
                shape
                for shape in self._programs
                if shape.num_decode >= num_decode
                and shape.num_prefill >= num_prefill
                and shape.num_lanes >= num_lanes
                and shape.variant >= variant
                and (num_prefill > 0 or shape.num_prefill == 0)
            ]
            best = min(fitting, key=lambda s: (s.num_decode + s.num_prefill, s.variant))
            program = choices[key] = self._programs[best]
        return program
