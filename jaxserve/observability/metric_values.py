"""The values of an engine's metrics as plain objects, for programs without Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family


@dataclass(frozen=True, slots=True)
class Metric:
    """One series. `name` is that of `/metrics`, `labels` its labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Numbers by place. vLLM has them for drafts; no metric here is one yet."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A distribution: `buckets` has the count of values up to each bound, as text."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def metric_values(registry: CollectorRegistry) -> list[Metric]:
    """Every series of a registry, in the registry's order."""
    found: list[Metric] = []
    for family in registry.collect():
        if family.type == "histogram":
            found.extend(_histograms(family))
        else:
            kind = Counter if family.type == "counter" else Gauge
            found.extend(
                kind(family.name, dict(sample.labels), sample.value)
                for sample in family.samples
                if not sample.name.endswith("_created")
            )
    return found


def _histograms(family: Family) -> list[Histogram]:
    found: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        series = found.setdefault(tuple(labels.items()), {"buckets": {}})
        if bound is not None:
            series["buckets"][bound] = int(sample.value)
        elif sample.name.endswith("_count"):
            series["count"] = int(sample.value)
        elif sample.name.endswith("_sum"):
            series["sum"] = sample.value
    return [Histogram(family.name, dict(labels), **series) for labels, series in found.items()]
