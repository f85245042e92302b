"""An engine is asked for tokens of its own before it says that it is there."""

from __future__ import annotations

from collections import deque

import pytest

from checkpoints import bundled_model_path
from jaxserve import EngineConfig
from jaxserve.boundary.messages import AddGroup, EngineStats, PageStats, StepOutput
from jaxserve.boundary.step_times import StepTimes
from jaxserve.errors import EngineDeadError
from jaxserve.isolation.probe import MOST_TOKENS, probe
from jaxserve.loading.engine_build import load_engine

STATS = EngineStats(0, 0, 0.0, 0, 0, 1, StepTimes(), PageStats())


class FakeEngine:
    """Gives so many tokens a step."""

    def __init__(self, tokens: list[int]):
        self.asked: list[AddGroup] = []
        self._steps = deque(tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._steps)

    def handle(self, message) -> None:
        self.asked.append(message)

    def step(self):
        count = self._steps.popleft()
        return StepOutput(["probe"] * count, [1] * count, {}, {}, {}, {}, STATS)


@pytest.mark.parametrize(("context", "tokens"), [(512, [0, 1, 1]), (2, [1])])
def test_it_is_as_new_afterwards(context: int, tokens: list[int]) -> None:
    engine = FakeEngine(tokens)
    probe(engine, context)  # type: ignore[arg-type]
    (asked,) = engine.asked
    assert len(asked.prompt_token_ids) + asked.stop_rule.max_tokens <= context


def test_one_that_gives_nothing_cannot_serve() -> None:
    with pytest.raises(EngineDeadError, match=f"0 tokens where {MOST_TOKENS}"):
        probe(FakeEngine([0, 0]), 512)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_real_engine_serves_it_and_shows_when_a_step_fails(monkeypatch) -> None:
    config = EngineConfig(
        model=str(bundled_model_path()),
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_pages=20,
        compile_ahead=1,  # the program that serves any step
        compile_in_background=False,
    )
    engine = load_engine(config).engine
    probe(engine, 64)
    assert not engine.has_work and engine.stats().num_steps >= MOST_TOKENS
    monkeypatch.setattr(engine.runner, "fetch", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe(engine, 64)
