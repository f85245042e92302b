"""The page pool conserves pages under any sequence of operations, and forgets the oldest first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.memory.host_tier import HostTier
from jaxserve.memory.page_pool import PagePool
from jaxserve.memory.tier import Move


@given(st.integers(2, 40), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9))))
def test_pages_are_conserved(num_pages: int, operations: list[tuple[int, int]]) -> None:
    pool, holders, content = PagePool(num_pages), [], dict[bytes, int]()
    for number, (operation, amount) in enumerate(operations):
        key = bytes([amount])
        if operation == 0:
            if amount > pool.num_free:
                with pytest.raises(MemoryError, match="pages wanted"):
                    pool.allocate(amount)
            else:
                holders.append(pool.allocate(amount))
                # they are written to
                content = {k: page for k, page in content.items() if page not in holders[-1]}
        elif operation == 3:
            found = pool.index.find([key])
            assert found == [content[key]] if found else key not in content
            pool.share(found)
            holders.append(found)
        elif operation == 4 and number % 7 == 0:
            pool.forget_all()
            content = {}
        elif holders and operation == 1:
            pool.release(holders.pop(amount % len(holders)))
        elif holders:
            shared = holders[amount % len(holders)][: amount + 1]
            pool.share(shared)
            holders.append(shared)
            if shared and key not in content and shared[0] not in content.values():
                content[key] = shared[0]
                pool.index.put(key, shared[0])
        pool.check_integrity(holders)
        assert pool.num_free + pool.num_used == num_pages - 1
        assert all(page != 0 for pages in holders for page in pages)
    for pages in holders:
        pool.release(pages)
    assert pool.num_used == 0


def test_pages_that_nobody_can_find_go_first_and_then_those_freed_first() -> None:
    pool = PagePool(8)
    prefix, other, plain = pool.allocate(3), pool.allocate(2), pool.allocate(2)
    for place, page in enumerate(prefix + other):
        pool.index.put(bytes([place]), page)
    for pages in (prefix, other, plain):
        pool.release(pages)
    assert pool.num_free == 7 and pool.num_reclaimable == 5
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert pool.allocate(1) == prefix[-1:], "the end of a prefix is of no use to its beginning"
    assert pool.index.find([bytes([i]) for i in range(3)]) == prefix[:2]
    pool.share(prefix[:2])
    pool.release(prefix[:2])
    assert pool.allocate(2) == other[::-1], "the prefix was used after them"


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


def test_integrity_check_sees_a_known_page_that_is_not_kept() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.release(pages)
    pool.index.put(b"key", pages[0])
    with pytest.raises(AssertionError, match="reclaimed"):
        pool.check_integrity([])


def test_a_known_page_moves_to_the_tier_when_it_is_handed_out_and_back_when_it_is_wanted() -> None:
    pool = PagePool(3, HostTier(1))
    known = pool.allocate(2)
    for key, page in zip((b"a", b"b"), known, strict=True):
        pool.index.put(key, page)
    pool.release(known)
    last, first = pool.allocate(2)
    assert [last, first] == known[::-1], "the one freed first"
    assert pool.index.moves == [Move(last, 0, leaves=True), Move(first, 0, leaves=True)]
    assert pool.index.bring([b"b"], [first]) == 0, "its host page was given away"
    assert pool.index.bring([b"a", b"b"], [last, first]) == 1
    assert pool.index.moves[2:] == [Move(last, 0, leaves=False)]
    assert pool.index.find([b"a"]) == [last]
    pool.forget_all()
    assert pool.index.bring([b"a"], [last]) == 0


def test_a_reset_takes_back_what_was_to_leave_and_not_what_is_to_come() -> None:
    pool = PagePool(4, HostTier(4))
    pages = pool.allocate(3)
    for key, page in zip((b"a", b"b", b"c"), pages, strict=True):
        pool.index.put(key, page)
    pool.release(pages)
    taken = pool.allocate(2)
    pool.index.bring([b"c"], taken[:1])
    back = [move for move in pool.index.moves if not move.leaves]
    assert len(back) == 1 and len(pool.index.moves) == 3
    pool.forget_all()
    assert pool.index.moves == back
