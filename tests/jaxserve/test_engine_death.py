"""A step that fails takes the device state with it: all callers get the same error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from checkpoints import bundled_model_path
from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.async_engine import AsyncEngine
from jaxserve.engine.loop import Engine
from jaxserve.errors import EngineDeadError
from jaxserve.execution.programs import Program
from jaxserve.loading.engine_build import load_engine

SIZES: dict[str, Any] = {
    "model": str(bundled_model_path()),
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "num_pages": 20,
    "compile_ahead": 2,
    "compile_in_background": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Lost:
    """The result of a step that fails on the device after it was dispatched."""

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return True

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("illegal address")


def test_a_drain_waits_for_requests_that_are_still_on_their_way() -> None:
    entering = [True, True, True, False]

    async def main() -> bool:
        engine = AsyncEngine(EngineConfig(**SIZES), start=False)
        return await engine.drain(10.0, lambda: entering.pop(0) if entering else False)

    assert asyncio.run(main()) and not entering


def fail_dispatch(engine: Engine) -> None:
    """Let the next compiled call fail."""

    def call(*operands: Any) -> Any:
        raise RuntimeError("out of memory")

    replace_call(engine, lambda program: call)


def fail_fetch(engine: Engine) -> None:
    """Let the next step fail while it runs, which shows when its result is fetched."""

    def failing(program: Program) -> Callable[..., Any]:
        return lambda *operands: (program.call(*operands)[0], Lost(), {})

    replace_call(engine, failing)


def replace_call(engine: Engine, change: Callable[[Program], Callable[..., Any]]) -> None:
    table = engine.runner.programs
    for program in table.programs:
        table.substitute(program.layout.shape, program._replace(call=change(program)))


def engines_made(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that threads of their own own from now on, for tests that break them."""
    made: list[Engine] = []

    def load(config: EngineConfig) -> Any:
        loaded = load_engine(config)
        made.append(loaded.engine)
        return loaded

    monkeypatch.setattr("jaxserve.client.thread_client.load_engine", load)
    return made


FAILURES = {"dispatch": (fail_dispatch, "out of memory"), "fetch": (fail_fetch, "illegal address")}


@pytest.fixture(
    params=[
        pytest.param(True, id="overlap"),
        pytest.param(False, id="serial", marks=pytest.mark.slow),
    ]
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(**SIZES, overlap=request.param)
    yield llm
    llm.close()


def check(error: EngineDeadError, reason: str) -> None:
    assert reason in str(error) and "make a new" in str(error)
    assert isinstance(error.__cause__, RuntimeError) and reason in str(error.__cause__)


@pytest.mark.slow
@pytest.mark.parametrize("where", FAILURES)
def test_a_failed_step_is_one_clear_error_then_and_ever_after(llm: LLM, where: str) -> None:
    fail, reason = FAILURES[where]
    fail(llm.client.engine)
    state = llm.client.engine.runner.state
    for _ in range(3):
        with pytest.raises(EngineDeadError) as caught:
            llm.generate([[1, 2, 3], [4, 5]], GREEDY, use_tqdm=False)
        check(caught.value, reason)
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    freed = [array.is_deleted() for array in jax.tree.leaves(state)]
    assert all(freed), "what is of no use holds no memory"
    prepared = llm.client.prepare([1, 2], GREEDY, "late")
    for use in (lambda: llm.client.add(prepared), llm.client.outputs):
        with pytest.raises(EngineDeadError, match=reason):
            use()


@pytest.mark.slow
def test_an_interrupt_inside_the_call_is_told_to_the_next_one(llm: LLM) -> None:
    def interrupted(*operands: Any) -> Any:
        raise KeyboardInterrupt

    replace_call(llm.client.engine, lambda program: interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)


@pytest.mark.slow
def test_an_interrupt_while_a_step_is_waited_for_costs_only_that_call(
    llm: LLM, monkeypatch
) -> None:
    expected = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    def interrupted(step: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.client.engine.runner, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    again = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert again[0].outputs[0].token_ids == expected


@pytest.mark.slow
def test_a_closed_engine_says_so() -> None:
    llm = LLM(**SIZES)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match=r"was closed.*make a new"):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("where", FAILURES)
def test_the_asyncio_front_tells_all_requests(where: str, caplog, monkeypatch) -> None:
    fail, reason = FAILURES[where]
    made = engines_made(monkeypatch)

    async def main() -> None:
        engine = AsyncEngine(EngineConfig.from_settings(**SIZES))
        await engine.wait_ready()

        async def collect(name: str) -> None:
            async for _ in engine.generate([1, 2, 3], GREEDY, name):
                pass

        await collect("good")
        fail(made[0])
        tasks = [asyncio.create_task(collect(name)) for name in ("a", "b", "c")]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineDeadError) as late:
            await collect("late")
        for error in (*errors, late.value):
            assert isinstance(error, EngineDeadError)
            check(error, reason)
        assert engine.is_dead and not engine.is_ready
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match=reason):
            await collect("after the shutdown")

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "the engine thread ended" in caplog.text and reason in caplog.text
