"""Two engines of the bundled model: the tokens of one, and what routing by prefixes is worth."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import LLM
from jaxserve.async_engine import AsyncEngine
from jaxserve.boundary.messages import PageStats
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.isolation.routing import Routing
from jaxserve.params.sampling_params import SamplingParams

SIZES: dict[str, Any] = {
    "model": str(bundled_model_path()),
    "max_num_seqs": 4,
    "max_model_len": 256,
    "block_size": 8,
    "num_pages": 65,
    "max_num_batched_tokens": 64,
    "compile_ahead": 2,
    "compile_in_background": False,
}
PROMPTS = [[5 + index, *range(6, 30 + index)] for index in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


async def started() -> AsyncEngine:
    engine = AsyncEngine(EngineConfig(**SIZES, data_parallel_size=2), isolation=Isolation())
    await engine.wait_ready()
    client: Any = engine.client
    while not all(one.is_ready for one in client._engines):
        await asyncio.sleep(0.02)
    return engine


async def tokens(engine: AsyncEngine, prompt: list[int], name: str, params: Any) -> list[int]:
    found = [output async for output in engine.generate(prompt, params, name)]
    return [*found[-1].outputs[0].token_ids]


@pytest.mark.slow
def test_two_engines_give_the_tokens_of_one() -> None:
    llm = LLM(**SIZES)
    expected = [[*one.outputs[0].token_ids] for one in llm.generate(PROMPTS, GREEDY)]
    llm.close()

    async def main() -> None:
        engine = await started()
        asked = [tokens(engine, one, f"r{at}", GREEDY) for at, one in enumerate(PROMPTS)]
        assert await asyncio.gather(*asked) == expected
        steps = [one.stats().num_steps for one in engine.client._engines]  # type: ignore[union-attr]
        assert min(steps) > 0, "both have served"
        await engine.shutdown()

    asyncio.run(main())


async def conversations(engine: AsyncEngine) -> PageStats:
    """What the prefix caches were asked for and had, of conversations that take turns."""
    chance = random.Random(5)
    talks = [[1 + one, *chance.choices(range(5, 200), k=40)] for one in range(8)]
    names = itertools.count()
    await engine.reset_prefix_cache()
    await engine.settle()
    before = engine.client.stats().pages
    for _ in range(5):
        chance.shuffle(talks)

        async def turn(talk: list[int]) -> None:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            talk += await tokens(engine, talk, f"t{next(names)}", params)
            talk += chance.choices(range(5, 200), k=12)

        for first in range(0, len(talks), 2):
            await asyncio.gather(*[turn(talk) for talk in talks[first : first + 2]])
    await engine.settle()
    after = engine.client.stats().pages
    return after._replace(
        num_queried=after.num_queried - before.num_queried,
        num_found=after.num_found - before.num_found,
    )


@pytest.mark.slow
def test_routing_by_prefixes_finds_more_than_turns(monkeypatch) -> None:
    async def main() -> None:
        engine = await started()
        routed = await conversations(engine)
        turns = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(Routing, "choose", lambda *args, **kwargs: next(turns) % 2)
            by_turns = await conversations(engine)
        shares = [one.num_found / one.num_queried for one in (routed, by_turns)]
        print(f"prompt tokens found: {shares[0]:.1%} routed, {shares[1]:.1%} by turns")
        assert shares[0] > 1.2 * shares[1]
        await engine.shutdown()

    asyncio.run(main())
