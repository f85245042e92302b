"""The results of a trace, and their summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.scheduling.trace import Item
from jaxserve.bench.percentiles import percentile

# of Student's distribution, two-sided 95 %, by degrees of freedom
STUDENT = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}


class Served(NamedTuple):
    """A request and the seconds at which its first and last token came, on its trace's clock."""

    item: Item
    first_token: float
    last_token: float

    @property
    def ttft(self) -> float:
        return self.first_token - self.item.arrival


class Figures(NamedTuple):
    """Of one run: seconds to the first token, and tokens of prompts and outputs a second."""

    short_p50: float
    short_p99: float
    long_p50: float
    long_p99: float
    all_p99: float
    tokens_per_second: float


def figures(served: Sequence[Served]) -> Figures:
    short = [one.ttft for one in served if one.item.is_short]
    long = [one.ttft for one in served if not one.item.is_short]
    tokens = sum(one.item.prompt_len + one.item.output_len for one in served)
    seconds = max(one.last_token for one in served) - min(one.item.arrival for one in served)
    return Figures(
        percentile(short, 50),
        percentile(short, 99),
        percentile(long, 50),
        percentile(long, 99),
        percentile([one.ttft for one in served], 99),
        tokens / seconds,
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % confidence interval, by Student's distribution."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
