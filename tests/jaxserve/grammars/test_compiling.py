"""A grammar that takes too long in the engine ends its request, and nobody else's."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxserve.grammars.compiler import COMPILE_SECONDS
from jaxserve.grammars.compiling import Compiling
from jaxserve.grammars.forcing import Forcing
from jaxserve.request import End, FinishReason
from jaxserve.scheduling.plan import SeenTokens


def added(name: str) -> Any:
    rule = SimpleNamespace(eos_token_ids=frozenset([2]))
    params = SimpleNamespace(thinking_token_budget=None)
    return SimpleNamespace(
        grammar="g", thoughts=None, sequence_ids=[name], stop_rule=rule, params=params
    )


def test_the_time_of_a_grammar_begins_with_its_thread() -> None:
    futures: list[Future[Any]] = []

    def start(text: str) -> Future[Any]:
        futures.append(Future())
        return futures[-1]

    clock = [0.0]
    compiler = SimpleNamespace(start=start, num_words=1, close=lambda: None, is_loaded=False)
    compiling = Compiling(compiler, lambda: clock[0])  # type: ignore[arg-type]
    compiling.add(added("waits"))
    compiling.add(added("runs"))
    futures[1].set_running_or_notify_cancel()
    assert not compiling.take()
    clock[0] = 2 * COMPILE_SECONDS
    assert not compiling.take(), "the tokenizer is being loaded"
    compiler.is_loaded = True
    assert not compiling.take()
    clock[0] += COMPILE_SECONDS + 1
    (late,) = compiling.take()
    assert late.added.sequence_ids == ["runs"]
    state = late.grammar.begin()
    words = np.zeros(1, np.uint32)
    state.allow([], words)
    assert state.error is not None and words[0] == 1 << 2
    request: Any = SimpleNamespace(budget=None, grammar=state)
    seen = SeenTokens([request], [2], [0], {0: End(FinishReason.STOP, None)})
    Forcing(scheduler=None).go_on(seen)  # type: ignore[arg-type]
    assert seen.ends[0].reason is FinishReason.NOT_COMPILED, "which is no fault of the request"
    assert compiling  # the other one waits for a thread
    futures[0].set_running_or_notify_cancel()
    futures[0].set_result(None)
    assert [one.added.sequence_ids for one in compiling.take()] == [["waits"]]
