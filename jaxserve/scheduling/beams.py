"""Beam searches on the scheduler: their sequences fork, are dropped, and wait for each other."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxserve.boundary.messages import AddGroup, Hypothesis
from jaxserve.boundary.reports import TokenLogprobs
from jaxserve.request.request import Request, RequestState
from jaxserve.request.stop_rule import End, FinishReason, StopRule
from jaxserve.scheduling.beam_search import BeamSearch
from jaxserve.scheduling.plan import SeenTokens, StepPlan
from jaxserve.scheduling.scheduler import Scheduler

_NO_TOKENS = frozenset[int]()


def _beam_rule(rule: StopRule) -> StopRule:
    """Of a sequence in a search that ends by `rule`: the search always comes first."""
    return StopRule(_NO_TOKENS, _NO_TOKENS, 0, rule.max_tokens + 1)


@dataclass(slots=True)
class _Member:
    """What becomes of one beam.

    Attributes:
        request: that computes it; None once the candidates are known and its slot was given up.
        candidates: the tokens that may follow; None until they are known.
    """

    request: Request | None
    candidates: list[tuple[int, float]] | None = None


@dataclass(slots=True)
class _Group:
    """One search.

    Attributes:
        name: its id, which is that of its first sequence.
        search: decides which beams are followed.
        asked: what each sequence is asked for.
        make: makes the request of a sequence, from its id and `asked`.
        members: by beam.
        orders: places in the order of arrival that no member has: as many as the width in all, so
            that a sequence made late has the turn of its group.
        num_made: sequences so far.
    """

    name: str
    search: BeamSearch
    asked: AddGroup
    make: Callable[[str, AddGroup], Request]
    members: list[_Member]
    orders: list[int]
    num_made: int = 1


def _candidates(request: Request, found: TokenLogprobs) -> list[tuple[int, float]]:
    """What may follow a beam; the sampled token comes first, and comes again."""
    if request.error is not None:
        return []
    pairs = zip(found.ids[1:], found.logprobs[1:], strict=True)
    return [(token, logprob) for token, logprob in pairs if logprob > -math.inf]


def _failed(request: Request | None) -> Hypothesis:
    """What is told of a search that has found nothing, by the request of its first beam."""
    error = None if request is None else request.error
    return Hypothesis([], 0.0, End(error or FinishReason.ERROR, None))


class BeamGroups:
    """All beam searches of a scheduler.

    Each beam is a request. It samples a token for which the device reports the most likely ones;
    then it is paused. When those of all beams are known, some are forced to go on with another
    token, some fork, and some are dropped. A beam never holds a slot for nothing: while another
    one of its group waits for one, those that are paused give theirs up. What they had computed is
    found by the prefix cache, or computed again: a search may be wider than there are slots, and
    blocks no request. One that may shrink gives its least likely beams up instead while another
    beam waits for pages.

    Args:
        scheduler: computes the beams.
        ended: called with the id of each sequence that is dropped.

    Attributes:
        num_shrinks: beams that were given up for want of pages.
    """

    def __init__(self, scheduler: Scheduler, ended: Callable[[str], None] = lambda name: None):
        self.num_shrinks = 0
        self._ended = ended
        self._scheduler = scheduler
        self._groups: dict[str, _Group] = {}
        self._by_request: dict[str, _Group] = {}
        self._found: dict[str, list[Hypothesis]] = {}  # not told to the client yet

    def __bool__(self) -> bool:
        return bool(self._groups or self._found)

    def add(self, asked: AddGroup, make: Callable[[str, AddGroup], Request]) -> None:
        """Begin a search. Its name is the first id of the message.

        Args:
            asked: a message with `beams`.
            make: the request of a sequence from its id and a message, prepared for the device.
        """
        assert asked.beams is not None
        name, rule = asked.sequence_ids[0], asked.stop_rule
        search, orders = BeamSearch(asked.beams, rule), asked.beams.beam_width
        of_beam = replace(asked, stop_rule=_beam_rule(rule))
        group = _Group(name, search, of_beam, make, [], self._scheduler.take_orders(orders))
        self._groups[name] = group
        first = self._make(group, name)
        group.members = [_Member(first)]
        self._scheduler.add(first)

    def name_of(self, request_id: str) -> str | None:
        """The search that one of its sequences belongs to; None if it is of none."""
        group = self._by_request.get(request_id)
        return None if group is None else group.name

    def abort(self, name: str) -> bool:
        """End a search; False if there is none of that name."""
        group = self._groups.pop(name, None)
        if group is None:
            return False
        for member in group.members:
            self._drop(group, member)
        return True

    def plan(self) -> StepPlan:
        """Decide the next step, see `Scheduler.plan`: no paused beam is in the way of its group.

        A plan may preempt a beam, so that of its group only paused ones run. If nothing else runs
        either, the plan is empty, and the next is made without the paused ones.
        """
        self._give_way()
        plan = self._scheduler.plan()
        while not plan and self._give_way():
            plan = self._scheduler.plan()
        return plan

    def _give_way(self) -> bool:
        """A paused beam gives its slot up if another of its group waits for one; False: none did.

        A group that may shrink gives up beams first.
        """
        num_shrinks, gives_way = self.num_shrinks, False
        for group in list(self._groups.values()):
            if group.search.may_shrink:
                self._shrink(group)
            waits = any(
                member.candidates is None
                and member.request is not None
                and member.request.state is RequestState.WAITING
                for member in group.members
            )
            for member in group.members:
                request = member.request
                if member.candidates is None or request is None:
                    continue
                if waits or request.state is RequestState.WAITING:
                    self._drop(group, member)
                    gives_way = True
        return gives_way or self.num_shrinks > num_shrinks

    def _shrink(self, group: _Group) -> None:
        """Give beams up, the least likely first, while one waits for pages that are not free."""
        lacks_pages = self._scheduler.lacks_pages
        while len(group.members) > 1 and any(
            member.request is not None and lacks_pages(member.request) for member in group.members
        ):
            self._drop(group, group.members.pop())
            group.search.shrink()
            self.num_shrinks += 1
            if all(member.candidates is not None for member in group.members):
                self._advance(group)

    def take(
        self, seen: SeenTokens, logprobs: dict[str, TokenLogprobs]
    ) -> tuple[SeenTokens, dict[str, list[Hypothesis]]]:
        """Take in what a step says of beams.

        Args:
            seen: its tokens.
            logprobs: what it tells of sequences; those of beams are taken out.

        Returns:
            what it says of the others, and what has been found by searches that are over.
        """
        rest = SeenTokens()
        told: dict[str, tuple[_Group, dict[str, _Member]]] = {}  # by group, of its requests
        for entry, request in enumerate(seen.requests):
            group = self._by_request.get(request.request_id)
            if group is None:
                place = len(rest.requests)
                rest.requests.append(request)
                rest.tokens.append(seen.tokens[entry])
                rest.samples.append(seen.samples[entry])
                if entry in seen.ends:
                    rest.ends[place] = seen.ends[entry]
                continue
            if group.name not in told:
                members = {m.request.request_id: m for m in group.members if m.request is not None}
                told[group.name] = group, members
            member = told[group.name][1][request.request_id]
            member.candidates = _candidates(request, logprobs.pop(request.request_id))
            request.is_paused = True
        for group, _ in told.values():
            if all(member.candidates is not None for member in group.members):
                self._advance(group)
        found_by, self._found = self._found, {}
        return rest, found_by

    def _advance(self, group: _Group) -> None:
        """All candidates are known: the next beams begin, none if the search is over."""
        parents = group.members
        first = parents[0].request
        followed = group.search.advance([member.candidates or [] for member in parents])
        children: dict[int, list[int]] = {}  # parent -> indices of the beams that continue it
        for index, continuation in enumerate(followed):
            children.setdefault(continuation.parent, []).append(index)
        for index, member in enumerate(parents):
            if index not in children:
                self._drop(group, member)
        group.members = [_Member(None) for _ in followed]
        for parent, beams in children.items():
            request = parents[parent].request
            if request is not None and request.state is not RequestState.RUNNING:
                self._drop(group, parents[parent])
                request = None
            # the parent goes on last: the others fork from what it has computed so far
            for index in beams[1:] if request is not None else beams:
                group.members[index].request = self._begin(group, request, index)
            if request is not None:
                group.members[beams[0]].request = request
                self._scheduler.force(request, [followed[beams[0]].token])
        if not followed:
            # a grammar may have failed in all of them
            self._found[group.name] = group.search.finished or [_failed(first)]
            del self._groups[group.name]

    def _begin(self, group: _Group, parent: Request | None, index: int) -> Request:
        """A new sequence for a beam; it computes what it cannot share."""
        name, tokens = f"{group.name}.{group.num_made}", group.search.beams[index].token_ids
        group.num_made += 1
        child = self._make(group, name)
        if parent is not None:
            child.begin_as(parent)
        # a beam that is not next in line waits like any other request
        may_fork = parent is not None and self._scheduler.waiting.lets_pass(child)
        if not (may_fork and parent and self._scheduler.fork(parent, child, tokens[-1:])):
            child.output_token_ids = [*tokens]
            self._scheduler.add(child)
        return child

    def _make(self, group: _Group, name: str) -> Request:
        request = group.make(name, group.asked)
        request.order = group.orders.pop(0)
        self._by_request[name] = group
        return request

    def _drop(self, group: _Group, member: _Member) -> None:
        """The request of a beam ends, if there is one."""
        request, member.request = member.request, None
        if request is not None:
            self._scheduler.abort(request.request_id)
            self._ended(request.request_id)
            del self._by_request[request.request_id]
            insort(group.orders, request.order)
