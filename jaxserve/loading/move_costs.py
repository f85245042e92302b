"""Whether cached pages are sooner moved back into the device or computed again, as it measures."""

from __future__ import annotations

import time

import jax
import numpy as np

from jaxserve.boundary.messages import AddGroup
from jaxserve.engine.loop import Engine
from jaxserve.execution.host_pages import BACK, MOVES, SIZE
from jaxserve.execution.runner import Runner
from jaxserve.memory.host_tier import MoveCosts
from jaxserve.memory.manager import PageUpdate
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.plan import StepPlan

NAME = "move costs"
ENOUGH_S = 1.0  # of steps; the least of them counts
MOST_STEPS = 3
TRIES = 3  # of a call that moves pages


def measure_costs(engine: Engine) -> MoveCosts:
    """What an engine that has served nothing yet takes to move pages, and to compute them.

    It computes a chunk of a prompt, as long as a step may have, without a request that anybody
    hears of: padding costs some kernels nothing, so an idle step would say too little. What the
    chunk leaves in pages is not known to the prefix cache.
    """
    runner, scheduler = engine.runner, engine.scheduler
    num_tokens = min(runner.max_prefill_tokens, scheduler.limits.max_model_len - 1)
    rule = StopRule(frozenset(), frozenset(), 0, 1)
    asked = AddGroup([NAME], [0], [0] * (num_tokens + 1), SamplingParams(), rule, [], Queueing(0.0))
    request = Request(NAME, asked)
    engine.features.prepare(request)
    seconds: list[float] = []
    while len(seconds) < MOST_STEPS and sum(seconds) < ENOUGH_S:
        plan = StepPlan()
        rows = plan.rows
        rows.requests, rows.slots, rows.starts, rows.lengths = [request], [0], [0], [num_tokens]
        plan.tokens[0] = np.zeros(num_tokens, np.int32)
        places = range(scheduler.pages.pages_for(num_tokens))
        plan.page_updates = [PageUpdate(0, place, 1 + place) for place in places]
        begin = time.monotonic()
        runner.fetch(runner.dispatch(plan))
        seconds.append(time.monotonic() - begin)
    engine.features.ended(NAME)
    groups, page_size = scheduler.pages.groups, scheduler.pages.page_size
    # of the pages that the groups of layers have for the same tokens each has its part
    page_seconds = min(seconds) / (num_tokens / page_size * groups.num_groups)
    most_spared = groups.most_spared(scheduler.limits.max_model_len, page_size)
    return MoveCosts(MOVES, _seconds_of_moves(runner), page_seconds, most_spared)


def _seconds_of_moves(runner: Runner) -> float:
    """What it takes to move as many pages back as one call does: trash pages."""
    seconds = []
    for _ in range(TRIES):
        begin = time.monotonic()
        runner.run(BACK, np.zeros(SIZE, np.int32))
        jax.block_until_ready(runner.state)
        seconds.append(time.monotonic() - begin)
    return min(seconds)
