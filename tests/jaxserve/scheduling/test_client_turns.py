"""Clients take turns: what one of them sends keeps no other from its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.client_turns import REMEMBERED, ClientTurns
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policies import FirstComeFirstServed, Policy
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.turns import Turns
from tests.jaxserve.scheduling.fake_device import FakeDevice
from tests.jaxserve.scheduling.test_scheduler import (
    MAX_BIAS,
    MAX_LEN,
    Run,
    Workload,
    make_request,
    names,
    num_bias_of,
    simple,
    start,
    step,
    workloads,
)


class PolicyAlone(ClientTurns):
    """Knows of no clients: one policy is asked and told all."""

    num_clients = 1  # type: ignore[assignment]

    def __init__(self, make: Callable[[], Policy]):
        self._policy: Any = make()
        self._with_slot: list[Request] = []
        for name in ("rank", "key", "push", "discard", "peek", "lets_pass", "requests"):
            setattr(self, name, getattr(self._policy, name))
        self.arrange = lambda prefilling, fits: self._policy.arrange(prefilling)
        self.computes = self._policy.computes
        self.passed = None

    def __len__(self) -> int:
        return len(self._policy)

    def entered(self, request: Request) -> None:
        self._with_slot.append(request)
        self._policy.entered(request)

    def left(self, request: Request) -> None:
        self._policy.left(request)
        self._with_slot.remove(request)

    def running(self) -> list[Request]:
        return sorted(self._with_slot, key=self._policy.key)

    def check_integrity(self, running: list[Request]) -> None:
        assert {*running} == {*self._with_slot}


@settings(max_examples=50, deadline=None)
@given(workloads)
def test_with_one_client_plans_are_those_of_its_policy(workload: Workload) -> None:
    arrivals = [replace(arrival, client="the only") for arrival in workload.arrivals]
    run, without = (Run(replace(workload, arrivals=arrivals)) for _ in range(2))
    scheduler = without.scheduler
    without.scheduler = Scheduler(
        scheduler.limits,
        scheduler.pages,
        PolicyAlone(workload.policy),
        [Turns(MAX_BIAS, num_bias_of)],
        workload.drafts_for,
    )
    assert run.to_the_end().plans == without.to_the_end().plans


class SharedRun(Run):
    """Looks at what clients hold behind each plan, while pages are never short.

    Attributes:
        uneven: plans in a row behind which a client that waits had two slots fewer than another.
    """

    uneven = 0

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        scheduler = self.scheduler
        held = Counter(request.queueing.client for request in scheduler.running)
        waiting = {request.queueing.client for request in scheduler.waiting.requests()}
        fewest = min((held[client] for client in waiting), default=10**6)
        self.uneven = self.uneven + 1 if max(held.values(), default=0) >= fewest + 2 else 0
        # of all that wait one has its slot a step, but for one whose token in flight is not known
        assert self.uneven <= 2 * len(self.workload.arrivals), "a client waits for its share"


@settings(max_examples=40, deadline=None)
@given(workloads)
def test_slots_are_shared_and_change_hands_no_oftener_than_requests_come(w: Workload) -> None:
    # enough for every slot: only turns make requests lose one
    pages = w.max_num_seqs * -(-MAX_LEN // w.page_size) * w.groups.num_groups
    run = SharedRun(replace(w, spare_pages=pages))
    run.to_the_end()
    assert run.scheduler.num_preemptions <= sum(arrival.n for arrival in w.arrivals)
    assert run.scheduler.waiting.num_clients == 0


def full(name: str, client: str, prompt: list[int], max_tokens: int = 20, **more: Any) -> Request:
    """A request that ends with no token but its last."""
    request = make_request(name, prompt, max_tokens, client=client, **more)
    most = request.stop_rule.max_tokens
    rule = StopRule(frozenset(), frozenset(), 0, most)
    request.asked = replace(request.asked, stop_rule=rule)
    return request


def sequences(n: int, client: str, prompt: list[int]) -> Request:
    """The first of a group of `n` sequences."""

    def make(name: str, seed: int, group: SequenceGroup | None) -> Request:
        return full(name, client, prompt, group=group)

    behind = {f"{client}{index}": 0 for index in range(n - 1, 0, -1)}
    return make(f"{client}0", 0, SequenceGroup(behind, make))


def slots_of(scheduler: Scheduler) -> dict[str, int]:
    return dict(Counter(request.queueing.client for request in scheduler.running))


def finish(scheduler: Scheduler, device: FakeDevice) -> None:
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()


def test_beside_a_thousand_sequences_a_request_has_its_first_token_in_the_next_step() -> None:
    scheduler, device = start(simple(max_num_seqs=8, spare_pages=90))
    scheduler.add(sequences(1024, "a", [5] * 4))
    for _ in range(3):
        step(scheduler, device)
    assert slots_of(scheduler) == {"a": 8}
    request = full("short", "b", [6] * 3)
    scheduler.add(request)
    step(scheduler, device)
    assert len(request.output_token_ids) == 1 and scheduler.num_preemptions == 1
    assert slots_of(scheduler) == {"a": 7, "b": 1}
    scheduler.check_integrity()


def test_a_sequence_that_gave_way_goes_on_with_its_tokens() -> None:
    scheduler, device = start(simple(max_num_seqs=4, spare_pages=90))
    first = sequences(4, "a", [5] * 4)
    scheduler.add(first)
    for _ in range(5):
        step(scheduler, device)
    youngest = scheduler.running[-1]
    scheduler.add(full("short", "b", [6] * 3, 9))
    finish(scheduler, device)
    assert youngest.num_preemptions == 1 and first.num_preemptions == 0
    assert youngest.output_token_ids == first.output_token_ids
    assert len(first.output_token_ids) == 20


def test_what_a_client_leaves_over_is_the_others() -> None:
    scheduler, device = start(simple(max_num_seqs=8, spare_pages=90, max_lanes=8))
    for client, n in (("a", 9), ("b", 9), ("c", 1)):
        scheduler.add(sequences(n, client, [ord(client) % 8] * 2))
        step(scheduler, device)
    for _ in range(4):
        step(scheduler, device)
    held = slots_of(scheduler)
    assert held.pop("c") == 1 and sorted(held.values()) == [3, 4]
    before = scheduler.num_preemptions
    for _ in range(5):
        step(scheduler, device)
    assert scheduler.num_preemptions == before, "at their shares nothing changes hands"


def test_siblings_do_not_jump_past_another_clients_request() -> None:
    scheduler, device = start(simple(max_num_seqs=3, max_lanes=2, spare_pages=90))
    scheduler.add(sequences(9, "a", [5] * 4))
    request = full("b0", "b", [6] * 4)
    scheduler.add(request)
    step(scheduler, device)
    assert slots_of(scheduler) == {"a": 1, "b": 1}
    step(scheduler, device)
    assert slots_of(scheduler) == {"a": 2, "b": 1}


def test_prompts_are_computed_by_turns() -> None:
    scheduler, device = start(simple(token_budget=6, max_prefill=6))
    scheduler.add(make_request("long", [5] * 23, 1, client="a"))
    step(scheduler, device)
    scheduler.add(make_request("short", [6] * 9, 1, client="b"))
    rows = [names(step(scheduler, device))[1] for _ in range(4)]
    assert rows == [["short"], ["long"], ["long"], ["short", "long"]]


@pytest.mark.parametrize("sizes", [((20, 1), (2, 1)), ((1, 20), (1, 2))])
def test_with_one_slot_clients_take_turns_by_tokens(sizes: tuple[tuple[int, int], ...]) -> None:
    scheduler, device = start(simple(max_num_seqs=1, token_budget=30, max_prefill=30))
    served: Counter[str] = Counter()
    number = 0
    for _ in range(400):
        waiting = {request.queueing.client for request in scheduler.waiting.requests()}
        for client, (prompt, output) in zip("ab", sizes):
            if client not in waiting:
                scheduler.add(full(f"{number}", client, [5] * prompt, output))
                number += 1
        plan = step(scheduler, device)
        for request, tokens in zip(plan.rows.requests, plan.rows.lengths):
            served[request.queueing.client] += tokens
    assert served["a"] == pytest.approx(served["b"], abs=40)


def test_new_clients_do_not_keep_one_that_waits_from_its_turn() -> None:
    scheduler, device = start(simple(max_num_seqs=2, spare_pages=90))
    for index in range(40):  # beside another client, so that it is served more than half
        if index % 8 == 0:
            scheduler.add(full(f"other{index}", "b", [7], 8))
        scheduler.add(make_request(f"{index}", [5] * 16, 1, client="a"))
        step(scheduler, device)
    scheduler.add(full("last", "b", [7], 23))
    request = make_request("waits", [5] * 16, 1, client="a")
    scheduler.add(request)
    index = 0
    while not request.output_token_ids:
        scheduler.add(make_request(f"new{index}", [6] * 4, 1, client=f"new{index}"))
        step(scheduler, device)
        index += 1
    assert 2 < index < 300


def test_the_victim_for_want_of_pages_is_of_the_client_with_the_most_slots() -> None:
    scheduler, device = start(
        simple(max_num_seqs=4, page_size=1, spare_pages=14, token_budget=24, max_prefill=24)
    )
    for name, client in (("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b")):
        scheduler.add(full(name, client, [ord(name[1]) % 8 + 1] * 5))
    order = []
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
        order += [request.request_id for request in scheduler.take_preempted()]
    assert order[0] == "a2", "the last to come is b0"


def waiting_for_pages(prompt: int) -> tuple[Scheduler, FakeDevice, Request]:
    """Four sequences of a client hold 28 of 31 pages and go on; another client's request comes."""
    scheduler, device = start(
        simple(max_num_seqs=8, page_size=1, spare_pages=7, token_budget=24, max_prefill=24)
    )
    for index in range(4):
        scheduler.add(full(f"a{index}", "a", [index + 1] * 6))
    step(scheduler, device)
    request = full("b", "b", [9] * prompt)
    scheduler.add(request)
    return scheduler, device, request


