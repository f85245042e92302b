"""An engine's device memory: planned, verified by compilation, given back by `close`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.execution import runner as runner_module
from jaxserve.execution.memory_plan import Demand
from jaxserve.execution.runner import Runner
from jaxserve.execution.step_shape import StepShape
from jaxserve.loading import pool_plan

MIB = 1 << 20
SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "compile_ahead": 3,
    "compile_in_background": False,
    "gpu_memory_utilization": 0.5,
}


class Start:
    """Starts engines on a device that says how much memory it has, and counts compilations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[StepShape] = []
        self.demands: list[Demand] = []
        self._patch = monkeypatch
        compile_program, demand = Runner.compile_program, Runner.demand

        def counted(runner: Runner, shape: StepShape) -> Any:
            self.compiled.append(shape)
            return compile_program(runner, shape)

        def noted(runner: Runner) -> Demand:
            self.demands.append(demand(runner))
            return self.demands[-1]

        monkeypatch.setattr(Runner, "compile_program", counted)
        monkeypatch.setattr(Runner, "demand", noted)

    def __call__(self, limit: int, temporaries: int, **settings: Any) -> LLM:
        """An engine on a device of `limit` bytes; `temporaries` is the bound of a step's."""
        self._patch.setattr(pool_plan, "device_limit", lambda device: limit)
        self._patch.setattr(runner_module, "temporary_bound", lambda *shape: temporaries)
        return LLM(str(bundled_model_path()), **(SETTINGS | settings))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(monkeypatch)


@pytest.fixture
def uncollected() -> Iterator[Callable[[], None]]:
    """No garbage collector: what is freed is freed because nobody refers to it."""
    gc.collect()
    gc.disable()
    yield gc.disable
    gc.enable()


def bytes_of_a_page(llm: LLM) -> int:
    return llm.client.engine.runner.state_shape().cache.page_bytes(shards=1)


def held(runner: Runner) -> int:
    return sum(array.nbytes for array in (*runner.weights.leaves, *jax.tree.leaves(runner.state)))


@pytest.mark.slow
def test_a_bound_that_holds_costs_no_compilation(start: Start) -> None:
    llm = start(limit=120 * MIB, temporaries=16 * MIB, max_model_len=None, max_num_seqs=16)
    assert len(start.compiled) == len(set(start.compiled)) == SETTINGS["compile_ahead"]
    (demand,) = start.demands
    state = llm.client.engine.runner.state
    on_device = sum(a.nbytes for a in jax.tree.leaves(state))
    assert demand.weights == held(llm.client.engine.runner) - on_device
    assert demand.tables == on_device - state.kv.pages.nbytes
    left = 60 * MIB - sum(demand) - state.kv.pages.nbytes
    assert 0 <= left < bytes_of_a_page(llm), "all that is left is pages"
    llm.close()


@pytest.mark.slow
def test_blobs_and_results_of_two_steps_are_planned(start: Start) -> None:
    llm = start(limit=1024 * MIB, temporaries=16 * MIB)
    largest = llm.client.engine.runner.programs.programs[:2]
    assert start.demands[0].transfers == 2 * 4 * max(p.layout.size + p.result.size for p in largest)
    assert start.demands[0].transfers > 2 * 4 * 4 * llm.model_config.vocab_size  # the bias of a row
    llm.close()


@pytest.mark.slow
def test_steps_that_need_more_than_the_bound_are_planned_and_compiled_again(start: Start) -> None:
    llm = start(limit=120 * MIB, temporaries=0, max_model_len=None, max_num_seqs=16)
    runner = llm.client.engine.runner
    assert len(start.compiled) == 2 + SETTINGS["compile_ahead"]
    assert start.compiled[:2] == runner.programs.wanted[:2]
    assert runner.compile_largest() <= 60 * MIB < sum(start.demands[0]) + held(runner)
    output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)[0]
    assert output.outputs[0].token_ids
    llm.close()


@pytest.mark.slow
def test_room_beyond_what_all_slots_use_is_for_temporaries(start: Start) -> None:
    llm = start(limit=1024 * MIB, temporaries=0)
    assert llm.config.cache.num_pages == 4 * 8 + 1
    assert len(start.compiled) == SETTINGS["compile_ahead"], "nothing is short, so nothing again"
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "temporaries",
    [
        pytest.param(0, id="planned twice", marks=pytest.mark.slow),
        pytest.param(16 * MIB, id="planned once"),
    ],
)
def test_close_frees_weights_and_pool(start: Start, uncollected, temporaries: int) -> None:
    llm = start(limit=120 * MIB, temporaries=temporaries, max_num_seqs=16, max_model_len=None)
    runner = llm.client.engine.runner
    arrays = [
        weakref.ref(array) for array in (*runner.weights.leaves, *jax.tree.leaves(runner.state))
    ]
    programs = [weakref.ref(program.call) for program in runner.programs.programs]
    assert len(arrays) > 20 and len(programs) == SETTINGS["compile_ahead"]
    del runner
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
    arrays += [weakref.ref(array) for array in jax.tree.leaves(llm.client.engine.runner.state)]
    assert all(array() is not None for array in arrays[-3:])
    llm.close()
    assert [ref for ref in (*arrays, *programs) if ref() is not None] == []


@pytest.mark.slow
def test_a_start_leaves_no_second_runner(start: Start) -> None:
    made: list[weakref.ref[Runner]] = []
    original = Runner.__init__

    def noted(runner: Runner, *args: Any, **named: Any) -> None:
        made.append(weakref.ref(runner))
        original(runner, *args, **named)

    start._patch.setattr(Runner, "__init__", noted)
    llm = start(limit=120 * MIB, temporaries=0, max_num_seqs=16, max_model_len=None)
    assert [ref() for ref in made] == [llm.client.engine.runner]
    llm.close()


@pytest.mark.slow
def test_close_frees_them_after_a_failed_step_too(start: Start, uncollected) -> None:
    llm = start(limit=1024 * MIB, temporaries=0)
    runner = llm.client.engine.runner
    arrays = [
        weakref.ref(array) for array in (*runner.weights.leaves, *jax.tree.leaves(runner.state))
    ]

    def call(*operands: Any) -> Any:
        raise RuntimeError("out of memory")

    table = runner.programs
    for program in table.programs:
        table.substitute(program.layout.shape, program._replace(call=call))
    del runner, table, program
    with pytest.raises(Exception, match="out of memory") as caught:
        llm.generate([[1, 2, 3]], use_tqdm=False)
    llm.close()
    assert caught.value.__cause__ is not None
    assert [ref for ref in arrays if ref() is not None] == []
