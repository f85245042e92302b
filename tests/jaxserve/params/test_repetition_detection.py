"""Which repetitions end a text, against all patterns tried one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.errors import ValidationError
from jaxserve.params.repetition_detection import MAX_PATTERN, RepetitionDetectionParams
from jaxserve.params.sampling_params import SamplingParams


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(2, 4),
)
@example([0, 1, 1], 1, 0, 3)
@example([0, 1, 0, 1], 0, 1, 2)
def test_patterns_at_the_end(tokens: list[int], least: int, more: int, count: int) -> None:
    asked = RepetitionDetectionParams(max(least, 1) + more, least, count)
    patterns = (tokens[-size:] for size in range(max(least, 1), asked.max_pattern_size + 1))
    found = any(tokens[-len(one) * count :] == one * count for one in patterns)
    assert asked.ends(tokens) == found


def test_nothing_is_looked_for_by_default() -> None:
    assert not RepetitionDetectionParams().ends([1] * 50)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": MAX_PATTERN + 1, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2, "min_count": 2.0}, "min_count"),
        ({"size": 2}, "object of max_pattern_size"),
        (5, "object of max_pattern_size"),
    ],
)
def test_what_is_refused(given: Any, field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        SamplingParams(repetition_detection=given)


def test_a_mapping_is_enough() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 3, "min_count": 2})  # type: ignore[arg-type]
    assert params.repetition_detection == RepetitionDetectionParams(3, 0, 2)
