"""One short request of an engine's own, before any client's: whether it can serve at all."""

from __future__ import annotations

import time

from jaxserve.engine.loop import Engine
from jaxserve.errors import EngineDeadError
from jaxserve.messages import AddGroup
from jaxserve.request import Queueing, StopRule
from jaxserve.sampling_params import SamplingParams

MOST_TOKENS = 2  # of the prompt, and of one that was generated
NAME = "probe"


def probe(engine: Engine, max_model_len: int) -> None:
    """Have an engine without work plan, pack, run and commit a few steps.

    Raises:
        EngineDeadError: it does not generate what was asked for; or whatever a step raises.
    """
    length = min(MOST_TOKENS, max_model_len - 1)
    group = AddGroup(
        [NAME],
        [0],
        [0],
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
        StopRule(frozenset(), frozenset(), 0, length),
        [],
        Queueing(time.monotonic()),
    )
    engine.handle(group)
    generated = 0
    while engine.has_work:
        generated += len(engine.step().tokens)
    if generated != length:
        raise EngineDeadError(f"the engine generates {generated} tokens where {length} were asked")
