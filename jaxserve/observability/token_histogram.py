"""A histogram that is cheap enough to observe every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class TokenHistogram(Collector):
    """Counts observations in a list and builds the metric when it is scraped.

    prometheus_client's own histogram takes locks and walks its buckets, which at hundreds of tokens
    a step is as much host time as planning the step. One thread may observe, any may collect.

    Args:
        name: with its prefix.
        text: the help line.
        model_name: value of the label `model_name`.
        bounds: upper bounds of the buckets in seconds, ascending, the infinite one left out.
    """

    def __init__(self, name: str, text: str, model_name: str, bounds: Sequence[float]):
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` observations of the same time."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        buckets, total = [], 0
        for bound, count in zip([*map(repr, self._bounds), "+Inf"], list(self._counts)):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model_name], buckets, self._sum)
        return [family]
