"""The engine's own numbers as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.engine import EngineStats
from jaxserve.observability.step_times import StepTimes


class EngineCollector(Collector):
    """Keeps the newest snapshot and makes metrics of it when they are scraped, not at every step.

    Args:
        model_name: value of the label `model_name`.
    """

    def __init__(self, model_name: str):
        self._model_name = model_name
        self.stats = EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes())

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        yield self._gauge("num_requests_running", "Sequences that own a slot.", stats.num_running)
        yield self._gauge(
            "num_requests_waiting", "Sequences that wait for a slot.", stats.num_waiting
        )
        yield self._gauge(
            "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", stats.page_usage
        )
        yield self._gauge("compiled_programs", "Programs compiled so far.", stats.num_programs)
        yield self._counter("engine_steps", "Steps dispatched to the device.", stats.num_steps)
        yield self._counter(
            "num_preemptions", "Requests preempted for want of pages.", stats.num_preemptions
        )
        phases = CounterMetricFamily(
            "jaxserve:step_phase_seconds",
            "Seconds of the engine's steps by phase; device_idle is an upper bound.",
            labels=["model_name", "phase"],
        )
        for phase, seconds in stats.times.as_dict().items():
            phases.add_metric([self._model_name, phase], seconds)
        yield phases

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
