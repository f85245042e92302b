"""`AsyncLLMEngine`: vLLM's names, pauses and sleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from jaxserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from jaxserve.config import ProfilerConfig
from jaxserve.errors import EngineDeadError, PausedError, ValidationError
from tests.jaxserve.test_sdk import GREEDY, PROMPTS, SMALL

pytestmark = pytest.mark.slow  # each starts an engine

LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
Test = Callable[[AsyncLLMEngine], Awaitable[None]]


@pytest.fixture
def serve(model_folder: Any, tmp_path: Any) -> Callable[[Test], None]:
    """Runs a test with an engine."""

    def run(test: Test) -> None:
        async def main() -> None:
            args = AsyncEngineArgs(
                model=str(model_folder("llama_gqa")),
                enforce_eager=True,
                profiler_config=ProfilerConfig(torch_profiler_dir=str(tmp_path)),
                **SMALL,  # type: ignore[arg-type]
            )
            engine = AsyncLLMEngine.from_engine_args(args)
            try:
                await test(engine)
            finally:
                await engine.shutdown()

        asyncio.run(main())

    return run


async def last(stream: AsyncGenerator[RequestOutput, None]) -> Any:
    return [output async for output in stream][-1].outputs[0]


async def one(engine: AsyncLLMEngine, index: int, name: str = "") -> list[int]:
    prompt = TokensPrompt(prompt_token_ids=PROMPTS[index])
    done = await last(engine.generate(prompt, GREEDY, f"{name}{index}"))
    return done.token_ids


def test_it_gives_the_tokens_of_an_llm(serve, model_folder) -> None:
    folder = str(model_folder("llama_gqa"))
    with LLM(folder, enforce_eager=True, **SMALL) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    want = [out.outputs[0].token_ids for out in outputs]

    async def test(engine: AsyncLLMEngine) -> None:
        assert await asyncio.gather(*map(partial(one, engine), range(len(PROMPTS)))) == want
        await engine.check_health()
        assert engine.is_running and not engine.errored
        assert engine.model_config.max_model_len == 64
        assert engine.vllm_config.model_config.hf_config.model_type == "llama"
        streams = [engine.generate(PROMPTS[0], LONG, name) for name in "abc"]
        for stream in streams:
            await anext(stream)
        await engine.abort("a")
        await engine.abort(["b", "c"])
        assert [(await last(stream)).finish_reason for stream in streams] == ["abort"] * 3
        await engine.shutdown()
        with pytest.raises(EngineDeadError):
            await engine.check_health()

    serve(test)


def test_requests_stand_still_and_go_on(serve) -> None:
    async def test(engine: AsyncLLMEngine) -> None:
        want = (await last(engine.generate(PROMPTS[0], LONG, "alone"))).token_ids
        stream = engine.generate(PROMPTS[0], LONG, "r")
        await anext(stream)
        found = asyncio.create_task(last(stream))
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused() and not found.done()
        behind = asyncio.create_task(one(engine, 1))
        steps = engine.engine.metrics.stats.num_steps
        for _ in range(3):
            await engine.engine.settle()
        assert engine.engine.metrics.stats.num_steps == steps, "nothing ran"
        await engine.resume_generation()
        assert (await found).token_ids == want and len(await behind) == 6
        assert not await engine.is_paused()

    serve(test)


def test_requests_end_before_a_pause_and_none_begin(serve) -> None:
    async def test(engine: AsyncLLMEngine) -> None:
        running = asyncio.create_task(last(engine.generate(PROMPTS[0], LONG, "aborted")))
        while not engine.engine.live_requests:
            await asyncio.sleep(0)
        await engine.pause_generation()
        with pytest.raises(PausedError, match="paused"):
            await one(engine, 0)
        await engine.resume_generation()
        with suppress(PausedError):  # it had not begun
            assert (await running).finish_reason == "abort"
        stream = engine.generate(PROMPTS[0], LONG, "waited for")
        await anext(stream)
        found = asyncio.create_task(last(stream))
        await engine.pause_generation(mode="wait", clear_cache=False)
        assert found.done() and found.result().finish_reason == "length"
        with pytest.raises(ValidationError, match="one of abort, wait, keep"):
            await engine.pause_generation(mode="freeze")

    serve(test)


def test_it_sleeps_and_goes_on(serve) -> None:
    async def test(engine: AsyncLLMEngine) -> None:
        want = await one(engine, 0)
        for level in (1, 2):
            stream = engine.generate(PROMPTS[0], LONG, f"cut off by {level}")
            await anext(stream)
            await engine.sleep(level)
            assert await engine.is_sleeping() and (await last(stream)).finish_reason == "abort"
            with pytest.raises(PausedError, match="sleeps"):
                await one(engine, 0)
            with pytest.raises(ValidationError, match="wake_up"):
                await engine.resume_generation()
            assert not await engine.wake_up(["weights"])
            assert await engine.wake_up() and not await engine.is_sleeping()
            assert await one(engine, 0) == want
        with pytest.raises(ValidationError, match=r"engine='running'.*sleep\(0"):
            await engine.release_kv_cache_memory()
        await engine.sleep(level=0, mode="keep")
        with pytest.raises(ValidationError, match=r"paused by 'keep'.*sleep\(0"):
            await engine.release_kv_cache_memory()
        await engine.sleep(level=0)
        assert await engine.is_paused() and not await engine.is_sleeping()
        await engine.release_kv_cache_memory()
        assert await engine.is_sleeping() and not await engine.wake_up(["scheduling"])
        assert await engine.wake_up(["kv_cache"]) and not await engine.is_paused()
        await engine.reset_mm_cache()
        assert await one(engine, 0) == want
        for level, mode, field in ((3, "abort", "level=3"), (1, "keep", "mode='keep'")):
            with pytest.raises(ValidationError, match=field):
                await engine.sleep(level, mode)
        assert not await engine.is_paused()

    serve(test)


def test_what_else_scripts_ask_of_it(serve, tmp_path) -> None:
    async def test(engine: AsyncLLMEngine) -> None:
        for given in (
            {"profile_prefix": "../a"},
            {"max_iterations": 1},
            {"profiler_kwargs": {1: 1}},
        ):
            with pytest.raises(ValidationError, match=next(iter(given))):
                await engine.start_profile(**given)
        with pytest.raises(ValidationError, match="start_profile"):
            await engine.stop_profile()
        await engine.start_profile("one")
        with pytest.raises(ValidationError, match="one record at a time"):
            await engine.start_profile("two")
        cut = {"truncate_prompt_tokens": 2}
        stream = engine.generate(PROMPTS[0], GREEDY, "r", tokenization_kwargs=cut)
        assert [output async for output in stream][-1].prompt_token_ids == PROMPTS[0][-2:]
        assert (await engine.stop_profile()).is_relative_to(tmp_path / "one")
        for ask in (engine.get_tokenizer, lambda: engine.tokenizer):
            with pytest.raises(ValidationError, match="skip_tokenizer_init"):
                ask()
        with pytest.raises(ValidationError, match=r"collective_rpc.*features"):
            await engine.collective_rpc("reset")
        await engine.do_log_stats()
        running = asyncio.create_task(one(engine, 1))
        while not engine.get_num_unfinished_requests():
            await asyncio.sleep(0)
        await running
        assert engine.get_num_unfinished_requests() == 0
        adapter = LoRARequest("a", 1, "/a")
        for stream in (
            engine.generate(PROMPTS[0], GREEDY, "r", lora_request=adapter),
            engine.encode(PROMPTS[0], PoolingParams(), "r", adapter),
        ):
            with pytest.raises(ValidationError, match="no adapters yet"):
                await anext(stream)
        with pytest.raises(ValidationError, match="kv_hints=1"):
            await anext(engine.generate(PROMPTS[0], GREEDY, "r", kv_hints=1, trace_headers=None))

    serve(test)
