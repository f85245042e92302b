"""The host's memory as a tier: what it finds holds what its key names, whatever happened before."""

from __future__ import annotations

from collections import deque
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.memory.cold_store import ColdStore
from jaxserve.memory.host_tier import HostPageState, HostTier, MoveCosts
from jaxserve.memory.manager import PageManager
from jaxserve.request.request import Request
from tests.jaxserve.requests import make_request

KEYS = [bytes([number]) for number in range(9)]


def told(num_pages: int, **options: Any) -> HostTier:
    tier = HostTier(num_pages, **options)
    tier.is_told = True
    return tier


def test_the_least_recently_used_is_given_away_and_a_beginning_after_its_end() -> None:
    tier = HostTier(3)
    assert [tier.leaves(key) for key in KEYS[:3]] == [0, 1, 2]
    assert tier.leaves(KEYS[1]) is None, "it is there"
    assert tier.find(KEYS[:2]) == [0, 1]
    assert tier.leaves(KEYS[3]) == 2, "of all the one used longest ago"
    assert tier.leaves(KEYS[4]) == 1, "the end of what was found, and not its beginning"
    assert tier.find(KEYS[:2]) == [0]
    assert (tier.stats().num_out, tier.stats().num_back) == (5, 3)
    tier.forget_all()
    assert tier.find(KEYS) == [] and tier.stats().num_held == 0


def test_what_is_on_its_way_is_neither_found_nor_given_away() -> None:
    tier = told(2)
    notes = {page: tier.leaving(page) for key in KEYS[:2] for page in [tier.leaves(key)]}
    assert tier.find(KEYS[:2]) == [] and tier.leaves(KEYS[2]) is None
    tier.landed(0, notes[0], [])
    assert tier.find(KEYS[:2]) == [0]
    assert [*tier.states()] == [HostPageState.HELD, HostPageState.ARRIVING]
    tier.lost(1, notes[1])
    assert tier.find(KEYS[1:2]) == [] and tier.leaves(KEYS[2]) == 1
    assert tier.stats().num_lost == 2
    late = tier.leaving(1)
    tier.forget_all()
    tier.check_integrity()
    assert [tier.leaves(key) for key in KEYS[3:5]] == [0, None], "1 is still written to"
    tier.landed(1, late, [])
    assert tier.leaves(KEYS[5]) == 1 and tier.find(KEYS[2:3]) == []
    tier.check_integrity()


def test_pages_that_are_filled_with_what_is_forgotten_are_not_to_be_had() -> None:
    tier = told(1)
    page = tier.leaves(KEYS[0])
    assert page is not None
    note = tier.leaving(page)
    tier.forget_all()
    assert tier.leaves(KEYS[1]) is None and tier.stats().num_lost == 1
    tier.landed(page, note, [])
    assert tier.leaves(KEYS[1]) == page
    tier.check_integrity()


def test_a_move_that_takes_longer_than_computing_is_not_made() -> None:
    tier = HostTier(9, MoveCosts(pages=4, call_seconds=1.0, recompute_seconds=0.4))
    for key in KEYS[:6]:
        tier.leaves(key)
    assert tier.find(KEYS[:2]) == [], "0.8 s of computing are less than a call"
    assert tier.stats().num_recomputed == 2
    assert tier.find(KEYS[:2], 1) == [0, 1], "a third page need not be computed either"
    assert tier.find(KEYS[:3]) == [0, 1, 2] and tier.find(KEYS[:6]) == [*range(6)]
    never = HostTier(9, MoveCosts(pages=4, call_seconds=1.0, recompute_seconds=0.2))
    assert never.leaves(KEYS[0]) is None
    costs = MoveCosts(pages=4, call_seconds=1.0, recompute_seconds=0.2, most_spared=0.5)
    assert HostTier(9, costs).leaves(KEYS[0]) == 0, "six pages are spared by four"
    cold = MagicMock(ColdStore)
    cold.__contains__.return_value = True
    cold.pays.return_value = False
    assert HostTier(9, costs, cold).fetch(KEYS[:2], 5) is None
    cold.pays.assert_called_once_with(2, 0.2, 5)


class Tiers(RuleBasedStateMachine):
    """Sequences over a few prompts own, keep and give back pages of both tiers.

    Copies to the host end when the machine says so, or never. Pages hold the key that they were
    computed for, and so it is seen when one holds another's.
    """

    SIZE = 2

    def __init__(self) -> None:
        super().__init__()
        self.tier = told(5)
        self.pages = PageManager(9, self.SIZE, tier=self.tier)
        self.device: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.on_their_way: deque[tuple[int, Any, bytes]] = deque()
        self.running: list[Request] = []
        self.num_begun = 0

    @rule(first=st.integers(0, 2), length=st.integers(2, 12), tail=st.integers(0, 3))
    def begin(self, first: int, length: int, tail: int) -> None:
        request = make_request(f"{self.num_begun}", [first] * length + [7] * tail)
        self.num_begun += 1
        if not self.pages.reserve(request, self.pages.find(request), request.num_tokens + 1):
            return
        self.running.append(request)
        self.move()
        found, request.num_computed = request.num_computed // self.SIZE, request.num_tokens
        self.pages.keep(request, request.num_tokens)
        keys = (request.page_keys or [])[: request.num_tokens // self.SIZE]
        held = [self.device.get(page) for page in request.pages[:found]]
        assert held == keys[:found], "what was found is another's"
        for place, page in enumerate(request.pages[found:], found):
            self.device[page] = keys[place] if place < len(keys) else b"partial"

    def move(self) -> None:
        for page, host_page, leaves in self.pages.take_moves():
            if leaves:
                note = self.tier.leaving(host_page)
                self.on_their_way.append((host_page, note, self.device[page]))
            else:
                self.device[page] = self.host[host_page]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.running) - 1))
        self.pages.release(self.running.pop(place))

    @precondition(lambda self: self.on_their_way)
    @rule(arrives=st.sampled_from([True, True, True, False]))
    def copy_ends(self, arrives: bool) -> None:
        host_page, note, content = self.on_their_way.popleft()
        if arrives:
            self.host[host_page] = content
            self.tier.landed(host_page, note, [])
        else:
            self.tier.lost(host_page, note)

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if not chance:
            self.pages.forget_all([])

    @rule()
    def lose_a_plan(self) -> None:
        """A step fails before its moves are dispatched: the engine forgets all."""
        if self.pages.take_moves():
            self.pages.forget_all([])

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pages.check_integrity(self.running, [])
        states = self.tier.states()
        assert len(states) == 5


Tiers.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTiers = Tiers.TestCase


@pytest.mark.slow
class TestTiersForLong(Tiers.TestCase):  # type: ignore[misc,name-defined]
    """100,000 operations."""

    settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)
