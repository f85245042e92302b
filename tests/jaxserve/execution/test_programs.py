"""Which program serves a step: the cheapest that holds it, from those compiled so far."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from jaxserve.execution.batch import BlobLayout, ResultLayout, StepShape
from jaxserve.execution.programs import (
    Program,
    ProgramTable,
    decode_buckets,
    lanes_for,
    prefill_buckets,
    wanted_shapes,
)
from jaxserve.sampling.variant import Variant


def fake_program(shape: StepShape) -> Program:
    return Program(BlobLayout(shape, 16, 10), ResultLayout(shape, 0), lambda: None, 0)


def table(ahead: int) -> ProgramTable:
    programs = ProgramTable(wanted_shapes(16, 256, 2), fake_program)
    programs.compile_ahead(ahead, lambda shape: None)
    return programs


def test_buckets() -> None:
    assert decode_buckets(16, 2) == [2, 4, 8, 16]
    assert decode_buckets(20, 1) == [1, 2, 4, 8, 16, 20]
    assert decode_buckets(1, 2) == [2]
    assert prefill_buckets(512) == [32, 128, 256, 512]
    assert prefill_buckets(40) == [20, 40]
    assert prefill_buckets(20) == [20]
    assert prefill_buckets(3) == [3]
    assert lanes_for(512, 256) == 32
    assert lanes_for(3, 256) == 1
    assert lanes_for(512, 4) == 4


@pytest.mark.parametrize("ahead", [1, 2, 5, 16, 1000])
def test_every_step_is_served_whatever_is_compiled(ahead: int) -> None:
    programs = table(ahead)
    for rows, variant in itertools.product(range(1, 17), Variant):
        if variant < Variant.SCORED:
            shape = programs.select(rows, 0, 0, variant).layout.shape
            assert shape.num_decode >= rows and shape.variant >= variant
        for tokens, lanes in ((1, 1), (17, 2), (256, 16)):
            shape = programs.select(rows, tokens, lanes, variant).layout.shape
            assert shape.num_prefill >= tokens and shape.num_lanes >= lanes
            assert shape.num_decode >= rows and shape.variant >= variant


def test_the_smallest_program_is_chosen() -> None:
    shape = table(1000).select(3, 0, 0, Variant.GREEDY).layout.shape
    assert shape == StepShape(4, 0, 0, Variant.GREEDY)
    shape = table(1000).select(0, 10, 1, Variant.FILTERED).layout.shape
    assert (shape.num_prefill, shape.variant) == (16, Variant.FILTERED)


def test_decode_steps_run_no_prefill_program() -> None:
    assert table(2).select(1, 0, 0, Variant.GREEDY).layout.shape.num_prefill == 0


def test_background_compilation_completes_the_table_and_stops() -> None:
    programs = table(2)
    programs.compile_rest_in_background()
    programs._thread.join()
    assert len(programs.programs) == len(programs.wanted)
    assert programs.select(3, 0, 0, Variant.GREEDY).layout.shape == StepShape(
        4, 0, 0, Variant.GREEDY
    )
    assert programs.background_error is None
    programs.close()
    assert programs.programs == []


def test_a_failing_background_compilation_leaves_the_engine_served() -> None:
    def fail(shape: StepShape) -> Program:
        raise RuntimeError("no memory")

    programs = table(2)
    programs._compile = fail
    programs.compile_rest_in_background()
    programs._thread.join()
    assert isinstance(programs.background_error, RuntimeError)
    assert programs.select(3, 0, 0, Variant.GREEDY).layout.shape.variant is Variant.MASKED


def test_the_interpreter_may_exit_while_programs_are_compiled() -> None:
    script = """
import atexit, time
from tests.jaxserve.execution.test_programs import fake_program, wanted_shapes, ProgramTable
programs = ProgramTable(wanted_shapes(16, 256, 2), lambda s: (time.sleep(0.2), fake_program(s))[1])
programs.compile_ahead(2, lambda shape: None)
programs.compile_rest_in_background()
atexit.register(lambda: print(len(programs.wanted) - len(programs.programs)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "the rest was compiled although nobody waits for it"
