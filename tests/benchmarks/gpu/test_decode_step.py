"""The cases of the step: their requests, their programs, and the options of these."""

from __future__ import annotations

import jax
import pytest

from benchmarks.gpu import decode_step
from benchmarks.gpu.decode_step import Case, SampledItem
from benchmarks.gpu.engine import compiling_with, make_llm
from benchmarks.gpu.engine_kinds import KINDS
from benchmarks.model_shapes import TINY, write_config
from jaxserve.execution import step_compiler
from jaxserve.execution.features import FAST, FULL_DECODE
from jaxserve.execution.programs import ProgramQuery
from jaxserve.execution.step_shape import StepShape

NONSENSE = {"xla_gpu_nonsense": "1"}


def test_filtered_greedy_and_ungraphed_steps_are_measured():
    steps = (*decode_step.STEPS, *decode_step.OTHER_STEPS)
    cases = [Case.parsed(case) for case in steps]
    assert [(case.kind, case.rows) for case in cases] == [
        ("filtered", 64), ("filtered", 16), ("filtered", 1), ("filtered", 256),
        ("greedy", 64), ("graphs-off", 64),
    ]  # fmt: skip
    assert cases[-1].program == cases[0].program == StepShape(64, 0, 0, FAST, 0)
    assert cases[4].program == cases[0].program, "greedy rows run on the same program"
    assert len({case.engine for case in cases}) == 1


def test_every_kind_of_engine_has_a_step_and_an_engine_of_its_own():
    cases = [Case.parsed(case) for case in decode_step.OF_KINDS]
    assert [case.kind for case in cases] == list(KINDS)
    assert len({case.engine for case in cases}) == len(KINDS)
    assert {case.shape for case in cases if case.kind == "sparse"} == {"qwen3-moe-3b"}


def test_sampled_requests_need_the_filters():
    params = SampledItem([1, 2], 5).params()
    assert (params.top_k, params.top_p, params.max_tokens) == (50, 0.95, 5)
    assert not params.is_greedy


@pytest.fixture
def llm(tmp_path):
    made = make_llm(write_config("llama-125m", tmp_path, **TINY), max_num_seqs=2, num_pages=80)
    yield made
    made.close()


@pytest.mark.slow
def test_the_program_without_graphs_is_compiled_so_and_is_the_one_that_runs(llm, monkeypatch):
    bed = decode_step.Bed(llm)
    table = llm.client.engine.runner.programs
    shape = StepShape(2, 0, 0, FULL_DECODE, 2)
    needs_all = ProgramQuery(2, 0, 0, FULL_DECODE, 2)
    fast = ProgramQuery(2, 0, 0, FAST, 0)
    plain = table.select(fast)
    kept = table.select(needs_all)
    assert kept.layout.shape == shape
    with decode_step.without_graphs(bed, shape):
        assert table.select(needs_all) is not kept
        assert table.select(needs_all).layout.shape == shape
    assert table.select(needs_all) is kept and table.select(fast) is plain
    assert list(bed.compile_s) == [f"{shape.name}, no graphs"]
    # an option that XLA does not know shows that the compiler is given them
    monkeypatch.setattr(decode_step, "NO_GRAPHS", NONSENSE)
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_nonsense"),
        decode_step.without_graphs(bed, shape),
    ):
        pass


@pytest.mark.slow
def test_options_of_a_block_reach_the_engines_made_in_it(tmp_path):
    folder = write_config("llama-125m", tmp_path, **TINY)
    with compiling_with({"xla_gpu_autotune_level": "0"}):
        assert step_compiler.compiler_options("gpu")["xla_gpu_autotune_level"] == "0"
        llm = make_llm(folder, max_num_seqs=2, num_pages=80, compile_ahead=2)
    assert llm.client.engine.runner.stages[-1].compiler.options["xla_gpu_autotune_level"] == "0"
    llm.close()
    assert step_compiler.compiler_options("cpu") == {}
