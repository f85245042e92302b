"""Where a curve has its knee."""

from __future__ import annotations

import pytest

from jaxserve.simulation.pictures import knee


@pytest.mark.parametrize(
    ("latencies", "place"),
    [
        ([1, 1, 1, 1, 10], 3),
        ([1, 2, 3, 20, 60], 2),
        ([1, 1, 1], None),
        ([5, 4, 3], None),
        ([1, 9], None),
    ],
)
def test_the_knee_is_where_a_curve_lies_furthest_below_its_chord(latencies, place):
    assert knee([*range(1, len(latencies) + 1)], latencies) == place
