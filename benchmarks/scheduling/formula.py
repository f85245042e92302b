"""A trace on the simulated clock, where a formula says what a step takes: exact on any machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.scheduling.served import Served
from benchmarks.scheduling.trace import Item
from jaxserve.config.engine_config import EngineConfig
from jaxserve.observability.load_trace import TracedRequest
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.setting import find_model, settle
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.step_time import StepSeconds

SLOTS, BUDGET, LANES, CONTEXT, PAGES = 64, 512, 16, 2048, 4097


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step: a constant, and for each token computed."""

    step: float = 0.008
    token: float = 50e-6
    intake: float = 0.0
    handover: float = 0.0
    source: str = "a formula"

    def of(self, plan: StepPlan, num_pages: int) -> StepSeconds:
        return StepSeconds(self.step + self.token * sum(plan.rows.lengths), 0.0, 0.0)

    def first_delivery(self) -> float:
        return 0.0


def simulate(items: list[Item], policy: str, costs: Costs | None = None) -> list[Served]:
    """Serve a trace; a step's tokens are there when it is over, and then the next is planned."""
    asked = EngineConfig(
        model="llama-125m",
        scheduling_policy=policy,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=BUDGET,
        max_model_len=CONTEXT,
        num_pages=PAGES,
        overlap=False,
    )
    setting = settle(asked, find_model(asked)[0], DEVICES["cpu"])
    setting = replace(setting, limits=replace(setting.limits, max_lanes=LANES))
    requests = (TracedRequest(one.arrival, one.prompt_len, one.output_len) for one in items)
    served = Simulation(setting, costs or Costs()).run(requests)
    return [Served(*one) for one in zip(items, served.first, served.last)]
