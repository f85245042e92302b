"""Properties of the scheduler on a device that checks every page it reads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ValidationError
from jaxserve.memory.manager import PageManager
from jaxserve.request import FinishReason, Request, RequestState, StopRule
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler, SchedulerLimits
from tests.jaxserve.scheduling.fake_device import FakeDevice, next_token

VOCAB = 11
EOS = 0


@dataclass(frozen=True)
class Arrival:
    """A request of the random workload."""

    step: int
    prompt: list[int]
    max_tokens: int
    abort_after: int | None
    needs_seen: bool
    num_bias: int
    n: int = 1


@dataclass(frozen=True)
class Workload:
    arrivals: list[Arrival]
    max_num_seqs: int
    token_budget: int
    max_prefill: int
    max_lanes: int
    page_size: int
    spare_pages: int
    overlap: bool


MAX_LEN = 24
MAX_BIAS = 8

arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN - 1),
    max_tokens=st.integers(1, MAX_LEN),
    abort_after=st.none() | st.none() | st.integers(0, 20),
    needs_seen=st.booleans(),
    num_bias=st.sampled_from([0, 0, 3, 5, MAX_BIAS]),
    n=st.sampled_from([1, 1, 1, 2, 4]),
)
workloads = st.builds(
    Workload,
    arrivals=st.lists(arrivals, min_size=1, max_size=12),
    max_num_seqs=st.integers(1, 5),
    token_budget=st.integers(5, 20),
    max_prefill=st.integers(1, 20),
    max_lanes=st.integers(1, 4),
    page_size=st.sampled_from([1, 2, 4, 16]),
    spare_pages=st.integers(0, 12),
    overlap=st.booleans(),
)


def make_request(
    name: str, prompt: list[int], max_tokens: int, *, needs_seen=False, num_bias=0, group=None
) -> Request:
    rule = StopRule(frozenset({EOS}), frozenset(), 0, min(max_tokens, MAX_LEN - len(prompt)))
    words = [[VOCAB + 1, VOCAB + 2]] if needs_seen else []
    params = SamplingParams(logit_bias=dict.fromkeys(range(num_bias), 1.0))
    return Request(name, prompt, params, rule, seed=0, bad_words=words, group=group)


def make_scheduler(w: Workload) -> Scheduler:
    pages = PageManager(-(-MAX_LEN // w.page_size) + 1 + w.spare_pages, w.page_size)
    limits = SchedulerLimits(
        w.max_num_seqs, w.token_budget, w.max_prefill, w.max_lanes, MAX_LEN, MAX_BIAS
    )
    return Scheduler(limits, pages)


def alone(prompt: list[int], max_tokens: int) -> tuple[list[int], FinishReason]:
    """What the request generates with the device to itself."""
    tokens, rule = list(prompt), make_request("alone", prompt, max_tokens).stop_rule
    while True:
        tokens.append(next_token(tokens, VOCAB))
        end = rule.check(tokens[-1], len(tokens) - len(prompt))
        if end is not None:
            return tokens[len(prompt) :], end.reason


class Run:
    """Drives a scheduler as the engine does and records what happened."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.scheduler = make_scheduler(workload)
        self.device = FakeDevice(
            num_pages=self.scheduler.pages.pool.num_pages,
            page_size=workload.page_size,
            num_slots=workload.max_num_seqs,
            vocab=VOCAB,
        )
        self.requests: list[Request] = []
        self.reasons: dict[str, FinishReason] = {}
        self.aborted: set[str] = set()
        self.plans: list[list[tuple[str, int, int]]] = []

    def to_the_end(self) -> Run:
        pending = sorted(enumerate(self.workload.arrivals), key=lambda a: a[1].step)
        in_flight: tuple[StepPlan, list[int]] | None = None
        step = 0
        while pending or self.scheduler.has_unfinished or in_flight:
            while pending and pending[0][1].step <= step:
                index, arrival = pending.pop(0)
                group = SequenceGroup() if arrival.n > 1 else None
                for sequence in range(arrival.n):
                    request = make_request(
                        f"{index}.{sequence}",
                        arrival.prompt,
                        arrival.max_tokens,
                        needs_seen=arrival.needs_seen,
                        num_bias=arrival.num_bias,
                        group=group,
                    )
                    self.requests.append(request)
                    self.scheduler.add(request)
            self._abort_some(step)
            plan = self.scheduler.plan()
            self._check_plan(plan)
            dispatched = (plan, self.device.run(plan)) if plan else None
            if not self.workload.overlap and dispatched:
                self._commit(*dispatched)
                dispatched = None
            if in_flight:
                self._commit(*in_flight)
            assert plan or in_flight or not self.scheduler.has_unfinished, "the scheduler stalled"
            in_flight = dispatched
            self.scheduler.check_integrity()
            step += 1
            assert step < 5000, "a request starves"
        return self

    def _abort_some(self, step: int) -> None:
        for request in self.requests:
            index, sequence = map(int, request.request_id.split("."))
            arrival = self.workload.arrivals[index]
            # the sequences of a group end one by one
            delay = None if arrival.abort_after is None else arrival.abort_after + sequence
            if delay is None or step < arrival.step + delay:
                continue
            if self.scheduler.abort(request.request_id):
                self.aborted.add(request.request_id)

    def _commit(self, plan: StepPlan, tokens: list[int]) -> None:
        seen = self.scheduler.commit(plan, tokens)
        for entry, end in seen.ends.items():
            self.reasons[seen.requests[entry].request_id] = end.reason

    def _check_plan(self, plan: StepPlan) -> None:
        w = self.workload
        assert len(plan.decode) + plan.num_prefill_tokens <= w.token_budget
        assert plan.num_prefill_tokens <= w.max_prefill
        assert len(plan.lanes) <= w.max_lanes
        assert len(self.scheduler.running) <= w.max_num_seqs
        decode = plan.decode
        samples = decode.requests + [lane.request for lane in plan.lanes if lane.samples]
        assert sum(request.num_bias for request in samples) <= MAX_BIAS
        for request, slot, position in zip(
            decode.requests, decode.slots, decode.positions, strict=True
        ):
            planned = len(request.output_token_ids) + request.pending
            assert planned <= request.stop_rule.max_tokens, "a token that nobody can want"
            assert not (request.needs_seen_tokens and request.pending > 1), "planned unseen"
            assert slot == request.slot and position < MAX_LEN
        rows = [(r.request_id, at, 1) for r, at in zip(decode.requests, decode.positions)]
        self.plans.append(rows + [(r.request.request_id, r.start, r.length) for r in plan.lanes])


