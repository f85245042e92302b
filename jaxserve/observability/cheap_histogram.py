"""A histogram that is cheap enough to observe every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from jaxserve.observability.metric_names import LABELS, MetricNames


class CheapHistogram(Collector):
    """Counts observations in a list and builds the metric when it is scraped.

    prometheus_client's own histogram takes locks and walks its buckets, which at hundreds of tokens
    a step is as much host time as planning the step. One thread may observe, any may collect.

    Args:
        names: prefix and labels.
        name: without its prefix.
        text: the help line.
        bounds: upper bounds of the buckets, ascending, the infinite one left out.
    """

    def __init__(self, names: MetricNames, name: str, text: str, bounds: Sequence[float]):
        self._names, self._name, self._text = names, names.full(name), text
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        buckets, total = [], 0
        for bound, count in zip([*map(repr, self._bounds), "+Inf"], list(self._counts)):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        family.add_metric(self._names.values, buckets, self._sum)
        return [family]
