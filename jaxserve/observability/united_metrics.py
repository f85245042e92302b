"""The metrics of several engines as one scrape: each sample bears its engine's label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jaxserve.boundary.messages import EngineStats
from jaxserve.boundary.united import united_stats
from jaxserve.observability.metrics import Metrics


class UnitedMetrics:
    """What the metrics of all engines say together.

    Args:
        engines: returns those of each engine there is, the first one always the same.

    Attributes:
        registry: has the samples of all, the families of each name together.
    """

    def __init__(self, engines: Callable[[], Sequence[Metrics]]):
        self._engines = engines
        self.registry = united_registry(engines)

    @property
    def stats(self) -> EngineStats:
        """The newest snapshots, added up."""
        return united_stats([one.stats for one in self._engines()])

    def totals(self) -> dict[str, int]:
        """What was counted since the start, without a scrape."""
        told = [one.totals() for one in self._engines()]
        return {name: sum(one[name] for one in told) for name in told[0]}

    def watch_processes(self, processes: Mapping[str, Callable[[], int | None]]) -> None:
        """Tell of more processes, by name, which are no engines: the first one tells."""
        self._engines()[0].watch_processes(processes)

    def record_refused(self, limit: str, count: int = 1) -> None:
        """Requests were refused before they had an engine: the first one counts them."""
        self._engines()[0].record_refused(limit, count)


def united_registry(engines: Callable[[], Sequence[Metrics | UnitedMetrics]]) -> CollectorRegistry:
    """The samples of all, the families of each name together."""
    registry = CollectorRegistry()
    registry.register(_Families(engines))
    return registry


class _Families(Collector):
    def __init__(self, engines: Callable[[], Sequence[Metrics | UnitedMetrics]]):
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for engine in self._engines():
            for family in engine.registry.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples = known.samples + family.samples
        yield from families.values()
