"""Beam searches among other requests, on a device that checks every page it reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.boundary.messages import AddGroup, Hypothesis
from jaxserve.boundary.reports import TokenLogprobs
from jaxserve.memory.host_tier import HostTier
from jaxserve.memory.manager import PageManager
from jaxserve.memory.page_groups import PageGroups
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.beam_search import BeamSearch
from jaxserve.scheduling.beams import BeamGroups
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.plan import SeenTokens, StepPlan
from jaxserve.scheduling.policies import FirstComeFirstServed, Length, Policy, Priority
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits
from tests.jaxserve.host_tier import ForgetfulTier
from tests.jaxserve.requests import make_request
from tests.jaxserve.scheduling.fake_device import (
    ONE_GROUP,
    FakeDevice,
    likely_tokens,
    next_token,
)

VOCAB, EOS = 11, frozenset({0, 5})
MAX_LEN = 24
MOST_STEPS = 4000


def candidates(context: list[int], count: int) -> list[tuple[int, float]]:
    return likely_tokens(context, VOCAB, count)


class Grammar:
    """A constraint that follows one sequence, and must be told of each of its tokens."""

    error, is_compiled = None, True

    def __init__(self, seen: list[int]):
        self._seen = seen

    def forked(self) -> Grammar:
        return Grammar(self._seen)

    def take(self, output: list[int]) -> None:
        assert output[: len(self._seen)] == self._seen, "of another sequence"
        self._seen = [*output]


def allowed(output: list[int], ranked: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """What a grammar lets follow."""
    return [one for one in ranked if (sum(output) + 2 * one[0]) % 3]


@dataclass(frozen=True)
class Arrival:
    """A beam search, or an ordinary request where the width is 0."""

    step: int
    prompt: list[int]
    max_tokens: int
    width: int
    length_penalty: float
    early_stopping: bool | str
    ignore_eos: bool
    abort_after: int | None
    priority: int
    client: str = ""
    shrinks: bool = False
    is_constrained: bool = False

    @property
    def limit(self) -> int:
        return min(self.max_tokens, MAX_LEN - len(self.prompt))

    @property
    def rule(self) -> StopRule:
        return StopRule(EOS, frozenset(), 0, self.limit, self.ignore_eos)

    @property
    def count(self) -> int:
        return BeamSearch.num_candidates(self.width, 0 if self.ignore_eos else len(EOS))

    @property
    def params(self) -> BeamSearchParams:
        return BeamSearchParams(
            self.width,
            self.limit,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,  # type: ignore[arg-type]
            shrink_under_pressure=self.shrinks,
        )

    def search(self) -> BeamSearch:
        return BeamSearch(self.params, self.rule)

    def candidates(self, output: list[int]) -> list[tuple[int, float]]:
        """The most likely tokens that may follow."""
        ranked = candidates(self.prompt + output, VOCAB)
        if self.is_constrained:
            ranked = allowed(output, ranked)
        return ranked[: max(1, self.count)]

    def found_alone(self) -> list[Hypothesis]:
        search = self.search()
        while search.beams:
            outputs = [beam.token_ids for beam in search.beams]
            search.advance([self.candidates(output) for output in outputs])
        return search.finished


@dataclass(frozen=True)
class Sizes:
    slots: int
    budget: int
    prefill: int
    lanes: int
    page_size: int
    spare_pages: int
    overlap: bool
    caching: bool
    policy: Callable[[], Policy]
    groups: PageGroups = ONE_GROUP


def short_first() -> Length:
    return Length((4, 12), (6, 3, 1), 40)


PREFIXES = ([], [3] * 20, [7] * 9)
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 20),
    prompt=st.builds(
        lambda prefix, rest: (prefix + rest)[: MAX_LEN - 1],
        st.sampled_from(PREFIXES),
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10),
    ),
    max_tokens=st.integers(1, MAX_LEN),
    width=st.sampled_from([0, 0, 1, 2, 3, 4, 6]),
    length_penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    ignore_eos=st.booleans(),
    abort_after=st.none() | st.none() | st.integers(0, 20),
    priority=st.integers(0, 2),
    client=st.sampled_from(["", "", "a", "b"]),
    shrinks=st.booleans(),
    is_constrained=st.booleans(),
)
sizes = st.builds(
    Sizes,
    slots=st.integers(1, 7),
    budget=st.integers(7, 30),
    prefill=st.integers(1, 7),
    lanes=st.integers(1, 4),
    page_size=st.sampled_from([1, 2, 4, 16]),
    spare_pages=st.integers(0, 12),
    overlap=st.booleans(),
    caching=st.booleans(),
    policy=st.sampled_from([FirstComeFirstServed, Priority, short_first]),
)


class Bench:
    """A scheduler with its searches, and what it found."""

    def __init__(self, sizes: Sizes):
        size, groups = sizes.page_size, sizes.groups
        num_pages = groups.most_held(MAX_LEN, size) + 1 + sizes.spare_pages
        limits = SchedulerLimits(
            max_num_seqs=sizes.slots,
            max_num_batched_tokens=sizes.budget,
            max_prefill_tokens=sizes.prefill,
            max_lanes=sizes.lanes,
            max_model_len=MAX_LEN,
        )
        spare = sizes.spare_pages
        kind = HostTier if sizes.overlap else ForgetfulTier
        tier = kind(spare) if spare % 2 else None
        pages = PageManager(num_pages, size, caching=sizes.caching, tier=tier, groups=groups)
        self.scheduler = Scheduler(limits, pages, ClientTurns(sizes.policy))
        self.beams = BeamGroups(self.scheduler)
        self.found: dict[str, list[Hypothesis]] = {}
        self.requests: dict[str, Request] = {}
        self._overlap = sizes.overlap
        self._arrivals: dict[str, Arrival] = {}  # by sequence
        self._device = FakeDevice(
            num_pages=num_pages,
            page_size=size,
            num_slots=sizes.slots,
            vocab=VOCAB,
            groups=groups,
        )
        self._in_flight: tuple[StepPlan, list[int]] | None = None
        self.num_steps = 0

    def add(self, name: str, arrival: Arrival) -> None:
        queueing = Queueing(0.0, arrival.priority, client=arrival.client)
        plain = make_request(name, arrival.prompt, rule=arrival.rule, queueing=queueing)

        def make(sequence: str, asked: AddGroup) -> Request:
            self._arrivals[sequence] = arrival
            made = Request(sequence, asked)
            made.needs_seen_tokens = True
            if arrival.is_constrained:
                made.own = {"grammar": Grammar([])}
            return made

        if arrival.width:
            self.beams.add(replace(plain.asked, beams=arrival.params), make)
        else:
            self._arrivals[name] = arrival
            self.requests[name] = plain
            self.scheduler.add(plain)

    def abort(self, name: str) -> None:
        if not self.beams.abort(name):
            self.scheduler.abort(name)

    @property
    def has_work(self) -> bool:
        unfinished = self.scheduler.has_unfinished or bool(self.beams)
        return unfinished or self._in_flight is not None

    def step(self) -> None:
        self.num_steps += 1
        plan = self.beams.plan()
        dispatched = (plan, self._device.run(plan)[0]) if plan else None
        assert dispatched or self._in_flight or not self.scheduler.has_unfinished, "a stall"
        done = dispatched
        if self._overlap:
            done, self._in_flight = self._in_flight, dispatched
        if done is not None:
            self._commit(*done)
        else:
            self._take(SeenTokens(), {})
        self.scheduler.check_integrity()

    def _commit(self, plan: StepPlan, tokens: list[int]) -> None:
        seen = self.scheduler.commit(plan, tokens)
        logprobs = {}
        for request, token in zip(seen.requests, seen.tokens):
            # the device has computed what the host believes
            context = request.prompt_token_ids + request.output_token_ids[:-1]
            assert token == next_token(context, VOCAB)
            arrival, output = self._arrivals[request.request_id], request.output_token_ids[:-1]
            if request.own:
                request.own["grammar"].take(output)  # type: ignore[attr-defined]
                assert request.is_beam
            found = arrival.candidates(output)
            # the device fills up with what may not follow
            ranked = found + [(0, -math.inf)] * (max(1, arrival.count) - len(found))
            ids, values = zip(*ranked)
            ranks = [1, *range(1, len(ids) + 1)]
            logprobs[request.request_id] = TokenLogprobs([token, *ids], [-1.0, *values], ranks)
        self._take(seen, logprobs)

    def _take(self, seen: SeenTokens, logprobs: dict[str, TokenLogprobs]) -> None:
        rest, found = self.beams.take(seen, logprobs)
        assert all(request.request_id in self.requests for request in rest.requests)
        assert [*logprobs] == [request.request_id for request in rest.requests]
        assert not found.keys() & self.found.keys()
        self.found |= found


def run(sizes: Sizes, arrivals: list[Arrival]) -> Bench:
    """Everything to its end; what was not aborted must be right."""
    bench = Bench(sizes)
    pending = sorted(enumerate(arrivals), key=lambda one: one[1].step)
    for step in range(MOST_STEPS):
        while pending and pending[0][1].step <= step:
            number, arrival = pending.pop(0)
            bench.add(str(number), arrival)
        for number, arrival in enumerate(arrivals):
            if arrival.abort_after is not None and step == arrival.step + arrival.abort_after:
                bench.abort(str(number))
                bench.scheduler.check_integrity()
        if not pending and not bench.has_work:
            break
        bench.step()
    assert not bench.has_work, "a search does not end"
    assert not bench.beams and not bench.scheduler.running
    assert bench.scheduler.pages.pool.num_used == 0
    for number, arrival in enumerate(arrivals):
        name = str(number)
        if arrival.width and (arrival.abort_after is None or name in bench.found):
            if not (arrival.shrinks and bench.beams.num_shrinks):
                assert bench.found[name] == arrival.found_alone()
            assert len(bench.found[name]) == arrival.width or arrival.is_constrained
    return bench


@settings(max_examples=60, deadline=None)
@given(sizes, st.lists(arrivals, min_size=1, max_size=6))
def test_searches_among_others_find_what_they_find_alone(sizes, arrivals) -> None:
    run(sizes, arrivals)


SEARCH = Arrival(0, [3] * 5, 16, 4, 1.0, False, True, None, 0)


@pytest.mark.parametrize("caching", [True, False])
def test_a_search_is_wider_than_there_are_slots_and_pages(caching: bool) -> None:
    sizes = Sizes(3, 12, 6, 2, 4, 0, True, caching, FirstComeFirstServed)
    others = [Arrival(2, [8, number], 16, 3, 1.0, True, False, None, 0) for number in range(3)]
    bench = run(sizes, [SEARCH, *others])
    assert len(bench.found) == 4


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shrinks", [True, False])
def test_an_abort_at_any_point_leaves_nothing_behind(overlap: bool, shrinks: bool) -> None:
    sizes = Sizes(3, 12, 6, 2, 4, 2, overlap, True, FirstComeFirstServed)
    search = replace(SEARCH, shrinks=shrinks)
    last = 0
    for after in range(MOST_STEPS):
        other = Arrival(1, [3] * 6, 9, 2, 1.0, False, True, None, 0)
        bench = run(sizes, [replace(search, abort_after=after), other])
        if "0" in bench.found:
            last = after
            break
    assert last > 20, "it was aborted at each of its steps"


def test_a_search_that_may_gives_up_its_least_likely_beams_for_want_of_pages() -> None:
    """Of pages for one request of the greatest length: a search of four is preempted or shrinks."""
    sizes = Sizes(4, 12, 6, 2, 4, 1, True, True, FirstComeFirstServed)
    whole, shrunk = (run(sizes, [replace(SEARCH, shrinks=may)]) for may in (False, True))
    assert not whole.beams.num_shrinks and whole.found["0"] == SEARCH.found_alone()
    assert 0 < shrunk.beams.num_shrinks <= 3
    assert shrunk.found["0"][0].cum_logprob <= whole.found["0"][0].cum_logprob
    assert len(shrunk.found["0"]) == 4 and shrunk.num_steps < whole.num_steps
    roomy = run(replace(sizes, spare_pages=40), [replace(SEARCH, shrinks=True)])
    assert not roomy.beams.num_shrinks and roomy.found == whole.found


def test_a_paused_beam_gives_way_to_one_that_lost_its_slot_in_the_same_plan() -> None:
    """A prompt under a window takes pages as it goes, which the paused beam beside it holds."""
    groups = PageGroups(1, 2, window=3, ahead=4)
    sizes = Sizes(2, 4, 2, 4, 4, 2, False, False, FirstComeFirstServed, groups)
    search = replace(SEARCH, prompt=[3] * 14)
    bench = run(sizes, [search])
    assert bench.scheduler.num_preemptions and bench.found["0"] == search.found_alone()


def test_beams_that_are_given_up_were_the_least_likely_and_stay_away() -> None:
    search = replace(SEARCH, shrinks=True).search()
    followed = search.advance([candidates(SEARCH.prompt, 4)])
    search.shrink()
    assert [beam.token_ids for beam in search.beams] == [[one.token] for one in followed[:3]]
    contexts = [SEARCH.prompt + beam.token_ids for beam in search.beams]
    assert len(search.advance([candidates(context, 4) for context in contexts])) == 3


def test_beams_share_full_pages() -> None:
    sizes = Sizes(4, 16, 8, 4, 4, 20, True, False, FirstComeFirstServed)
    bench = Bench(sizes)
    bench.add("0", Arrival(0, [3] * 20, 3, 4, 1.0, False, True, None, 0))
    while len(bench.scheduler.running) < 4:
        bench.step()
    pages = [request.pages for request in bench.scheduler.running]
    assert len({tuple(own[:5]) for own in pages}) == 1
    assert bench.scheduler.pages.pool.num_used == 5 + 4


def test_the_most_likely_sequences_are_found_where_nothing_is_dropped() -> None:
    """A search as wide as all sequences of two tokens ranks them all."""
    arrival = Arrival(0, [4], 2, VOCAB, 0.0, "never", True, None, 0)
    every = []
    for first, logprob in candidates([4], VOCAB):
        for second, more in candidates([4, first], VOCAB):
            every.append((logprob + more, [first, second]))
    best = sorted(every, key=lambda one: -one[0])[:VOCAB]
    assert [one.token_ids for one in arrival.found_alone()] == [tokens for _, tokens in best]


def test_an_end_counts_only_among_the_first_width_and_early_stopping_stops() -> None:
    rule = StopRule(frozenset({0}), frozenset(), 0, 9)
    search = BeamSearch(BeamSearchParams(2, 9, early_stopping=True), rule)
    followed = search.advance([[(1, -0.1), (2, -0.2), (0, -0.3)]])
    assert [one.token for one in followed] == [1, 2] and not search.finished
    search.advance([[(0, -0.1), (1, -3.0), (2, -4.0)], [(0, -0.1), (1, -3.5), (2, -5.0)]])
    assert [one.token_ids for one in search.finished] == [[1, 0], [2, 0]]
    assert not search.beams
