"""Pages that leave an engine for the host's memory come back bit for bit, on every runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.loop import Engine
from jaxserve.execution.control import CopyProgram
from jaxserve.execution.host_pages import BACK, OUT
from jaxserve.execution.runner import Command
from jaxserve.memory.host_tier import HostTier, MoveCosts
from jaxserve.memory.tier import Move
from jaxserve.request.request import Request
from jaxserve.scheduling.plan import Fork, StepPlan
from tests.jaxserve.loading.test_engine_plan import CASE, asked_for, built, decided_for
from tests.jaxserve.test_step_contract import finish, request

HOST_PAGES, PAGES = 24, 14


def engine_of(folder: Path, *, has_tier: bool, **settings: Any) -> Engine:
    decided = decided_for(asked_for(folder, num_pages=PAGES, **settings))
    cache = replace(decided.config.cache, num_host_pages=HOST_PAGES)
    decided = replace(decided, config=replace(decided.config, cache=cache))
    # the runner of the other one repeats moves, of which its tier does not know
    return built(decided, tier=None if has_tier else HostTier(HOST_PAGES))


def held(engine: Engine, prompt: list[int]) -> list[np.ndarray]:
    """What the full pages of a prompt hold on the device."""
    pages = engine.scheduler.pages.find(greedy(9, prompt))
    kv = engine.runner.state.kv
    layers = kv.pages.shape[0] // PAGES
    return [
        np.array(leaf)[[layer * PAGES + page for layer in range(layers) for page in pages]]
        for leaf in jax.tree.leaves(kv)
    ]


def greedy(number: int, prompt: list[int]) -> Request:
    return request(number, prompt, 6, temperature=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "kv_cache_dtype"), [(True, "auto"), (False, "int8")])
def test_a_prompt_is_found_again_after_its_pages_were_taken(
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    kv_cache_dtype: str,
) -> None:
    monkeypatch.setattr(MoveCosts, "pays", lambda self, *counts: True)
    folder = model_folder(CASE, num_hidden_layers=2)
    how = {"overlap": overlap, "kv_cache_dtype": kv_cache_dtype}
    first, second = (engine_of(folder, has_tier=tier, **how) for tier in (True, False))
    log: list[Command] = []
    first.runner.listen(log.append)
    prompt = [*range(3, 3 + 40)]  # five pages, of which the last one's end is computed
    (expected,) = finish(first, [greedy(0, prompt)])
    before = held(first, prompt)
    assert len(before[0]) and all(leaf.any() for leaf in before)
    finish(first, [greedy(number, [5 + number] * 45) for number in range(1, 5)])
    assert first.scheduler.pages.find(greedy(9, prompt)) == []
    while first.stats().pages.tiers.num_arriving:
        pass  # a page on its way is not found
    again = greedy(7, prompt)
    assert finish(first, [again]) == [expected] and again.num_cached == 32
    for was, now in zip(before, held(first, prompt), strict=True):
        assert was.dtype == now.dtype
        np.testing.assert_array_equal(was, now)
    assert {OUT, BACK} < {command.program for command in log}
    for _, program, operand in log:
        second.runner.run(program, np.frombuffer(operand.tobytes(), np.int32))
    for mine, its in zip(jax.tree.leaves(first.runner.state), jax.tree.leaves(second.runner.state)):
        np.testing.assert_array_equal(mine, its)
    # pages leave before a fork writes to them, and come back when it has read them
    del log[:]
    plan = StepPlan(forks=[Fork(0, 1, 5, [3], [4])])
    plan.moves = [Move(4, 0, leaves=True), Move(3, 1, leaves=False), Move(5, 2, leaves=True)]
    first.runner.dispatch(plan)
    assert [one.program for one in log[:-1]] == [OUT, CopyProgram.name, BACK, OUT]
    for engine in (first, second):
        engine.close()
