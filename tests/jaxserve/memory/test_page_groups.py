"""The pages that groups of layers with a window need, against the definition."""

from __future__ import annotations

from random import Random

import pytest

from jaxserve.memory.page_groups import PageGroups
from jaxserve.memory.page_keys import group_key, page_keys


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_a_window_needs_what_the_next_token_sees_of_full_pages_and_not_a_page_more(
    window: int, page_size: int
) -> None:
    groups = PageGroups(1, 2, window)
    for num_tokens in range(40):
        next_token = num_tokens // page_size * page_size
        seen = [key for key in range(next_token) if next_token - key < window]
        first = min(seen, default=next_token) // page_size
        assert groups.first_index(num_tokens, page_size) == first


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 7, 33])
def test_a_prompt_never_holds_more_than_is_reckoned(window: int, page_size: int) -> None:
    for ahead in (3, 8, 40):
        groups = PageGroups(1, 2, window, ahead)
        for length in (1, 30, 100, 200):
            pages, most = -(-length // page_size), groups.most_held(length, page_size)
            for computed in range(length):
                reached = -(-min(length, groups.reach(computed)) // page_size)
                assert reached * page_size >= min(length, computed + ahead)
                held = reached - groups.first_index(computed, page_size)
                assert pages + 2 * held <= most
            assert groups.longest(most, page_size, 10**6) >= length
            assert groups.most_held(groups.longest(most, page_size, 10**6), page_size) <= most


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("groups", [PageGroups(), PageGroups(0, 2, 5), PageGroups(2, 1, 9)])
def test_a_beginning_is_the_longest_that_all_groups_have(groups: PageGroups, seed: int) -> None:
    rng, size = Random(seed), 4
    keys, share = page_keys([*range(40)], size, b""), rng.choice([0.05, 0.1, 0.3])
    missing = {(i, g) for i in range(10) for g in range(3) if rng.random() < share}
    lost = {group_key(keys[i], g) for i, g in missing}

    def is_whole(count: int) -> bool:
        first = groups.first_index(count * size, size)
        needed = {(i, g) for i in range(count) for g in range(groups.num_full)}
        needed |= {(i, g) for i in range(first, count) for g in groups.windowed}
        return not needed & missing

    first, count = groups.beginning(keys, size, lambda key: key not in lost)
    assert count == max(filter(is_whole, range(11)))
    places = dict(groups.places(keys, first, count))
    assert not lost & {*places.values()}
    assert len(places) == count * groups.num_full + (count - first) * groups.num_windowed
    _, whole = groups.beginning(keys, size, lambda key: True)
    needed = sum(1 for _ in groups.places(keys, groups.first_index(40, size), whole))
    assert groups.most_spared(40, size) == pytest.approx(whole * groups.num_groups / needed - 1)


def test_groups_without_a_window_hold_all() -> None:
    assert PageGroups().most_held(33, 16) == 3 and not PageGroups().windowed
    assert PageGroups().longest(3, 16, 100) == 48 and PageGroups().longest(3, 16, 33) == 33
    assert [*PageGroups(2, 3, 9).windowed] == [2, 3, 4]
    assert PageGroups(0, 1, 9, 4).longest(20, 16, 5000) == 5000, "any length has room"
