"""A request that waits for pages keeps no other client's from beginning, and is not kept either."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from jaxserve.request.request import Request, RequestState
from jaxserve.scheduling.client_turns import LOOKS, ClientTurns
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policies import FirstComeFirstServed
from jaxserve.scheduling.scheduler import Scheduler
from tests.jaxserve.scheduling.fake_device import FakeDevice
from tests.jaxserve.scheduling.test_client_turns import finish, full, sequences, slots_of
from tests.jaxserve.scheduling.test_scheduler import (
    MAX_LEN,
    VOCAB,
    Run,
    Workload,
    alone,
    simple,
    start,
    step,
    workloads,
)


def small_pool(**changes) -> tuple[Scheduler, FakeDevice]:
    """31 pages of a token each, for 8 slots; a whole prompt fits into a step."""
    base = {"max_num_seqs": 8, "page_size": 1, "spare_pages": 7, "max_lanes": 2}
    return start(simple(**(base | {"token_budget": 30, "max_prefill": 24} | changes)))


def waiting_for_pages() -> tuple[Scheduler, FakeDevice, Request]:
    """Two clients have 12 of 31 pages, and get 8 more; the request of a third one needs 23."""
    scheduler, device = small_pool()
    for client in "ab":
        scheduler.add(full(client, client, [ord(client) % 8] * 5, 5))
    step(scheduler, device)
    large = full("large", "c", [3] * 22, 2)
    scheduler.add(large)
    step(scheduler, device)
    assert slots_of(scheduler) == {"a": 1, "b": 1}
    return scheduler, device, large


def test_another_client_begins_in_the_step_in_which_it_comes() -> None:
    scheduler, device, large = waiting_for_pages()
    others = [full(name, name, [4], 2) for name in ("d", "e")]
    for request in others:
        scheduler.add(request)
    step(scheduler, device)
    assert [len(request.output_token_ids) for request in others] == [1, 1], "they wait for it"
    assert scheduler.short_of_pages is large, "though others have taken the lanes"
    finish(scheduler, device)
    assert scheduler.num_preemptions == 0, "there was time for all of it"


def test_those_that_began_beside_it_give_way_and_no_others() -> None:
    scheduler, device, large = waiting_for_pages()
    beside = full("beside", "d", [4] * 7, 17)
    scheduler.add(beside)
    while large.state is RequestState.WAITING:
        step(scheduler, device)
    assert (beside.num_preemptions, beside.state) == (1, RequestState.WAITING)
    assert scheduler.num_preemptions == 1
    finish(scheduler, device)
    assert beside.output_token_ids == alone([4] * 7, 17)[0]


def test_they_give_way_once() -> None:
    scheduler, device, large = waiting_for_pages()
    beside = full("beside", "d", [4] * 7, 17)
    beside.has_given_way = True
    scheduler.add(beside)
    while beside.state is not RequestState.FINISHED:
        assert large.state is RequestState.WAITING
        step(scheduler, device)
    step(scheduler, device)
    assert large.state is RequestState.RUNNING and scheduler.num_preemptions == 0


def test_a_client_that_is_ahead_in_the_line_does_not_give_way() -> None:
    scheduler, device = small_pool()
    for index in range(2):
        scheduler.add(full(f"a{index}", "a", [index + 1] * 4, 6))
    step(scheduler, device)
    scheduler.add(full("c", "c", [6], 6))
    step(scheduler, device)
    scheduler.add(full("large", "a", [3] * 22, 2))
    step(scheduler, device)
    assert scheduler.waiting.passed is not None
    scheduler.add(full("b", "b", [4] * 6, 16))
    step(scheduler, device)
    assert slots_of(scheduler) == {"a": 2, "b": 1, "c": 1}
    finish(scheduler, device)
    assert scheduler.num_preemptions == 0


def test_what_groups_hold_is_let_go_for_one_that_was_passed() -> None:
    scheduler, device = small_pool(max_num_seqs=2, caching=False)
    scheduler.add(sequences(400, "a", [1] * 12))
    for _ in range(2):
        step(scheduler, device)
    request = full("b", "b", [2] * 22, 1)
    scheduler.add(request)
    for _ in range(2 * MAX_LEN):
        step(scheduler, device)
        scheduler.check_integrity()
    assert request.state is RequestState.FINISHED


def test_a_client_behind_it_gets_room_from_one_with_many_slots() -> None:
    scheduler, device = small_pool(max_lanes=4)
    for index in range(4):
        scheduler.add(full(f"a{index}", "a", [index + 1] * 6))
    step(scheduler, device)
    for name, prompt in (("large", [5] * 18), ("short", [6] * 6)):
        scheduler.add(full(name, name, prompt))
    step(scheduler, device)
    assert slots_of(scheduler) == {"a": 3, "short": 1}
    finish(scheduler, device)


def test_siblings_pass_it_too() -> None:
    scheduler, device, _ = waiting_for_pages()
    scheduler.add(sequences(2, "d", [4]))
    step(scheduler, device)
    assert len(scheduler.plan().forks) == 1, "else the prompt is computed twice"


def test_prompts_that_are_being_computed_are_not_behind_those_that_pass_it() -> None:
    turns = ClientTurns(FirstComeFirstServed)
    large, started, ended, short = (full(name, name[0], [5] * 4) for name in ("b", "d", "c", "c2"))
    for order, request in enumerate((large, started, ended, short)):
        request.order = order
        turns.push(request)
    for request, served in ((started, 3), (ended, 9)):
        turns.entered(request)
        turns.discard(request)
        turns.computes(request, served)
    assert turns.arrange([started], lambda request: request is short) == ([started], [])
    assert turns.arrange([started], lambda request: request is large) == ([], [started])


def test_within_a_client_none_passes() -> None:
    scheduler, device, _ = waiting_for_pages()
    request = full("behind", "c", [4], 2)
    scheduler.add(request)
    step(scheduler, device)
    assert request.state is RequestState.WAITING


def test_one_that_was_passed_and_ends_leaves_nothing_behind() -> None:
    scheduler, device, large = waiting_for_pages()
    beside = full("beside", "d", [4] * 3, 2)
    scheduler.add(beside)
    step(scheduler, device)
    assert scheduler.waiting.passed is large and scheduler.waiting.beside() == [beside]
    scheduler.abort("large")
    assert scheduler.waiting.passed is None and scheduler.waiting.beside() == []
    finish(scheduler, device)


class OpenRun(Run):
    """Looks behind each plan for requests that could have begun in it.

    Attributes:
        num_passed: plans in which some began before one whose turn it was.
    """

    num_passed = 0
    preempted = 0

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        scheduler, w = self.scheduler, self.workload
        self.num_passed += len(scheduler.waiting.beside()) > 0
        before, self.preempted = self.preempted, scheduler.num_preemptions
        waiting = scheduler.waiting.requests()
        total = sum(plan.rows.lengths)
        prefilled = sum(plan.rows.lengths[plan.num_decode :])
        lanes = max(len(plan.tokens), len(plan.samples) - plan.num_decode)
        if (
            before != scheduler.num_preemptions
            or any(request.pending for request in waiting)
            or len(scheduler.running) == w.max_num_seqs
            or lanes == w.max_lanes
            or total == w.token_budget
            or prefilled == w.max_prefill
        ):
            return
        first: dict[str, Request] = {}
        for request in sorted(waiting, key=lambda r: r.order):
            first.setdefault(request.queueing.client, request)
        assert len(first) <= LOOKS
        assert all(map(scheduler.lacks_pages, first.values())), "it fits, and does not begin"


def of_clients(workload: Workload) -> Workload:
    """The same with four clients that are short of pages, and single sequences."""
    arrivals = [
        replace(arrival, client="abcd"[index % 4], n=1)
        for index, arrival in enumerate(workload.arrivals)
    ]
    return replace(
        workload,
        arrivals=arrivals,
        max_num_seqs=5,
        token_budget=30,
        max_prefill=20,
        max_lanes=4,
        page_size=min(workload.page_size, 4),
        spare_pages=workload.spare_pages % 4,
        num_drafts=0,
        caching=False,  # what a step computes makes room in the next one, where it can be found
        policy=FirstComeFirstServed,
    )


@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_whatever_fits_begins(examples: int) -> None:
    num_passed = 0

    @settings(max_examples=examples, deadline=None)
    @given(workloads.filter(lambda w: len(w.arrivals) > 4))
    def holds(workload: Workload) -> None:
        nonlocal num_passed
        run = OpenRun(of_clients(workload))
        run.to_the_end()
        num_passed += run.num_passed
        for request in run.requests:
            arrival = workload.arrivals[int(request.request_id.split(".")[0])]
            expected, _ = alone(arrival.prompt, arrival.max_tokens)
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
            assert len(request.output_token_ids) == len(expected) or arrival.abort_after is not None

    holds()
    assert num_passed or examples < 100, "else it was not put to the test"


@pytest.mark.parametrize("last", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_others_without_end_do_not_keep_it_waiting(last: int) -> None:
    """It waits for those that ran before it, and for those that have given way once already."""
    for seed in range(15, last):
        rng = random.Random(seed)
        others = [f"{index}" for index in range(rng.randint(2, 5))]
        scheduler, device = small_pool(
            page_size=rng.choice([1, 2, 4]),
            spare_pages=rng.randint(0, 8),
            max_num_seqs=rng.randint(3, 8),
        )
        large, since, number = None, 0, 0
        for now in range(200):
            waiting = {request.queueing.client for request in scheduler.waiting.requests()}
            for client in others:
                if client not in waiting:
                    prompt = [number % VOCAB] * rng.randint(1, 8)
                    scheduler.add(full(f"{number}", client, prompt, rng.randint(1, 12)))
                    number += 1
            if large is None or large.state is RequestState.FINISHED:
                large, since = full(f"large{now}", "large", [5] * rng.randint(16, 23), 1), now
                scheduler.add(large)
            step(scheduler, device)
            scheduler.check_integrity()
            assert now - since < 2 * MAX_LEN, f"seed {seed}: it starves"
