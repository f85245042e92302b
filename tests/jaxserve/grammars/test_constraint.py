"""A grammar that fails in the engine ends its request, and no other."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from jaxserve.engine.waiting_room import WaitingRoom
from jaxserve.execution.features.feature import Facts, Host, TakenStep
from jaxserve.execution.features.mask import Mask
from jaxserve.grammars.masks import GrammarMasks
from jaxserve.request.stop_rule import End, FinishReason, StopRule
from jaxserve.scheduling.plan import SeenTokens
from tests.jaxserve.requests import make_request

RULE = StopRule(frozenset({2}), frozenset(), 0, 9)

NO_STEP: Any = None


def test_a_grammar_that_does_not_compile_ends_its_request_alone() -> None:
    futures: list[Future[Any]] = []

    def start(text: str) -> Future[Any]:
        futures.append(Future())
        return futures[-1]

    compiler: Any = SimpleNamespace(start=start, num_words=1, close=lambda: None)
    mask, waiting = Mask(Facts(32, 1)), WaitingRoom()
    mask.serve(Host(compiler, *[lambda *given: None] * 4))
    requests = [make_request(name, [1], rule=RULE, grammar="g") for name in ("waits", "fails")]
    for one in requests:
        begun = mask.begins(one.asked)
        assert begun is not None
        waiting.add(one.asked, {mask.name: begun})
    assert not waiting.take()
    futures[1].set_exception(MemoryError())
    (failed,) = waiting.take()
    assert failed.asked.sequence_ids == ["fails"] and not failed.aborted
    request = requests[1]
    request.shared = {mask.name: failed.begun[mask.name].result()}
    state = mask.own(request)
    assert state is not None and state.grammar is not None
    request.own = {mask.name: state}
    ((word,),) = GrammarMasks().fill([state.grammar], [[]], 1)
    assert state.grammar.error is not None and word == 1 << 2
    seen = SeenTokens([request], [2], [0], {0: End(FinishReason.STOP, None)})
    mask.took(TakenStep(seen, {}, {}, [], NO_STEP))
    assert seen.ends[0].reason is FinishReason.NOT_COMPILED, "which is no fault of the request"
    assert waiting  # the other one waits
    assert waiting.abort("waits") and not waiting.abort("fails")
    futures[0].set_exception(MemoryError())
    assert [(one.asked.sequence_ids, one.aborted) for one in waiting.take()] == [
        (["waits"], {"waits"})
    ]
    assert not waiting
