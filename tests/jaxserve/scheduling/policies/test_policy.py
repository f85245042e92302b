"""Policies that the tests bring along: the scheduler takes them as they are."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings

from jaxserve.config.engine_config import SCHEDULING_POLICIES, EngineConfig
from jaxserve.request.request import Request
from jaxserve.scheduling.policies import FirstComeFirstServed, Length, Policy, Priority, make_policy
from tests.jaxserve.scheduling.test_scheduler import (
    Run,
    Workload,
    make_request,
    names,
    simple,
    start,
    step,
    workloads,
)


class LastComeFirstServed(FirstComeFirstServed):
    """One method is all that an order takes."""

    def key(self, request: Request) -> int:
        return -request.order


class FewestLeft:
    """Who has the fewest tokens left to compute: an order that changes, so nothing is inherited."""

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}

    def rank(self, num_prompt: int, priority: int, num_output: int = 0) -> int:
        return num_prompt

    def key(self, request: Request) -> int:
        return request.order

    def push(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def discard(self, request: Request) -> None:
        self._waiting.pop(request.request_id, None)

    def peek(self, fits: Callable[[Request], bool]) -> Request | None:
        return min(self._waiting.values(), key=self._left, default=None)

    def lets_pass(self, request: Request) -> bool:
        return True

    def requests(self) -> list[Request]:
        return list(self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def arrange(self, prefilling: list[Request]) -> tuple[list[Request], list[Request]]:
        if self._waiting:
            return [], sorted(prefilling, key=self._left)
        return sorted(prefilling, key=self._left), []

    def computes(self, request: Request, num_tokens: int) -> None: ...

    def entered(self, request: Request) -> None: ...

    def left(self, request: Request) -> None: ...

    @staticmethod
    def _left(request: Request) -> tuple[int, int]:
        return request.num_tokens - request.num_computed, request.order


def test_names_of_policies() -> None:
    kinds = [
        type(make_policy(EngineConfig(model="m", scheduling_policy=name)))
        for name in SCHEDULING_POLICIES
    ]
    assert kinds == [FirstComeFirstServed, Priority, Length]


def test_an_order_is_one_method() -> None:
    scheduler, device = start(simple(policy=LastComeFirstServed, max_num_seqs=1))
    for name in "abc":
        scheduler.add(make_request(name, [5, 6], 1))
    assert [names(step(scheduler, device))[1] for _ in range(3)] == [["c"], ["b"], ["a"]]


def test_a_policy_arranges_running_and_waiting_requests() -> None:
    policy: Policy = FewestLeft()
    scheduler, device = start(simple(policy=lambda: policy, token_budget=6, max_prefill=6))
    scheduler.add(make_request("long", [5] * 20, 1))
    step(scheduler, device)
    scheduler.add(make_request("short", [6] * 4, 1))
    plan = step(scheduler, device)
    assert (names(plan)[1], plan.rows.lengths) == (["short", "long"], [4, 2])


@settings(max_examples=30, deadline=None)
@given(workloads)
def test_whatever_the_policy_tokens_and_pages_are_right(workload: Workload) -> None:
    for policy in (LastComeFirstServed, FewestLeft):
        run = Run(Workload(**(vars(workload) | {"policy": policy}))).to_the_end()
        assert run.scheduler.pages.pool.num_used == 0 and len(run.scheduler.waiting) == 0