@settings(max_examples=300, deadline=None)
@given(workloads)
def test_every_request_gets_the_tokens_it_would_get_alone(workload: Workload) -> None:
    run = Run(workload).to_the_end()
    assert len(run.requests) == sum(arrival.n for arrival in workload.arrivals)
    for request in run.requests:
        arrival = workload.arrivals[int(request.request_id.split(".")[0])]
        expected, reason = alone(arrival.prompt, arrival.max_tokens)
        if request.request_id in run.aborted:
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == expected
            assert run.reasons[request.request_id] is reason
        assert request.state is RequestState.FINISHED
    scheduler = run.scheduler
    assert scheduler.pages.pool.num_used == 0
    assert not scheduler.running and len(scheduler.waiting) == 0


@settings(max_examples=50, deadline=None)
@given(workloads)
def test_the_same_workload_gives_the_same_plans(workload: Workload) -> None:
    assert Run(workload).to_the_end().plans == Run(workload).to_the_end().plans


def simple(**changes) -> Workload:
    base = {
        "arrivals": [],
        "max_num_seqs": 2,
        "token_budget": 16,
        "max_prefill": 16,
        "max_lanes": 4,
        "page_size": 4,
        "spare_pages": 20,
        "overlap": False,
    }
    return Workload(**(base | changes))


def step(scheduler: Scheduler, device: FakeDevice) -> StepPlan:
    plan = scheduler.plan()
    scheduler.commit(plan, device.run(plan))
    return plan


def start(workload: Workload) -> tuple[Scheduler, FakeDevice]:
    run = Run(workload)
    return run.scheduler, run.device


def names(plan: StepPlan) -> tuple[list[str], list[str]]:
    return (
        [r.request_id for r in plan.decode.requests],
        [lane.request.request_id for lane in plan.lanes],
    )


def test_a_freed_slot_is_refilled_in_the_next_step() -> None:
    scheduler, device = start(simple())
    for name, max_tokens in (("a", 1), ("b", 9), ("c", 9)):
        scheduler.add(make_request(name, [5, 6], max_tokens))
    assert names(step(scheduler, device)) == ([], ["a", "b"])
    assert names(step(scheduler, device)) == (["b"], ["c"])


def test_short_prompts_share_one_prefill_region() -> None:
    scheduler, device = start(simple(max_num_seqs=4))
    for name in "abcd":
        scheduler.add(make_request(name, [5, 6, 7], 4))
    assert names(step(scheduler, device)) == ([], ["a", "b", "c", "d"])


def test_a_long_prompt_is_split_and_does_not_stop_decodes() -> None:
    scheduler, device = start(simple(token_budget=6, max_prefill=6))
    scheduler.add(make_request("short", [5], 12))
    step(scheduler, device)
    scheduler.add(make_request("long", list(range(1, 11)) + [1] * 7, 4))
    plans = [step(scheduler, device) for _ in range(4)]
    assert [names(plan)[0][:1] for plan in plans] == [["short"]] * 4
    assert [[lane.length for lane in plan.lanes] for plan in plans] == [[5], [5], [5], [2]]
    assert [lane.samples for plan in plans for lane in plan.lanes] == [False, False, False, True]


def test_the_youngest_request_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler, device = start(simple(page_size=1, spare_pages=3, token_budget=24, max_prefill=24))
    old, young = make_request("old", [5] * 10, 14), make_request("young", [6] * 10, 14)
    scheduler.add(old)
    scheduler.add(young)
    seen = []
    while scheduler.has_unfinished:
        plan = step(scheduler, device)
        scheduler.check_integrity()
        seen.append((names(plan), young.state))
    assert old.num_preemptions == 0
    if len(old.output_token_ids) > 3:
        assert young.num_preemptions >= 1
    assert old.output_token_ids == alone([5] * 10, 14)[0]
    assert young.output_token_ids == alone([6] * 10, 14)[0]


