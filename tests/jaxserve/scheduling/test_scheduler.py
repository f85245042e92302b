"""Properties of the scheduler on a device that checks every page it reads."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ValidationError
from jaxserve.memory.host_tier import HostTier
from jaxserve.memory.manager import PageManager
from jaxserve.memory.page_groups import PageGroups
from jaxserve.params.repetition_detection import RepetitionDetectionParams
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request, RequestState
from jaxserve.request.stop_rule import End, FinishReason, StopRule
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policies import FirstComeFirstServed, Length, Policy, Priority
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits
from jaxserve.scheduling.turns import Turns
from tests.jaxserve.host_tier import ForgetfulTier
from tests.jaxserve.requests import make_request as make_plain
from tests.jaxserve.scheduling.fake_device import ONE_GROUP, FakeDevice, next_token

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
    priority: int = 0
    client: str = ""


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
    num_drafts: int = 0
    drafting_rows: int = 99  # with more requests there are no drafts
    caching: bool = True
    host_pages: int = 0
    keeps: bool = True  # else a `ForgetfulTier`
    policy: Callable[[], Policy] = FirstComeFirstServed
    groups: PageGroups = ONE_GROUP
    num_stages: int = 1

    @property
    def num_groups(self) -> int:
        """Of requests, with steps of their own; stages have no drafts."""
        return self.num_stages if self.overlap and not self.num_drafts else 1

    def drafts_for(self, num_running: int) -> int:
        return self.num_drafts if num_running <= self.drafting_rows else 0


MAX_LEN = 24
MAX_BIAS = 8

PREFIXES = ([], [3] * 20, [3] * 6 + [4] * 14, [7] * 9)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN - 1)
sharing = st.builds(
    lambda prefix, length, rest: (prefix[:length] + rest)[: MAX_LEN - 1],
    st.sampled_from(PREFIXES),
    st.integers(0, 20),
    prompts,
)


def short_first() -> Length:
    """The policy by length, as small as the prompts here are."""
    return Length((4, 12), (6, 3, 1), 40)


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=sharing,
    max_tokens=st.integers(1, MAX_LEN),
    abort_after=st.none() | st.none() | st.integers(0, 20),
    needs_seen=st.booleans(),
    num_bias=st.sampled_from([0, 0, 3, 5, MAX_BIAS]),
    n=st.sampled_from([1, 1, 1, 2, 4]),
    priority=st.integers(-1, 1),
    client=st.sampled_from(["", "", "a", "b"]),
)
workloads = st.builds(
    Workload,
    arrivals=st.lists(arrivals, min_size=1, max_size=12),
    max_num_seqs=st.integers(1, 5),
    token_budget=st.integers(20, 30) | st.integers(5, 20),
    max_prefill=st.integers(1, 20),
    max_lanes=st.integers(1, 4),
    page_size=st.sampled_from([1, 2, 4, 16]),
    spare_pages=st.integers(0, 12),
    overlap=st.booleans(),
    num_drafts=st.sampled_from([0, 0, 1, 3]),
    drafting_rows=st.sampled_from([99, 2]),
    caching=st.sampled_from([True, True, False]),
    host_pages=st.sampled_from([0, 1, 3, 30]),
    keeps=st.booleans(),
    policy=st.sampled_from([FirstComeFirstServed, Priority, short_first]),
    groups=st.sampled_from([ONE_GROUP, PageGroups(0, 1, 5), PageGroups(1, 2, 4)]),
    num_stages=st.sampled_from([1, 1, 2, 4]),
).filter(lambda w: w.token_budget >= w.max_num_seqs * (1 + w.num_drafts))


def num_bias_of(request: Request) -> int:
    return len(request.params.logit_bias or ())


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int,
    *,
    needs_seen=False,
    num_bias=0,
    group=None,
    priority=0,
    client="",
) -> Request:
    rule = StopRule(frozenset({EOS}), frozenset(), 0, min(max_tokens, MAX_LEN - len(prompt)))
    params = SamplingParams(logit_bias=dict.fromkeys(range(num_bias), 1.0))
    turn = Queueing(0.0, priority, client=client)
    request = make_plain(name, prompt, params, rule, group=group, queueing=turn)
    request.needs_seen_tokens = needs_seen
    request.takes_drafts = not (needs_seen or num_bias)
    return request


def make_scheduler(w: Workload) -> Scheduler:
    groups = replace(w.groups, ahead=w.max_prefill + 2 * (1 + w.num_drafts))
    num_pages = groups.most_held(MAX_LEN, w.page_size) + 1 + w.spare_pages
    kind = HostTier if w.keeps else ForgetfulTier
    tier = kind(w.host_pages) if w.host_pages else None
    pages = PageManager(num_pages, w.page_size, caching=w.caching, tier=tier, groups=groups)
    limits = SchedulerLimits(
        w.max_num_seqs,
        w.token_budget,
        w.max_prefill,
        w.max_lanes,
        MAX_LEN,
        w.num_drafts,
        w.num_groups,
    )
    turns = Turns(MAX_BIAS, num_bias_of)
    return Scheduler(limits, pages, ClientTurns(w.policy), [turns], w.drafts_for)


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
            groups=workload.groups,
        )
        self.names: list[str] = []  # of all sequences, and those that were made
        self.requests: list[Request] = []
        self.reasons: dict[str, FinishReason] = {}
        self.aborted: set[str] = set()
        self.plans: list[list[tuple[str, int, int]]] = []

    def to_the_end(self) -> Run:
        pending = sorted(enumerate(self.workload.arrivals), key=lambda a: a[1].step)
        in_flight: deque[tuple[StepPlan, tuple[list[int], list[int]]]] = deque()
        most = max(2, self.workload.num_groups) if self.workload.overlap else 1
        step = 0
        while pending or self.scheduler.has_unfinished or in_flight:
            while pending and pending[0][1].step <= step:
                index, arrival = pending.pop(0)
                self._add(index, arrival)
            self._abort_some(step)
            plan = self.scheduler.plan()
            self._check_plan(plan)
            if plan:
                in_flight.append((plan, self.device.run(plan)))
            assert in_flight or not self.scheduler.has_unfinished, "the scheduler stalled"
            if in_flight and (not plan or len(in_flight) == most):
                self._commit(*in_flight.popleft())
            self.scheduler.check_integrity()
            step += 1
            assert step < 5000, "a request starves"
        return self

    def _add(self, index: int, arrival: Arrival) -> None:
        first, *behind = ((f"{index}.{sequence}", 0) for sequence in range(arrival.n))

        def make(name: str, seed: int, group: SequenceGroup | None) -> Request:
            request = make_request(
                name,
                arrival.prompt,
                arrival.max_tokens,
                needs_seen=arrival.needs_seen,
                num_bias=arrival.num_bias,
                group=group,
                priority=arrival.priority,
                client=arrival.client,
            )
            self.requests.append(request)
            return request

        self.names += (name for name, _ in (first, *behind))
        self.scheduler.add(
            make(*first, SequenceGroup(dict(reversed(behind)), make) if behind else None)
        )

    def _abort_some(self, step: int) -> None:
        for name in self.names:
            index, sequence = map(int, name.split("."))
            arrival = self.workload.arrivals[index]
            # the sequences of a group end one by one
            delay = None if arrival.abort_after is None else arrival.abort_after + sequence
            if delay is None or step < arrival.step + delay:
                continue
            if self.scheduler.abort(name):
                self.aborted.add(name)

    def _commit(self, plan: StepPlan, sampled: tuple[list[int], list[int]]) -> None:
        tokens, counts = sampled
        seen = self.scheduler.commit(plan, tokens, counts if self.workload.num_drafts else None)
        for entry, end in seen.ends.items():
            self.reasons[seen.requests[entry].request_id] = end.reason

    def _check_plan(self, plan: StepPlan) -> None:
        w = self.workload
        rows, decodes = plan.rows, plan.num_decode
        assert sum(rows.lengths) <= w.token_budget
        assert sum(rows.lengths[decodes:]) <= w.max_prefill
        assert max(len(plan.tokens), len(plan.samples) - decodes) <= w.max_lanes
        assert len(self.scheduler.running) <= w.max_num_seqs
        assert sum(num_bias_of(request) for request in plan.samples.requests) <= MAX_BIAS
        for request, slot, start, length in list(
            zip(rows.requests, rows.slots, rows.starts, rows.lengths, strict=True)
        )[:decodes]:
            planned = len(request.output_token_ids) + request.pending
            assert planned <= request.stop_rule.max_tokens, "a token that nobody can want"
            assert length == 1 or request.takes_drafts
            assert not (request.needs_seen_tokens and request.pending > 1), "planned unseen"
            assert slot == request.slot and start + length <= MAX_LEN
            assert w.num_groups == 1 or start + length == request.num_tokens, "unseen"
        assert decodes <= -(-w.max_num_seqs // w.num_groups)
        ids = [request.request_id for request in rows.requests]
        self.plans.append([*zip(ids, rows.starts, rows.lengths)])


@settings(max_examples=120, deadline=None)
@given(workloads)
def test_every_request_gets_the_tokens_it_would_get_alone(workload: Workload) -> None:
    run = Run(workload).to_the_end()
    made = {request.request_id for request in run.requests}
    assert len(run.names) == sum(arrival.n for arrival in workload.arrivals)
    assert made >= set(run.names) - run.aborted and len(made) == len(run.requests)
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
    scheduler.commit(plan, *device.run(plan))
    return plan


def start(workload: Workload) -> tuple[Scheduler, FakeDevice]:
    run = Run(workload)
    return run.scheduler, run.device


def names(plan: StepPlan) -> tuple[list[str], list[str]]:
    """Who decodes, and who computes tokens that the host knows."""
    ids = [request.request_id for request in plan.rows.requests]
    return ids[: plan.num_decode], ids[plan.num_decode :]


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
    assert [plan.rows.lengths[plan.num_decode :] for plan in plans] == [[5], [5], [5], [2]]
    assert [len(plan.samples) - plan.num_decode for plan in plans] == [0, 0, 0, 1]


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


def test_requests_that_need_seen_tokens_share_their_steps() -> None:
    """Halves of them that take turns would need two steps for what one can do."""
    w = Workload([], 4, 16, 16, 4, 4, 30, overlap=True)
    scheduler = make_scheduler(w)
    device = FakeDevice(num_pages=40, page_size=4, num_slots=4, vocab=VOCAB)
    in_flight, sizes = None, list[tuple[int, int]]()
    for step in range(16):
        if step < 3:  # they come in different steps
            name, prompt = f"seen{step}", [5, step + 1]
            scheduler.add(make_request(name, prompt, 20, needs_seen=True))
        if step == 3:
            scheduler.add(make_request("free", [5, 9], 20))
        plan = scheduler.plan()
        decoding = plan.samples.requests[: plan.num_decode]
        sizes.append((sum(r.needs_seen_tokens for r in decoding), len(decoding)))
        ran = (plan, *device.run(plan)) if plan else None
        if in_flight is not None:
            done, tokens, counts = in_flight
            # none ends: an end would change who is left
            scheduler.commit(done, [1 + token % (VOCAB - 1) for token in tokens], counts)
        in_flight = ran
    seen = [count for count, _ in sizes[6:]]
    assert set(seen) == {0, 3} and all(a != b for a, b in itertools.pairwise(seen))
    assert all(total - count == 1 for count, total in sizes[6:]), "the other runs in each step"


def test_a_request_that_repeats_itself_ends() -> None:
    def first_twice(prompt: list[int]) -> list[int]:
        tokens = alone(prompt, 30)[0]
        twice = (i for i in range(1, len(tokens)) if tokens[i] == tokens[i - 1])
        return tokens[: next(twice, -1) + 1]

    prompt = next([token] for token in range(1, VOCAB) if first_twice([token]))
    request = make_request("r", prompt, 30)
    rule = replace(request.stop_rule, repetition=RepetitionDetectionParams(1, 1, 2))
    request.asked = replace(request.asked, stop_rule=rule)
    scheduler, device = start(simple())
    scheduler.add(request)
    ends = []
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        ends += scheduler.commit(plan, *device.run(plan)).ends.values()
    assert request.output_token_ids == first_twice(prompt)
    assert ends == [End(FinishReason.REPETITION, None)]


def test_stages_have_a_step_of_other_requests_each() -> None:
    scheduler, device = start(simple(max_num_seqs=4, overlap=True, num_stages=2))
    for name in "abcd":
        scheduler.add(make_request(name, [5, 6], 9))
    step(scheduler, device)
    first, second = scheduler.plan(), scheduler.plan()
    assert [names(plan)[0] for plan in (first, second)] == [["a", "b"], ["c", "d"]]
    assert not scheduler.plan(), "their tokens are not seen"
    scheduler.commit(first, *device.run(first))
    assert names(scheduler.plan())[0] == ["a", "b"]
