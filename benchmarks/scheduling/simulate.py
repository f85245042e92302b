"""The scheduler on a device with a formula as clock: exact, whatever else the machine does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.scheduling.served import Served
from benchmarks.scheduling.trace import Item
from jaxserve.boundary.messages import AddGroup
from jaxserve.config.engine_config import EngineConfig
from jaxserve.memory.manager import PageManager
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policies import make_policy
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits

LIMITS = SchedulerLimits(
    max_num_seqs=64,
    max_num_batched_tokens=512,
    max_prefill_tokens=512,
    max_lanes=16,
    max_model_len=2048,
)
NUM_PAGES, PAGE_SIZE = 4097, 16


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step: a constant, and for each token computed."""

    step: float = 0.008
    token: float = 50e-6

    def of(self, plan: StepPlan) -> float:
        return self.step + self.token * sum(plan.rows.lengths)


def simulate(items: list[Item], policy: str, costs: Costs | None = None) -> list[Served]:
    """Serve a trace; a step's tokens are there when it is over, and then the next is planned."""
    costs = costs or Costs()
    config = EngineConfig(model="none", scheduling_policy=policy)
    turns = ClientTurns(partial(make_policy, config))
    scheduler = Scheduler(LIMITS, PageManager(NUM_PAGES, PAGE_SIZE), turns)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    now, coming = 0.0, 0
    while coming < len(items) or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, items[coming].arrival)
        while coming < len(items) and items[coming].arrival <= now:
            scheduler.add(_request(coming, items[coming]))
            coming += 1
        plan = scheduler.plan()
        now += costs.of(plan)
        seen = scheduler.commit(plan, [1] * len(plan.samples))
        for request in seen.requests:
            first.setdefault(request.request_id, now)
            last[request.request_id] = now
    scheduler.check_integrity()
    return [Served(item, first[str(i)], last[str(i)]) for i, item in enumerate(items)]


def _request(number: int, item: Item) -> Request:
    rule = StopRule(frozenset(), frozenset(), 0, item.output_len)
    # tokens of its own: nothing is to be found in the prefix cache
    prompt, name = [number] * item.prompt_len, str(number)
    return Request(name, AddGroup([name], [0], prompt, SamplingParams(), rule, [], Queueing(0.0)))
