"""A grammar that fails in the engine ends its request, and no other."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

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


def test_a_grammar_that_does_not_compile_ends_its_request_alone() -> None:
    futures: list[Future[Any]] = []

    def start(text: str) -> Future[Any]:
        futures.append(Future())
        return futures[-1]

    compiler = SimpleNamespace(start=start, num_words=1, close=lambda: None)
    compiling = Compiling(compiler)  # type: ignore[arg-type]
    compiling.add(added("waits"))
    compiling.add(added("fails"))
    assert not compiling.take()
    futures[1].set_exception(MemoryError())
    (failed,) = compiling.take()
    assert failed.added.sequence_ids == ["fails"] and failed.grammar is not None
    state = failed.grammar.begin()
    words = np.zeros(1, np.uint32)
    state.allow([], words)
    assert state.error is not None and words[0] == 1 << 2
    request: Any = SimpleNamespace(budget=None, grammar=state)
    seen = SeenTokens([request], [2], [0], {0: End(FinishReason.STOP, None)})
    Forcing(scheduler=None).go_on(seen)  # type: ignore[arg-type]
    assert seen.ends[0].reason is FinishReason.NOT_COMPILED, "which is no fault of the request"
    assert compiling  # the other one waits
    futures[0].set_result(None)
    assert [one.added.sequence_ids for one in compiling.take()] == [["waits"]]
