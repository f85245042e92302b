"""Stored responses that go where there is no room: those of the owner that asks."""

from __future__ import annotations

import asyncio
from typing import Any

from server.response_store import ResponseStore, StoredResponse


class Making:
    """A task that has not ended."""

    def done(self) -> bool:
        return False


def kept(num_bytes: int, *, made: bool = True, **fields: Any) -> StoredResponse:
    one = StoredResponse(b"x" * num_bytes, b"", **fields)
    one.task = None if made else Making()  # type: ignore[assignment]
    return one


def names(store: ResponseStore, owner: str) -> str:
    return "".join(name for name in "abcdefghij" if store.peek(owner, name))


def test_one_owner_has_the_whole_store() -> None:
    store = ResponseStore(3, 100)
    for name in "abcd":
        assert store.put("A", name, kept(30))
    assert names(store, "A") == "bcd" and store.get("A", "b")
    assert store.put("A", "e", kept(50))
    assert names(store, "A") == "be", "what was used last stays"
    assert store.put("A", "f", kept(100)) and names(store, "A") == "f"
    assert not store.put("A", "g", kept(101))
    assert not ResponseStore(0, 100).put("A", "a", kept(1))
    store = ResponseStore(10, 100)
    assert all(store.put("A", name, kept(25, made=False)) for name in "abcd")
    assert not store.put("A", "e", kept(1, made=False)) and not store.put("A", "e", kept(1))
    assert names(store, "A") == "abcd" and store.num_bytes == 100


def test_an_owner_cannot_drive_out_anothers_share() -> None:
    store = ResponseStore(10, 100, owners=2)
    assert store.put("B", "a", kept(40))
    for name in "abcdefghij":
        assert store.put("A", name, kept(30))
    assert names(store, "B") == "a" and names(store, "A") == "ij"
    # what is being made cannot be dropped: of that there may be a share
    made = [store.put("A", name, kept(20, made=False, needed=5)) for name in "abcd"]
    assert made == [True, True, False, False]
    assert names(store, "B") == "a" and store.num_bytes <= 100
    assert not store.put("A", "e", kept(61)) and names(store, "B") == "a"
    for number in range(20):  # small ones, by their number
        store.put("A", f"{number}", kept(0))
    assert names(store, "B") == "a" and store.count == 10


def test_what_cannot_be_given_back_stays_within_the_share() -> None:
    store = ResponseStore(10, 100, owners=2)
    made = [store.put("A", name, kept(20, made=False)) for name in "abc"]
    assert made == [True, True, False], "though no other has anything"
    assert store.put("B", "a", kept(50)) and names(store, "A") == "ab"


def test_what_others_leave_free_is_given_back() -> None:
    store = ResponseStore(10, 100, owners=2)
    for name in "abcde":
        assert store.put("A", name, kept(20))
    assert store.put("B", "a", kept(30)), "A has more than its share"
    assert names(store, "A") == "cde"
    assert not store.put("B", "b", kept(80)), "it would be more than B's share"
    assert (names(store, "A"), names(store, "B")) == ("cde", "")


def test_tools_are_kept_once_for_each_owner() -> None:
    store = ResponseStore(10, 1000, owners=2)
    for owner in "AB":
        for name in "abc":
            tools = bytes(bytearray(b"[%s]" % (b"t" * 98)))  # equal, and another object
            assert store.put(owner, name, StoredResponse(b'{"x":12', tools))
    assert store.num_bytes == 2 * (3 * 7 + 100)
    first, second = store.get("A", "a"), store.get("A", "b")
    assert first is not None and second is not None and first.tools is second.tools
    assert b"".join(first.pieces) == b'{"x":12,"tools":[%s]}' % (b"t" * 98)
    store.remove("A", "a"), store.remove("A", "b")
    assert store.num_bytes == (7 + 100) + (3 * 7 + 100)
    store.put("A", "c", StoredResponse(b"{}", b"[]"))  # in place of the last with those tools
    assert store.num_bytes == (2 + 2) + (3 * 7 + 100)
    for name in "abc":
        store.remove("B", name)
    store.remove("A", "c")
    assert (store.num_bytes, store.count) == (0, 0)
    asyncio.run(store.close())
