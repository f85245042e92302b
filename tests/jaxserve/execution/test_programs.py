"""The choice of a step's program: the cheapest that holds it, of those compiled so far."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.config.device_defaults import DEFAULTS
from jaxserve.execution import programs
from jaxserve.execution.control import CopyProgram, UploadProgram
from jaxserve.execution.features import (
    FAST,
    FULL,
    FULL_DECODE,
    KINDS,
    OPTIONAL_KINDS,
    Feature,
    feature_sets,
    make_features,
)
from jaxserve.execution.programs import (
    MOST_FAST_DECODES,
    MOST_PROGRAMS,
    Program,
    ProgramQuery,
    ProgramTable,
    decode_buckets,
    lanes_for,
    predicted_cost,
    prefill_buckets,
    wanted_shapes,
)
from jaxserve.execution.step_shape import StepShape
from jaxserve.loading.defaults import PRESET_FACTORS
from tests.command_line import output_of
from tests.jaxserve.execution.engine_facts import FACTS, blob_layout, fast, result_layout


def fake_program(shape: StepShape) -> Program:
    return Program(blob_layout(shape), result_layout(shape), lambda: None, 0)


def cost(shape: StepShape) -> float:
    return predicted_cost(shape, make_features(FACTS), numbers_per_token=1e4)


def table(ahead: int) -> ProgramTable:
    programs = ProgramTable(wanted_shapes(16, 256, 2), fake_program, cost)
    programs.compile_ahead(ahead, lambda shape: None)
    return programs


def selected(programs: ProgramTable, rows: int, tokens: int = 0, lanes: int = 0) -> StepShape:
    return programs.select(ProgramQuery(rows, tokens, lanes, FAST, 0)).layout.shape


def test_buckets() -> None:
    assert decode_buckets(16, 2) == [2, 4, 8, 16]
    assert decode_buckets(20, 1) == [1, 4, 8, 16, 20]
    assert decode_buckets(1, 2) == [2]
    assert decode_buckets(256, 1) == [1, 8, 16, 32, 64, 128, 256]
    assert decode_buckets(1000, 1) == [1, 32, 64, 128, 256, 512, 1000]
    assert prefill_buckets(512) == [32, 128, 512]
    assert prefill_buckets(40) == [40]
    assert prefill_buckets(3) == [3]
    assert lanes_for(512, 256) == 32
    assert lanes_for(3, 256) == 1
    assert lanes_for(512, 4) == 4


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_name_says_which_program(num_queries: int) -> None:
    for seqs, tokens in itertools.product((1, 4, 16, 100), (1, 20, 48, 64, 512)):
        shapes = wanted_shapes(seqs, tokens, 1, num_queries=num_queries)
        assert len({shape.name for shape in shapes}) == len(shapes)


def test_programs_with_drafts_are_those_that_may_have_some() -> None:
    def rows(drafts_for: Callable[[int], int] | None) -> list[int]:
        shapes = wanted_shapes(64, 256, 1, None, 3, drafts_for)
        small = [s for s in shapes if s.features == FAST and s.num_queries == 3]
        assert all(s.num_prefill == 0 for s in small)
        assert max(s.num_queries for s in shapes[:2]) == 3, "which hold every step"
        return [s.num_decode for s in small]

    every = [64, 32, 16, 8, 4, 1]
    assert rows(None) == rows(lambda running: 1) == every
    assert rows(lambda running: 2 if running <= 5 else 0) == [8, 4, 1]
    assert rows(lambda running: 2 if running == 16 else 0) == [16]
    assert rows(lambda running: 0) == []


class Adapter(Feature):
    """An option of the engine that works on rows of its own."""

    name = "adapter"


class Tap(Feature):
    """One that every step has."""

    name = "tap"
    special = False


OPTIONS = {"none": (), "adapter": (Adapter,), "tap": (Tap,), "both": (Adapter, Tap)} | {
    "settings": OPTIONAL_KINDS
}


@pytest.mark.parametrize("platform", DEFAULTS)
@pytest.mark.parametrize("preset", PRESET_FACTORS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_few_programs_hold_every_set_of_features(
    platform: str, preset: str, option: str, num_drafts: int
) -> None:
    defaults, (more_seqs, more_tokens) = DEFAULTS[platform], PRESET_FACTORS[preset]
    seqs = int(defaults.max_num_seqs * more_seqs)
    tokens = int(defaults.max_num_batched_tokens * more_tokens)
    kinds = (*KINDS, *OPTIONS[option])
    sets = feature_sets(kinds)
    shapes = wanted_shapes(seqs, tokens, defaults.smallest_bucket, sets, 1 + num_drafts)
    limit = MOST_PROGRAMS + (MOST_FAST_DECODES if num_drafts else 0)
    assert len(shapes) <= limit and len({shape.name for shape in shapes}) == len(shapes)
    assert MOST_PROGRAMS + len({UploadProgram, CopyProgram}) <= 24
    names = [kind.name for kind in kinds]
    every = lanes_for(tokens, seqs)
    rows = [n for n in (1, 5, 17, seqs) if n <= seqs]
    for queries in {1, 1 + num_drafts}:  # each of its own
        one = [ProgramQuery(n, 0, 0, sets.fast, 0, queries) for n in rows]
        assert all(
            min((s for s in shapes if w.fits(s)), key=lambda s: s.num_decode_tokens).num_queries
            == queries
            for w in one
        )
    for features in (sets.fast | set(pair) for pair in itertools.product(names, names)):
        most = ProgramQuery(seqs, tokens, every, features, seqs + every, 1 + num_drafts)
        assert any(most.fits(shape) for shape in shapes)
        if features <= sets.full_decode:
            assert any(
                ProgramQuery(seqs, 0, 0, features, seqs).fits(shape)
                for shape in shapes
                if not shape.num_prefill
            )


@pytest.mark.parametrize("ahead", [1, 2, 5, 16, 1000])
def test_every_step_is_served_whatever_is_compiled(ahead: int) -> None:
    programs = table(ahead)
    for rows, features in itertools.product(range(1, 17), (FAST, FULL_DECODE, FULL)):
        special = 0 if features == FAST else rows
        if features != FULL:
            wanted = ProgramQuery(rows, 0, 0, features, special)
            assert wanted.fits(programs.select(wanted).layout.shape)
        for tokens, lanes in ((1, 1), (17, 2), (256, 16)):
            wanted = ProgramQuery(rows, tokens, lanes, features, special)
            assert wanted.fits(programs.select(wanted).layout.shape)


def test_the_cheapest_program_is_chosen() -> None:
    assert selected(table(1000), 3) == fast(4)
    shape = selected(table(1000), 0, 10, 1)
    assert (shape.num_prefill, shape.features) == (16, FAST)


def test_a_row_that_needs_more_does_not_take_every_row_along() -> None:
    wide = ProgramTable(wanted_shapes(256, 2048, 1), fake_program, cost)
    wide.compile_ahead(1000, lambda shape: None)
    chosen = {
        m: wide.select(ProgramQuery(200, 0, 0, FULL_DECODE, m)).layout.shape for m in (1, 32, 33)
    }
    assert [(s.num_decode, s.num_special) for s in chosen.values()] == [
        (256, 32),
        (256, 32),
        (256, 256),
    ]


def test_a_special_row_does_not_make_a_step_score_its_prompts() -> None:
    wide = ProgramTable(wanted_shapes(256, 2048, 1), fake_program, cost)
    wide.compile_ahead(1000, lambda shape: None)
    chosen = wide.select(ProgramQuery(17, 20, 1, FAST | {"bias"}, 1)).layout.shape
    assert "prompt_scores" not in chosen.features and chosen.num_prefill == 128


def test_decode_steps_run_no_prefill_program() -> None:
    assert selected(table(2), 1).num_prefill == 0


@pytest.mark.parametrize(("cores", "at_once"), [(1, 1), (8, 8), (64, 16)])
def test_as_many_programs_are_compiled_at_once_as_there_are_cores(
    cores: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 16: each takes the host's memory as well."""
    sizes: list[int] = []

    def pool(size: int) -> ThreadPoolExecutor:
        sizes.append(size)
        return ThreadPoolExecutor(size)

    monkeypatch.setattr(programs.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(programs, "ThreadPoolExecutor", pool)
    table(1000)
    assert sizes == [at_once]


def test_background_compilation_completes_the_table_and_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trims: list[int] = []
    programs = table(2)
    monkeypatch.setattr(
        "jaxserve.execution.programs.trim", lambda: trims.append(len(programs.programs))
    )
    programs.compile_rest_in_background()
    programs._thread.join()
    assert trims[-1] == len(programs.wanted), "what the compiler has freed is given back"
    assert len(programs.programs) == len(programs.wanted)
    assert selected(programs, 3) == fast(4)
    programs.close()
    assert programs.programs == []


def test_closing_waits_for_no_compilation_and_begins_none() -> None:
    begun, may_end, compiled = threading.Event(), threading.Event(), list[StepShape]()

    def slow(shape: StepShape) -> Program:
        compiled.append(shape)
        begun.set()
        assert may_end.wait(10)
        return fake_program(shape)

    programs = table(2)
    programs._compile = slow
    programs.compile_rest_in_background()
    assert begun.wait(10) and programs.is_compiling
    programs.close()
    assert programs.programs == [] and not may_end.is_set()
    may_end.set()
    programs._thread.join()
    assert not programs.is_compiling
    assert len(compiled) == 1, "no other is begun"
    assert programs.programs == [], "what is there too late is not kept"


def test_a_failing_background_compilation_leaves_the_engine_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(shape: StepShape) -> Program:
        raise RuntimeError("no memory")

    programs = table(2)
    programs._compile = fail
    programs.compile_rest_in_background()
    programs._thread.join()
    assert "in the background failed" in caplog.text and "no memory" in caplog.text
    assert selected(programs, 3).features == FULL_DECODE


def test_the_interpreter_waits_for_what_is_compiled_also_for_an_engine_in_a_daemon() -> None:
    goes_on = threading.Event()
    programs = table(2)
    programs._compile = lambda shape: (goes_on.wait(), fake_program(shape))[1]
    engine = threading.Thread(target=programs.compile_rest_in_background, daemon=True)
    engine.start()
    engine.join()
    assert programs.is_compiling and not programs._thread.daemon, "it would be cut off inside XLA"
    programs.close()
    goes_on.set()
    programs._thread.join()


@pytest.mark.slow
def test_the_interpreter_may_exit_while_programs_are_compiled() -> None:
    script = """
import atexit, threading, time
from tests.jaxserve.execution.test_programs import cost, fake_program, wanted_shapes, ProgramTable
slow = lambda shape: (time.sleep(0.2), fake_program(shape))[1]
programs = ProgramTable(wanted_shapes(16, 256, 2), slow, cost)
programs.compile_ahead(2, lambda shape: None)
engine = threading.Thread(target=programs.compile_rest_in_background, daemon=True)
engine.start()
engine.join()
atexit.register(lambda: print(len(programs.wanted) - len(programs.programs), programs.is_compiling))
"""
    count, is_compiling = output_of("-c", script).split()
    assert int(count) > 0, "the rest was compiled although nobody waits for it"
    assert is_compiling == "False", "a thread that is cut off inside XLA aborts the process"