def test_a_client_above_its_share_gives_its_pages() -> None:
    scheduler, device, request = waiting_for_pages(8)
    step(scheduler, device)
    assert len(request.output_token_ids) == 1 and slots_of(scheduler) == {"a": 3, "b": 1}
    finish(scheduler, device)


def test_more_than_its_share_of_the_pages_a_client_gets_as_they_become_free() -> None:
    scheduler, device, _ = waiting_for_pages(18)
    step(scheduler, device)
    assert slots_of(scheduler) == {"a": 4} and scheduler.num_preemptions == 0
    finish(scheduler, device)


def test_clients_without_work_are_forgotten() -> None:
    scheduler, device = start(simple())
    for index in range(3 * REMEMBERED):
        scheduler.add(make_request(f"{index}", [5], 2, client=f"{index}"))
        while scheduler.has_unfinished:
            step(scheduler, device)
        scheduler.add(make_request("gone", [5], 2, client=f"{index}"))
        scheduler.abort("gone")
    turns: Any = scheduler.waiting
    assert turns.num_clients == 0 and not turns._changed and not turns._line
    assert len(turns._idle) == REMEMBERED
    assert not any(client.policy._queue._heap for client in turns._idle.values())


class Counted(FirstComeFirstServed):
    asked = 0

    def peek(self, fits: Callable[[Request], bool]) -> Request | None:
        Counted.asked += 1
        return super().peek(fits)

    def __len__(self) -> int:
        Counted.asked += 1
        return super().__len__()


