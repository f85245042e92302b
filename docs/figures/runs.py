"""Runs of the real scheduler without a device: what the figures of paging and steps show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.boundary.messages import AddGroup
from jaxserve.memory.manager import PageManager
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits

PAGES, PAGE_SIZE, SLOTS = 21, 16, 3
TOKENS_A_STEP, CONTEXT = 16, 256


class Row(NamedTuple):
    """What a slot computes in a step."""

    name: str
    slot: int
    length: int
    is_prefill: bool


@dataclass
class Run:
    """A scheduler and the steps that it has planned, each with one row a slot."""

    scheduler: Scheduler
    page_size: int = PAGE_SIZE
    steps: list[list[Row]] = field(default_factory=list)

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        rule = StopRule(frozenset(), frozenset(), 0, max_tokens)
        asked = AddGroup([name], [0], [*prompt], SamplingParams(), rule, [], Queueing(0.0))
        self.scheduler.add(Request(name, asked))

    def step(self) -> None:
        plan = self.scheduler.plan()
        rows = zip(plan.rows.requests, plan.rows.slots, plan.rows.lengths)
        self.steps.append(
            [
                Row(request.request_id, slot, length, number >= plan.num_decode)
                for number, (request, slot, length) in enumerate(rows)
            ]
        )
        self.scheduler.commit(plan, [7] * len(plan.samples), None)


def _run(tokens_a_step: int) -> Run:
    limits = SchedulerLimits(SLOTS, tokens_a_step, tokens_a_step, SLOTS, CONTEXT)
    return Run(Scheduler(limits, PageManager(PAGES, PAGE_SIZE)))


def paging_run() -> Run:
    """Three sequences amid their outputs, of which two begin with the same 32 tokens."""
    run = _run(64)
    prefix = [*range(100, 132)]
    run.add("a", [*prefix, *range(200, 210)], 100)
    run.step()
    run.add("b", [*range(300, 320)], 100)
    for _ in range(7):
        run.step()
    run.add("c", [*prefix, *range(400, 405)], 100)
    for _ in range(11):
        run.step()
    return run


def scheduling_run() -> Run:
    """Five requests on three slots: chunks beside tokens, slots filled at once."""
    run = _run(TOKENS_A_STEP)
    run.add("A", range(100, 110), 6)
    run.add("B", range(200, 240), 5)
    run.add("C", range(300, 304), 9)
    run.add("D", range(400, 412), 6)
    run.add("E", range(500, 508), 4)
    while run.scheduler.has_unfinished:
        run.step()
    return run
