"""Page keys name what pages hold, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.memory.page_keys import KEY_BYTES, page_keys, root_key

tokens = st.lists(st.integers(0, 3), max_size=20)
extras = st.lists(st.sampled_from(["", "a", "b", "ab"]), max_size=2)


@given(tokens, tokens, extras, extras, st.sampled_from([1, 2, 4]))
def test_keys_are_equal_exactly_where_prefixes_are(one, other, of_one, of_other, size) -> None:
    mine, its = page_keys(one, size, root_key(of_one)), page_keys(other, size, root_key(of_other))
    assert len(mine) == len(one) // size and all(len(key) == KEY_BYTES for key in mine)
    for index, (a, b) in enumerate(zip(mine, its), start=1):
        same = one[: index * size] == other[: index * size] and of_one == of_other
        assert (a == b) == same


def test_a_key_does_not_depend_on_what_follows_it() -> None:
    assert page_keys([1, 2, 3, 4, 5], 2, root_key()) == page_keys([1, 2, 3, 4], 2, root_key())


def test_keys_go_on_from_the_key_before_them() -> None:
    keys = page_keys([1, 2, 3, 4, 5, 6], 2, root_key())
    assert page_keys([3, 4, 5, 6], 2, keys[0]) == keys[1:]