@pytest.mark.parametrize("prompt, slots", [(1, 4), (20, 16)])
def test_a_step_does_not_go_through_the_clients(prompt: int, slots: int) -> None:
    """Neither where slots are short nor where pages are."""

    def asked(clients: int) -> int:
        scheduler, device = start(simple(policy=Counted, max_num_seqs=slots, caching=False))
        for index in range(clients):
            request = make_request(f"{index}", [5] * prompt, 20, client=f"{index}")
            scheduler.add(request)
        step(scheduler, device)
        Counted.asked = 0
        for _ in range(20):
            step(scheduler, device)
        return Counted.asked

    assert asked(40) == asked(2000)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), min_size=2, max_size=6))
def test_fair_shares_of_slots(wanted: list[tuple[str, int]]) -> None:
    """Max-min fair, whatever the order: none has fewer than another but for wanting no more."""
    scheduler, device = start(simple(max_num_seqs=6, max_lanes=6, spare_pages=90))
    for index, (client, count) in enumerate(wanted):
        for number in range(count):
            name = f"{index}.{number}"
            scheduler.add(full(name, client, [5]))
    for _ in range(3):
        step(scheduler, device)
    held, waiting = slots_of(scheduler), scheduler.waiting.requests()
    for request in waiting:
        assert held[request.queueing.client] >= max(held.values()) - 1
