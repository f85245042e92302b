#!/usr/bin/env python3
"""Random operations on the scheduler, with everything checked behind each of them.

A device in pure Python runs the steps and fails if a row reads a cell that does not hold the row's
own token. Most engines have pages in the host's memory too, to which copies take their time or are
lost. Behind each operation pages and slots must have exactly their right owners, behind each
request every token must be the one that its context gives, seen once and in order; every request
must end. A beam search must find what it finds alone, unless it gave beams up and may.

    python -m benchmarks.verify.scheduler_proof --operations 1000000
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.verify.proved_search import EOS, VOCAB, Search
from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.reports import TokenLogprobs
from jaxserve.memory.host_tier import HostTier
from jaxserve.memory.manager import PageManager
from jaxserve.memory.page_groups import PageGroups
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request, RequestState
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.beams import BeamGroups
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.scheduling.plan import SeenTokens, StepPlan
from jaxserve.scheduling.policies import FirstComeFirstServed, Length, Policy, Priority
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits
from jaxserve.scheduling.turns import Turns
from tests.jaxserve.scheduling.fake_device import FakeDevice, likely_tokens, next_token

EPISODE = 500  # operations before another scheduler of other sizes is taken
MOST_LIVE = 24
MOST_STEPS = 5000  # that the requests of an episode may take to their ends


class LastComeFirstServed(FirstComeFirstServed):
    def key(self, request: Request) -> int:
        return -request.order


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "length": partial(Length, (6, 12), (6, 3, 1), 64),  # prompts are short here
    "last come first served": LastComeFirstServed,
}


class Episode:
    """A scheduler of random sizes, and what is known of its requests.

    Args:
        rng: decides everything.
        counts: of what was done and seen, added to.
    """

    def __init__(self, rng: random.Random, counts: Counter[str]):
        self._rng, self._counts = rng, counts
        slots, self._drafts = rng.randint(1, 5), rng.choice([0, 0, 0, 1, 3])
        self._overlap = rng.random() < 0.5
        self._longest = rng.choice([12, 24, 40])
        size, budget = rng.choice([1, 2, 4, 16]), rng.randint(slots * (1 + self._drafts), 30)
        full, windowed = rng.choice([(1, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 1)])
        prefill, window = rng.randint(1, budget), rng.choice([1, 3, 8, 17])
        groups = PageGroups(full, windowed, window, ahead=prefill + 2 * (1 + self._drafts))
        tier = HostTier(rng.randint(1, 60 * groups.num_groups)) if rng.random() < 0.8 else None
        if tier is not None:
            tier.is_told = rng.random() < 0.7
            counts["episodes with pages of the host"] += 1
        spare = rng.randint(0, 16 if tier is None else 3)
        num_pages = groups.most_held(self._longest, size) + spare + 1
        self._most_bias = 8
        limits = SchedulerLimits(
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_prefill_tokens=prefill,
            max_lanes=rng.randint(1, 4),
            max_model_len=self._longest,
            num_drafts=self._drafts,
        )
        policy = rng.choice(sorted(POLICIES))
        caching = rng.random() < 0.8
        self._lands = tier is not None and tier.is_told
        pages = PageManager(num_pages, size, caching=caching, tier=tier, groups=groups)
        turns = Turns(self._most_bias, lambda request: len(request.params.logit_bias or ()))
        self.scheduler = Scheduler(limits, pages, ClientTurns(POLICIES[policy]), [turns])
        self._beams = BeamGroups(self.scheduler)
        self._searches: dict[str, Search] = {}
        self._search_of: dict[str, Search] = {}  # by the ids of members
        self._device = FakeDevice(
            num_pages=num_pages,
            page_size=size,
            num_slots=slots,
            vocab=VOCAB,
            groups=groups,
            landing=tier if self._lands else None,
        )
        self._prefixes = [self._tokens(self._longest) for _ in range(3)]
        self._requests: dict[str, Request] = {}  # those that were made
        self._live: list[str] = []  # ids, ended ones among them
        self._seen: dict[str, list[int]] = {}
        self._decided: dict[str, set[int]] = {}  # positions of output tokens that the host chose
        self._num_added = 0
        self._clients = [f"client {number}" for number in range(rng.choice([1, 2, 3, 8]))]
        self._in_flight: tuple[StepPlan, tuple[list[int], list[int]]] | None = None
        counts[f"episodes, {policy}"] += 1

    def operate(self) -> None:
        """Do one random thing, and see that nothing is lost."""
        (name,) = self._rng.choices([*OPERATIONS], weights=[w for w, _ in OPERATIONS.values()])
        OPERATIONS[name][1](self)
        self._counts[name] += 1
        self._check()

    def finish(self) -> None:
        """Run what is left to its end, and look at every token."""
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_unfinished and not self._beams and not self._in_flight:
                break
            self.step()
            self._check()
        assert not self.scheduler.has_unfinished, "a request does not end"
        assert self.scheduler.pages.pool.num_used == 0 and not self.scheduler.running
        for name, request in self._requests.items():
            assert request.state is RequestState.FINISHED
            assert self._seen[name] == request.output_token_ids, "a token was lost, or seen twice"
            context, decided = list(request.prompt_token_ids), self._decided[name]
            for position, token in enumerate(request.output_token_ids):
                assert position in decided or token == next_token(context, VOCAB)
                context.append(token)
                self._counts["tokens"] += 1
            self._counts["requests"] += 1
            self._counts["prompt tokens found"] += request.num_cached or 0
        for search in self._searches.values():
            assert all(r.state is RequestState.FINISHED for r in search.members)
            search.check(self._beams.num_shrinks > 0)
            assert search.found is not None
            self._counts["sequences found by searches"] += len(search.found)
            self._counts["beams computed"] += len(search.members)
        tiers = self.scheduler.page_stats().tiers
        self._counts["pages to the host"] += tiers.num_out
        self._counts["pages back"] += tiers.num_back
        self._counts["pages that found no room there"] += tiers.num_lost
        self._counts["preemptions"] += self.scheduler.num_preemptions
        self._counts["beams given up for want of pages"] += self._beams.num_shrinks

    def _check(self) -> None:
        """Nothing is lost, and no request holds what its window had passed a step ago."""
        self.scheduler.check_integrity()
        pages = self.scheduler.pages
        groups, size = pages.groups, pages.page_size
        for request in self.scheduler.running if groups.num_windowed else ():
            # a row that decodes looks once a page, and what is in flight is not certain
            certain = min(request.num_computed, request.num_tokens) - size - 2 - 2 * self._drafts
            if certain >= request.prefill_target:
                passed = groups.first_index(certain, size) * groups.num_windowed
                assert pages.num_held(request) <= len(request.pages) - passed
                self._counts["pages that windows have passed"] += passed

    def add(self) -> None:
        """Queue a request, or a group of sequences."""
        rng, scheduler = self._rng, self.scheduler
        if scheduler.num_waiting + len(scheduler.running) >= MOST_LIVE:
            return
        prompt = rng.choice(self._prefixes)[: rng.randint(0, self._longest)]
        prompt = (prompt + self._tokens(rng.randint(1, 8)))[-self._longest + 1 :]
        needs_seen, num_bias = rng.random() < 0.2, rng.choice([0, 0, 0, 3, self._most_bias])
        queueing = self._queueing()
        rule = StopRule(
            frozenset({EOS}), frozenset(), 0, rng.randint(1, self._longest - len(prompt))
        )
        params = SamplingParams(logit_bias=dict.fromkeys(range(num_bias), 1.0))
        if rng.random() < 0.1:
            params.prompt_logprobs = 1
        salt = rng.choice([None, None, "a"])

        count = rng.choice([1, 1, 1, 2, 5])
        first, *behind = ((f"{self._num_added + index}", index) for index in range(count))
        ids, seeds = map(list, zip(first, *behind))
        asked = AddGroup(ids, seeds, prompt, params, rule, [], queueing, salt)

        def make(name: str, seed: int, group: SequenceGroup | None) -> Request:
            request = Request(name, asked, seed, group)
            request.needs_seen_tokens = needs_seen
            request.takes_drafts = not (needs_seen or num_bias)
            self._know(request)
            return request

        self._num_added += count
        self._live += (name for name, _ in (first, *behind))
        self._counts["groups"] += count > 1
        scheduler.add(make(*first, SequenceGroup(dict(reversed(behind)), make) if behind else None))

    def search(self) -> None:
        """Begin a beam search."""
        rng, scheduler = self._rng, self.scheduler
        if scheduler.num_waiting + len(scheduler.running) >= MOST_LIVE:
            return
        prompt = rng.choice(self._prefixes)[: rng.randint(0, self._longest // 2)]
        prompt = (prompt + self._tokens(rng.randint(1, 8)))[-self._longest + 1 :]
        params = BeamSearchParams(
            rng.choice([1, 2, 3, 4, 6]),
            rng.randint(1, self._longest - len(prompt)),
            ignore_eos=rng.random() < 0.5,
            length_penalty=rng.choice([1.0, 0.0, -1.0, 2.0]),
            early_stopping=rng.choice([True, False, "never"]),
            shrink_under_pressure=rng.random() < 0.3,
        )
        search, queueing = Search(prompt, params), self._queueing()
        salt = rng.choice([None, None, "a"])

        name = f"search {len(self._search_of)}"
        asked = AddGroup(
            [name], [0], prompt, SamplingParams(), search.rule, [], queueing, salt, params
        )

        def make(member: str, asked: AddGroup) -> Request:
            request = Request(member, asked)
            request.needs_seen_tokens = True
            self._search_of[member] = search
            search.members.append(request)
            return request

        self._searches[name] = search
        self._live.append(name)
        self._beams.add(asked, make)
        self._counts["searches"] += 1

    def abort(self) -> None:
        """End a sequence or a search wherever it is; at times one that has ended."""
        if self._live:
            place = self._rng.randrange(len(self._live))
            name, self._live[place] = self._live[place], self._live[-1]
            self._live.pop()
            if name not in self._searches:
                self._counts["aborted"] += self.scheduler.abort(name)
            elif self._searches[name].found is None:
                self._abort_search(name)

    def abort_search(self) -> None:
        """End a search that is not over."""
        names = [name for name, search in self._searches.items() if search.found is None]
        if names:
            self._abort_search(self._rng.choice(names))

    def _abort_search(self, name: str) -> None:
        search = self._searches.pop(name)
        self._counts[f"searches aborted {search.stage()}"] += 1
        assert self._beams.abort(name) and not self._beams.abort(name)
        assert all(r.state is RequestState.FINISHED for r in search.members)

    def step(self) -> None:
        """Plan a step and commit one: this, or the one before it."""
        plan = self._beams.plan()
        dispatched = (plan, self._device.run(plan)) if plan else None
        if not self._overlap and dispatched:
            self._commit(*dispatched)
            dispatched = None
        if self._in_flight:
            self._commit(*self._in_flight)
        self._take(SeenTokens())  # what is over without a step
        stalled = not plan and not self._in_flight and self.scheduler.has_unfinished
        assert not stalled, "nothing can run"
        self._in_flight = dispatched

    def fork(self) -> None:
        """Continue what a request has computed with other tokens, as another request."""
        found = self._continuable()
        if found is None:
            return
        parent, tokens = found
        child = Request(f"{self._num_added}", parent.asked)
        child.needs_seen_tokens, child.takes_drafts = (
            parent.needs_seen_tokens,
            parent.takes_drafts,
        )
        if self.scheduler.fork(parent, child, tokens):
            self._num_added += 1
            self._live.append(child.request_id)
            self._know(child)
            self._decided[child.request_id] = {*range(len(child.output_token_ids))}
            self._counts["forked"] += 1

    def force(self) -> None:
        """Make a request go on with tokens that the host decides."""
        found = self._continuable()
        if found is not None:
            request, tokens = found
            self.scheduler.force(request, tokens)
            length = len(request.output_token_ids)
            self._seen[request.request_id] = list(request.output_token_ids)
            self._decided[request.request_id] |= {*range(length - len(tokens), length)}
            self._counts["forced"] += 1

    def land(self) -> None:
        """Copies to the host end, or some are lost; in an episode that is told of them."""
        if self._lands:
            count = self._rng.randint(1, 30)
            self._device.land(count, lost=self._rng.choice([0, 0, 0, 1, count]))

    def reset(self) -> None:
        """Forget what was computed so far."""
        self.scheduler.reset_prefix_cache()

    def _continuable(self) -> tuple[Request, list[int]] | None:
        """A request that can go on with other tokens, and the tokens."""
        able = [
            r
            for r in self.scheduler.running
            if not r.is_prefilling and not r.pending and r.request_id not in self._search_of
        ]
        if not able:
            return None
        request, tokens = self._rng.choice(able), self._tokens(self._rng.randint(1, 3))
        length = request.num_computed - request.num_prompt + len(tokens)
        return (request, tokens) if length < request.stop_rule.max_tokens else None

    def _know(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._seen[request.request_id] = list(request.output_token_ids)
        self._decided[request.request_id] = set()

    def _commit(self, plan: StepPlan, sampled: tuple[list[int], list[int]]) -> None:
        tokens, counts = sampled
        seen = self.scheduler.commit(plan, tokens, counts if self._drafts else None)
        rest = self._take(seen)
        for request, token in zip(rest.requests, rest.tokens, strict=True):
            self._seen[request.request_id].append(token)
        for entry in rest.ends:
            assert rest.requests[entry].state is RequestState.FINISHED
            self._counts["ended by a token"] += 1

    def _take(self, seen: SeenTokens) -> SeenTokens:
        """Give the beams their tokens; returns those of the others."""
        logprobs = {}
        for entry, request in enumerate(seen.requests):
            search = self._search_of.get(request.request_id)
            if search is not None:
                # the device has computed what the host believes
                context = request.prompt_token_ids + request.output_token_ids[:-1]
                token = seen.tokens[entry]
                assert token == next_token(context, VOCAB)
                ids, values = zip(*likely_tokens(context, VOCAB, search.count))
                ranks = [1, *range(1, len(ids) + 1)]
                logprobs[request.request_id] = TokenLogprobs([token, *ids], [-1.0, *values], ranks)
        rest, found = self._beams.take(seen, logprobs)
        for name, sequences in found.items():
            assert self._searches[name].found is None, "a search ended twice"
            self._searches[name].found = sequences
        return rest

    def _queueing(self) -> Queueing:
        rng = self._rng
        return Queueing(0.0, rng.randint(0, 2), client=rng.choice(self._clients))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCAB) for _ in range(count)]


# what is done, how often in comparison, and how
OPERATIONS: dict[str, tuple[float, Callable[[Episode], Any]]] = {
    "add": (3.0, Episode.add),
    "search": (0.3, Episode.search),
    "abort": (0.5, Episode.abort),
    "abort a search": (0.1, Episode.abort_search),
    "step": (10.0, Episode.step),
    "fork": (0.5, Episode.fork),
    "force": (0.5, Episode.force),
    "reset": (0.02, Episode.reset),
    "land": (6.0, Episode.land),
}


def prove(operations: int, seed: int) -> Counter[str]:
    """Run episodes; what was done and seen.

    Raises:
        AssertionError: something does not hold; a note names the episode.
    """
    counts: Counter[str] = Counter()
    for number in range(-(-operations // EPISODE)):
        try:
            episode = Episode(random.Random(f"{seed}.{number}"), counts)
            for _ in range(min(EPISODE, operations - number * EPISODE)):
                episode.operate()
            episode.finish()
        except Exception as error:
            error.add_note(f"in episode {number} of seed {seed}")
            raise
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    counts = prove(options.operations, options.seed)
    seconds = time.monotonic() - begin
    for name, count in counts.items():
        print(f"{count:>12,} {name}")
    print(
        f"{sum(counts[name] for name in OPERATIONS):>12,} operations in {seconds:.0f} s: all held"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
