"""What groups of layers with a window need of a sequence's pages, against the definition."""

from __future__ import annotations

import pytest

from jaxserve.memory.page_groups import PageGroups


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
        pages = -(-num_tokens // page_size)
        assert groups.num_held(num_tokens, page_size) == pages + 2 * (pages - first)


def test_groups_without_a_window_hold_all() -> None:
    assert PageGroups().num_held(33, 16) == 3 and not PageGroups().windowed
    assert [*PageGroups(2, 3, 9).windowed] == [2, 3, 4]
