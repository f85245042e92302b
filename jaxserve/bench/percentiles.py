"""Percentiles of measured times."""

from __future__ import annotations

from collections.abc import Sequence

PERCENTILES = (10, 25, 50, 75, 90, 99)  # of latencies and start-up times, as vLLM reports them


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
