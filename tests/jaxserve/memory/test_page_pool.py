"""The page pool conserves pages under any sequence of operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.memory.page_pool import PagePool


@given(st.integers(2, 40), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9))))
def test_pages_are_conserved(num_pages: int, operations: list[tuple[int, int]]) -> None:
    pool, holders = PagePool(num_pages), []
    for operation, amount in operations:
        if operation == 0:
            if amount > pool.num_free:
                with pytest.raises(MemoryError, match="pages wanted"):
                    pool.allocate(amount)
            else:
                holders.append(pool.allocate(amount))
        elif holders and operation == 1:
            pool.release(holders.pop(amount % len(holders)))
        elif holders:
            shared = holders[amount % len(holders)][: amount + 1]
            pool.share(shared)
            holders.append(shared)
        pool.check_integrity(holders)
        assert pool.num_free + pool.num_used == num_pages - 1
        assert all(page != 0 for pages in holders for page in pages)
    for pages in holders:
        pool.release(pages)
    assert pool.num_used == 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1)
    pool = PagePool(4)
    with pytest.raises(ValueError, match="was free"):
        pool.release([2])
    with pytest.raises(ValueError, match="was free"):
        pool.share([2])


def test_integrity_check_sees_a_leak_and_a_page_with_two_owners() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    for holders in ([], [pages, pages]):
        with pytest.raises(AssertionError):
            pool.check_integrity(holders)