def group_of(n: int, prompt: list[int], max_tokens: int = 9) -> list[Request]:
    group = SequenceGroup()
    return [make_request(f"s{i}", prompt, max_tokens, group=group) for i in range(n)]


def test_the_sequences_of_a_group_compute_their_prompt_once() -> None:
    scheduler, device = start(simple(max_num_seqs=4, token_budget=16, max_prefill=16))
    sequences = group_of(4, [5] * 14)
    for sequence in sequences:
        scheduler.add(sequence)
    computed = 0
    for _ in range(4):
        computed += step(scheduler, device).num_prefill_tokens
        scheduler.check_integrity()
    # pages of 4 tokens: 12 are shared, each of the others computes the last two
    assert computed == 14 + 3 * 2
    assert scheduler.pages.pool.num_used < 4 * 4
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert all(s.output_token_ids == alone([5] * 14, 9)[0] for s in sequences)
    assert scheduler.pages.pool.num_used == 0


def holding_group(other_prompt: int = 10) -> tuple[Scheduler, FakeDevice, Request, list[Request]]:
    """A request that grows beside a group whose first sequence has ended and left 11 pages held.

    Of the 24 pages too few are free for the group's next sequence.
    """
    scheduler, device = start(
        simple(max_num_seqs=3, page_size=1, spare_pages=0, token_budget=24, max_prefill=24)
    )
    other = make_request("other", [6] * other_prompt, 14)
    scheduler.add(other)
    step(scheduler, device)
    sequences = group_of(2, [5] * 12, 1)
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler, device)
    step(scheduler, device)
    assert sequences[0].state is RequestState.FINISHED
    assert sequences[1].state is RequestState.WAITING
    assert sum(len(group.pages) for group in scheduler._holding) == 11
    return scheduler, device, other, sequences


def test_what_a_group_holds_is_given_up_before_anybody_is_preempted() -> None:
    scheduler, device, other, sequences = holding_group()
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert scheduler.num_preemptions == 0
    assert other.output_token_ids == alone([6] * 10, 14)[0]
    assert sequences[1].output_token_ids == alone([5] * 12, 1)[0]


def test_what_a_group_holds_keeps_nobody_out_when_nothing_runs() -> None:
    scheduler, device, other, sequences = holding_group()
    first = make_request("first", [7] * 18, 2)
    scheduler.add(first)
    # it comes before the group, as a preempted request does, and needs more than is free
    scheduler.waiting.discard(first)
    first.order = -1
    scheduler.waiting.push(first)
    scheduler.abort(other.request_id)
    assert names(step(scheduler, device)) == ([], ["first"])
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert sequences[1].output_token_ids == alone([5] * 12, 1)[0]


def test_pages_that_others_own_too_are_not_given_up() -> None:
    scheduler, device = start(simple(max_num_seqs=2, token_budget=16, max_prefill=16))
    for sequence in group_of(4, [5] * 14, 9):
        scheduler.add(sequence)
    step(scheduler, device)
    assert scheduler._holding and not scheduler._drop_held_pages()
    assert scheduler._holding, "its first sequence still owns them: none would be free"


def test_the_next_of_a_group_takes_over_when_the_first_is_aborted() -> None:
    scheduler, device = start(simple(max_num_seqs=4, token_budget=6, max_prefill=6))
    sequences = group_of(3, [5] * 14)
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler, device)
    scheduler.abort("s0")
    scheduler.check_integrity()
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert [s.output_token_ids for s in sequences[1:]] == [alone([5] * 14, 9)[0]] * 2


def test_rows_whose_biases_do_not_fit_take_turns() -> None:
    scheduler, device = start(simple(max_num_seqs=3))
    for name in "abc":
        scheduler.add(make_request(name, [5, 6], 9, num_bias=5))
    plain = [names(step(scheduler, device)) for _ in range(7)]
    sampled = [decodes for decodes, _ in plain[1:]]
    assert all(len(decodes) <= 1 for decodes in sampled)
    assert len({tuple(decodes) for decodes in sampled if decodes}) == 3, "each gets its turn"


def test_limits_are_checked_with_the_fields_named() -> None:
    with pytest.raises(ValidationError, match="max_num_batched_tokens=2"):
        SchedulerLimits(4, 2, 2, 1, 10)
    with pytest.raises(ValidationError, match="num_pages=3"):
        Scheduler(SchedulerLimits(1, 8, 8, 1, 64), PageManager(3, 16))
    scheduler, _ = start(simple())
    with pytest.raises(ValidationError, match="prompt='24 tokens'"):
        scheduler.add(make_request("long", [1] * MAX_LEN, 1))
    scheduler.add(make_request("twice", [1], 1))
    with pytest.raises(ValidationError, match="request_id='twice'"):
        scheduler.add(make_request("twice", [1], 1))
