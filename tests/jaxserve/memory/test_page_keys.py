"""Page keys name what pages hold, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.memory.page_keys import KEY_BYTES, KeySpan, key_tokens, page_keys, root_key

tokens = st.lists(st.integers(0, 3), max_size=20)
extras = st.lists(st.sampled_from(["", "a", "b", "ab"]), max_size=2)


@given(tokens, tokens, extras, extras, st.sampled_from([1, 2, 4]))
def test_keys_are_equal_exactly_where_prefixes_are(one, other, of_one, of_other, size) -> None:
    mine, its = page_keys(one, size, root_key(of_one)), page_keys(other, size, root_key(of_other))
    assert len(mine) == len(one) // size and all(len(key) == KEY_BYTES for key in mine)
    for index, (a, b) in enumerate(zip(mine, its), start=1):
        same = one[: index * size] == other[: index * size] and of_one == of_other
        assert (a == b) == same


spans = st.lists(
    st.builds(KeySpan, st.integers(0, 6), st.integers(1, 12), st.sampled_from([b"a", b"b"])),
    max_size=2,
)


@given(st.lists(st.integers(-1, 2), min_size=18, max_size=18), spans, spans)
def test_keys_differ_from_the_first_place_that_depends_on_something_else(ids, one, other) -> None:
    mine, its = key_tokens(ids, "f", one), key_tokens(ids, "f", other)
    assert mine != its or sorted(one) == sorted(other)
    assert mine == its or one != other
    places = {at for span in one for at in range(span.start, span.start + span.length)}
    assert all(mine[at] < -1 if at in places else mine[at] == ids[at] for at in range(18))
    first = next((at for at, (a, b) in enumerate(zip(mine, its)) if a != b), 18)
    found = zip(page_keys(mine, 3, b""), page_keys(its, 3, b""))
    assert [a == b for a, b in found] == [(page + 1) * 3 <= first for page in range(6)]


def test_a_page_holds_more_of_a_span_than_could_be_tried() -> None:
    (word,) = key_tokens([5], "f", [KeySpan(0, 1, b"a")])
    assert -(2**63) <= word < -(2**50), "a page may have one place of a span"
    assert key_tokens([5], "g", [KeySpan(0, 1, b"a")]) != [word]
    assert len({*key_tokens([-1] * 8, "f", [KeySpan(0, 8, b"a")])}) == 8


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (3, 2), (4, 1), (0, 0)])
def test_a_span_lies_in_the_prompt(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="are no places of the 4 tokens"):
        key_tokens([1, 2, 3, 4], "f", [KeySpan(start, length, b"a")])


def test_a_key_does_not_depend_on_what_follows_it() -> None:
    assert page_keys([1, 2, 3, 4, 5], 2, root_key()) == page_keys([1, 2, 3, 4], 2, root_key())


def test_keys_go_on_from_the_key_before_them() -> None:
    keys = page_keys([1, 2, 3, 4, 5, 6], 2, root_key())
    assert page_keys([3, 4, 5, 6], 2, keys[0]) == keys[1:]
