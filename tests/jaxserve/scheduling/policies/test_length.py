"""Short prompts first, by shares, and a bound on being overtaken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.request import Request, RequestState
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policies import Length, PolicyInputs
from jaxserve.scheduling.scheduler import Scheduler
from tests.jaxserve.scheduling.fake_device import FakeDevice
from tests.jaxserve.scheduling.test_scheduler import (
    MAX_LEN,
    Run,
    Workload,
    make_request,
    names,
    simple,
    start,
    step,
    workloads,
)


def length(max_overtaken_tokens: int = 10**6) -> Length:
    """Classes that prompts of up to 23 tokens fall into: below 4, below 12, the rest."""
    return Length((4, 12), (6, 3, 1), max_overtaken_tokens)


def started(policy: Length, **changes) -> tuple[Scheduler, FakeDevice]:
    return start(simple(policy=lambda: policy, **changes))


@pytest.mark.parametrize(
    ("tokens", "rank"), [(1, 0), (127, 0), (128, 1), (511, 1), (512, 2), (9999, 2)]
)
def test_classes_by_the_tokens_of_prompts(tokens: int, rank: int) -> None:
    assert Length().rank(tokens, 0) == rank


@pytest.mark.parametrize(
    ("asked", "rank"), [(1, 0), (4095, 0), (4096, 1), (32767, 1), (32768, 2), (10**9, 2)]
)
def test_much_output_makes_a_later_class(asked: int, rank: int) -> None:
    assert Length().rank(1, 0, asked) == rank
    assert Length().rank(512, 0, asked) == 2


def test_what_the_prefix_cache_holds_is_not_counted() -> None:
    found = {"known": 12}
    inputs = PolicyInputs(num_found=lambda request: found.get(request.request_id, 0))
    policy = Length((4, 12), (6, 3, 1), inputs=inputs)
    scheduler, device = started(policy, max_num_seqs=1)
    for name, size in (("first", 2), ("long", 14), ("middle", 6), ("known", 14)):
        scheduler.add(make_request(name, [5] * size, 1))
    found.clear()  # a class is kept
    begun = [names(step(scheduler, device))[1][0] for _ in range(4)]
    assert begun == ["first", "known", "middle", "long"]


def test_what_asks_for_much_output_waits_for_what_does_not() -> None:
    policy = Length((4, 12), (6, 3, 1), output_bounds=(8, 16))
    scheduler, device = started(policy, max_num_seqs=1)
    for name, asked in (("first", 1), ("most", 16), ("more", 8), ("little", 7)):
        request = make_request(name, [5, 6], 1)
        request.asked = replace(request.asked, params=SamplingParams(max_tokens=asked))
        scheduler.add(request)
    begun = [names(step(scheduler, device))[1][0] for _ in range(4)]
    assert begun == ["first", "little", "more", "most"]


@pytest.mark.parametrize(("busy", "ratio"), [(1.0, 6), (0.5, 6**0.5), (0.0, 1)])
def test_shares_count_the_more_the_busier_the_device_is(busy: float, ratio: float) -> None:
    policy = Length((4, 12), (6, 3, 1), inputs=PolicyInputs(device_busy=lambda: busy))
    requests = [make_request("short", [5] * 2, 1), make_request("long", [5] * 20, 1)]
    for order, request in enumerate(requests):
        request.order = order
        policy.push(request)
        policy.entered(request)
        policy.discard(request)
    computed = Counter[str]()
    for _ in range(700):  # whose turn it is has something computed, and none ends
        (first, *_), _ = policy.arrange(requests)
        policy.computes(first, 1000)
        computed[first.request_id] += 1
    assert computed["short"] / computed["long"] == pytest.approx(ratio, rel=0.05)


def test_a_short_prompt_overtakes_long_ones_that_wait() -> None:
    scheduler, device = started(length(), max_num_seqs=1)
    for name, size in (("first", 2), ("long", 14), ("middle", 6), ("short", 2)):
        scheduler.add(make_request(name, [5] * size, 1))
    begun = [names(step(scheduler, device))[1][0] for _ in range(4)]
    assert begun == ["first", "short", "middle", "long"]


def test_a_long_prompt_in_progress_gives_way_and_gets_what_is_left_over() -> None:
    scheduler, device = started(length(), token_budget=6, max_prefill=6)
    scheduler.add(make_request("long", [5] * 20, 1))
    assert names(step(scheduler, device))[1] == ["long"]
    scheduler.add(make_request("short", [6] * 2, 1))
    plan = step(scheduler, device)
    assert names(plan)[1] == ["short", "long"]
    assert plan.rows.lengths == [2, 4]


def test_a_long_prompt_with_all_slots_taken_loses_nothing_to_those_that_wait() -> None:
    scheduler, device = started(length(), max_num_seqs=1, token_budget=6, max_prefill=6)
    scheduler.add(make_request("long", [5] * 20, 1))
    step(scheduler, device)
    scheduler.add(make_request("short", [6] * 2, 1))
    plan = step(scheduler, device)
    assert (names(plan)[1], plan.rows.lengths) == (["long"], [6])


def test_classes_that_always_have_work_get_their_shares() -> None:
    scheduler, device = started(length(), max_num_seqs=3, token_budget=9, max_prefill=6)
    computed: Counter[int] = Counter()
    number = 0
    for _ in range(600):
        waiting = Counter(r.num_prompt for r in scheduler.waiting.requests())
        for size in (3, 9, 18):
            for _ in range(3 - waiting[size]):
                scheduler.add(make_request(f"{number}", [5] * size, 1))
                number += 1
        plan = step(scheduler, device)
        for request, tokens in zip(plan.rows.requests, plan.rows.lengths):
            computed[request.num_prompt] += tokens
    total = sum(computed.values())
    shares = [computed[size] / total for size in (3, 9, 18)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_a_pause_earns_nothing() -> None:
    policy = length()
    scheduler, device = started(policy, max_num_seqs=1)
    for index in range(50):
        scheduler.add(make_request(f"short{index}", [5] * 3, 1))
        step(scheduler, device)
    for name in ("long0", "long1"):
        scheduler.add(make_request(name, [5] * 18, 1))
    for name in ("s0", "s1", "s2"):
        scheduler.add(make_request(name, [5] * 3, 1))
    begun: list[str] = []
    while scheduler.has_unfinished:
        begun += [n for n in names(step(scheduler, device))[1] if n not in begun]
    assert begun.index("s2") < begun.index("long1"), "nothing is owed for the time before"


def test_who_does_not_fit_into_the_free_pages_lets_others_pass() -> None:
    scheduler, device = started(length(), page_size=1, spare_pages=0, max_prefill=24)
    scheduler.add(make_request("running", [5] * 10, 14))
    step(scheduler, device)
    scheduler.add(make_request("middle", [6] * 11, 1))
    scheduler.add(make_request("also middle", [6] * 5, 1))
    step(scheduler, device)
    scheduler.add(make_request("large", [7] * 14, 1))
    scheduler.add(make_request("small", [7] * 5, 1))
    seen = [names(step(scheduler, device))[1] for _ in range(3)]
    assert ["small"] in seen, "of another class than the one that does not fit"


def test_none_is_overtaken_beyond_the_bound() -> None:
    scheduler, device = started(length(9), max_num_seqs=1)
    scheduler.add(make_request("first", [5], 1))
    step(scheduler, device)
    scheduler.add(make_request("long", [5] * 14, 1))
    for index in range(9):
        scheduler.add(make_request(f"short{index}", [6, 6], 1))
    begun = [names(step(scheduler, device))[1][0] for _ in range(6)]
    assert begun == ["short0", "short1", "short2", "short3", "long", "short4"]


def test_prompts_that_are_half_computed_count_as_a_whole() -> None:
    scheduler, device = started(length(13), max_num_seqs=3, token_budget=4, max_prefill=4)
    scheduler.add(make_request("long", [5] * 20, 1))
    scheduler.add(make_request("middle", [5] * 11, 1))
    assert names(step(scheduler, device))[1] == ["middle"]
    scheduler.add(make_request("short", [6] * 3, 1))
    assert names(step(scheduler, device))[1] == ["long"]


class BoundRun(Run):
    """Counts, apart from the policy, what each request is served."""

    def __init__(self, workload: Workload, bound: int):
        arrivals = [replace(arrival, client="") for arrival in workload.arrivals]
        workload = replace(workload, arrivals=arrivals, num_drafts=0)
        super().__init__(replace(workload, policy=lambda: length(bound)))
        self.bound = bound
        self.served: Counter[int] = Counter()
        self.waited: dict[int, Request] = {}  # never begun, and in line when the last step was over
        self.slots: set[int] = set()
        self.num_overtaken = 0

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        for request, tokens in zip(plan.rows.requests, plan.rows.lengths):
            self.served[request.order] += tokens
        running = {r.order: r for r in self.scheduler.running}
        entered = running.keys() - self.slots
        for order in [o for o, r in self.waited.items() if r.state is RequestState.WAITING]:
            later = [other for other in running if other > order]
            rest = sum(
                running[other].prefill_target - running[other].num_computed
                for other in later
                if running[other].is_prefilling
            )
            served = sum(tokens for other, tokens in self.served.items() if other > order)
            if entered & set(later):
                self.num_overtaken += 1
                assert served + rest <= self.bound, "more than the bound before a slot is given"
            slots = self.workload.max_num_seqs
            assert served <= self.bound + slots * MAX_LEN, "and then only outputs that are left"
        self.slots = set(running)
        self.waited = {
            r.order: r for r in self.scheduler.waiting.requests() if not r.num_preemptions
        }


def test_what_later_arrivals_are_given_is_bounded() -> None:
    num_overtaken = 0

    @settings(max_examples=40, deadline=None, derandomize=True)  # the same count in every run
    @given(workloads, st.integers(0, 120))
    def holds(workload: Workload, bound: int) -> None:
        nonlocal num_overtaken
        run = BoundRun(workload, bound)
        run.to_the_end()
        num_overtaken += run.num_overtaken
        assert len(run.scheduler.waiting) == 0

    holds()
    assert num_overtaken > 20, "else it was not put to the test"


def test_what_is_remembered_of_the_past_stays_small() -> None:
    policy = length(30)
    scheduler, device = started(policy, max_num_seqs=2)
    for index in range(3000):
        scheduler.add(make_request(f"{index}", [5] * (1 + index % 17), 1))
        step(scheduler, device)
    assert len(policy._gone) <= 256
