"""Percentiles of measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

PERCENTILES = (10, 25, 50, 75, 90, 99)  # of latencies and start-up times, as vLLM reports them


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """Linear interpolation between the closest ranks; 0 without values."""
    import numpy as np  # here: flags of commands need none

    return float(np.percentile(values, percent)) if len(values) else 0.0
