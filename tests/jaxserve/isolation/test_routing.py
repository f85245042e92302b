"""Which engine a request goes to."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.isolation import routing as routing_module
from jaxserve.isolation.routing import STICKY_TOKENS, Routing

PAGE = 16


def keys_of(*pages: int) -> list[bytes]:
    """Keys of a prompt's pages: each names all pages up to it."""
    return [repr(pages[: end + 1]).encode() for end in range(len(pages))]


def tokens(keys: list[bytes], more: int = 3) -> int:
    return PAGE * len(keys) + more


prompts = st.lists(st.integers(0, 2), min_size=0, max_size=5).map(lambda pages: keys_of(*pages))
works = st.dictionaries(st.integers(0, 3), st.integers(0, 2000), min_size=1, max_size=4)
salts = st.sampled_from([None, "a", "b"])
clients = st.sampled_from(["", "x", "y"])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(prompts, works, salts, clients), max_size=20))
def test_the_engine_that_has_the_least_to_compute_is_chosen(asked) -> None:
    """Against the rule, written down again over all that was ever sent."""
    routing = Routing(PAGE)
    sent: list[set[bytes]] = [set() for _ in range(4)]
    homes: dict[str, int] = {}
    for keys, work, salt, client in asked:

        def cost(engine: int, keys=keys, work=work) -> int:
            found = [key in sent[engine] for key in keys]
            num_found = found.index(False) if False in found else len(found)
            return work[engine] + tokens(keys) - PAGE * num_found

        least = min(cost(engine) for engine in work)
        names = [] if salt is None else [salt]
        chosen = routing.choose(work, tokens(keys), keys, names=names, client=client)
        assert chosen in work
        home = None if salt is None else homes.get(salt)
        if home in work and cost(home) <= least + STICKY_TOKENS:
            assert chosen == home
        else:
            assert cost(chosen) == least
        sent[chosen].update(keys)
        if salt is not None:
            homes[salt] = chosen


def test_a_long_prefix_draws_a_request_until_computing_it_elsewhere_costs_less() -> None:
    keys = keys_of(*range(10))
    for queued, expected in ((0, 0), (10 * PAGE - 1, 0), (10 * PAGE + 1, 1)):
        routing = Routing(PAGE)
        routing.choose({0: 0}, tokens(keys), keys)
        assert routing.choose({0: queued, 1: 0}, tokens(keys), keys) == expected


def test_the_longest_prefix_wins_among_engines_with_equal_work() -> None:
    routing = Routing(PAGE)
    for engine, count in ((0, 1), (1, 3), (2, 2)):
        routing.choose({engine: 0}, 0, keys_of(*range(count)))
    assert routing.choose({0: 5, 1: 5, 2: 5}, tokens(keys_of(*range(4))), keys_of(*range(4))) == 1


def test_equals_take_turns_and_a_client_goes_where_it_was() -> None:
    routing = Routing(PAGE)
    idle = {0: 0, 1: 0, 2: 0}
    assert {routing.choose(idle, 5, client=f"c{index}") for index in range(3)} == {0, 1, 2}
    home = routing.choose(idle, 5, client="c1")
    assert [routing.choose(idle, 5, client="c1") for _ in range(3)] == [home] * 3
    assert routing.choose(idle | {home: 1}, 5, client="c1") != home, "work goes before habit"


def test_a_name_stays_while_its_engine_is_not_much_busier() -> None:
    routing = Routing(PAGE)
    home = routing.choose({0: 0, 1: 0}, 5, names=["s"])
    busy = {home: STICKY_TOKENS, 1 - home: 0}
    assert routing.choose(busy, 5, names=["s"]) == home
    assert routing.choose(busy | {home: STICKY_TOKENS + 1}, 5, names=["s"]) == 1 - home
    assert routing.choose({0: 0, 1: 0}, 5, names=["s"]) == 1 - home, "it has moved"
    assert routing.choose({home: 0}, 5, names=["s"]) == home, "no engine that may not be chosen"
    other = routing.choose({1 - home: 0}, 5, names=["t"])
    assert routing.choose({0: 0, 1: 0}, 5, names=["t", "s"]) == other, "the first name goes first"


def test_an_engine_that_has_died_has_nothing() -> None:
    routing, keys = Routing(PAGE), keys_of(1, 2)
    routing.choose({0: 0}, tokens(keys), keys)
    assert routing.num_found(0, keys) == 2
    routing.forget(0)
    assert routing.num_found(0, keys) == 0


def test_what_is_remembered_is_bounded_and_the_ends_of_old_prompts_go_first(monkeypatch) -> None:
    monkeypatch.setattr(routing_module, "MOST_NAMES", 8)
    routing = Routing(PAGE, most_keys=6)
    old, new = keys_of(1, 2, 3, 4), keys_of(5, 6, 7, 8)
    routing.choose({0: 0}, tokens(old), old)
    routing.choose({0: 0}, tokens(new), new)
    assert routing.num_found(0, new) == 4 and routing.num_found(0, old) == 2
    for index in range(50):
        routing.choose({0: 0}, 9, keys_of(100 + index), client=f"c{index}")
    assert len(routing._sent[0]) == 6 and len(routing._homes) == 8


class Cache:
    """An engine's prefix cache of so many pages, the least recently used go."""

    def __init__(self, pages: int) -> None:
        self.pages, self.kept = pages, OrderedDict[bytes, None]()

    def serve(self, keys: list[bytes]) -> int:
        found = next((n for n, key in enumerate(keys) if key not in self.kept), len(keys))
        for key in reversed(keys):
            self.kept[key] = None
            self.kept.move_to_end(key)
        while len(self.kept) > self.pages:
            self.kept.popitem(last=False)
        return found


def hits(routed: bool, engines: int = 4, pages: int = 60, turns: int = 600) -> float:
    """The share of pages that caches have, of 24 conversations that grow, in a random order."""
    chance, routing = random.Random(3), Routing(PAGE, pages)
    caches, loads = [Cache(pages) for _ in range(engines)], [0.0] * engines
    lengths, found, asked = [2] * 24, 0, 0
    for turn in range(turns):
        one = chance.randrange(24)
        keys = keys_of(one, *range(lengths[one]))
        lengths[one] = lengths[one] % 8 + 1
        work = dict(enumerate(loads))
        engine = routing.choose(work, tokens(keys), keys) if routed else turn % engines
        here = caches[engine].serve(keys)
        found, asked = found + here, asked + len(keys)
        loads = [0.7 * load for load in loads]
        loads[engine] += PAGE * (len(keys) - here) + 20
    return found / asked


def test_conversations_find_more_of_their_pages_than_by_turns() -> None:
    routed, by_turns = hits(True), hits(False)
    print(f"pages found: {routed:.0%} routed, {by_turns:.0%} by turns")
    assert routed > 1.3 * by_turns


@pytest.mark.parametrize("engines", [2, 3])
def test_equal_requests_are_spread_by_their_work(engines: int) -> None:
    routing, work = Routing(PAGE), [0.0] * engines
    chance = random.Random(engines)
    for index in range(300):
        size = chance.choice([20, 200])
        engine = routing.choose(dict(enumerate(work)), size, client=f"c{index % 5}")
        work[engine] += size
    assert max(work) - min(work) <= 200
