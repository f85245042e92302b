"""The engine's own numbers as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.boundary.messages import EngineStats
from jaxserve.boundary.step_times import StepTimes
from jaxserve.observability.busy_window import BusyWindow
from jaxserve.observability.engine_gauges import memory_counters, memory_gauges
from jaxserve.observability.metric_names import LABELS, MetricNames

# vLLM's names, whatever kind the device is
WORK_NAMES = (
    "estimated_flops_per_gpu",
    "estimated_read_bytes_per_gpu",
    "estimated_write_bytes_per_gpu",
)
WORK_TEXTS = (
    "Floating-point operations of each device, counted from the model's shape.",
    "Bytes that each device has to read for them: weights, keys and values.",
    "Bytes that each device has to write for them: keys and values.",
)


class EngineCollector(Collector):
    """Keeps the newest snapshot and makes metrics of it when they are scraped, not at every step.

    Args:
        names: prefix and labels.

    Attributes:
        page_bytes: bytes of one KV page, 0 while that is not known.
    """

    def __init__(self, names: MetricNames):
        self._names = names
        self.page_bytes = 0
        self.stats = EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes())
        self._busy = BusyWindow()

    def record(self, stats: EngineStats) -> None:
        """Take in a snapshot."""
        self.stats = stats
        self._busy.record(stats.times.device_busy)

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        yield self._gauge("num_requests_running", "Sequences that own a slot.", stats.num_running)
        yield self._gauge(
            "num_requests_waiting", "Sequences that wait for a slot.", stats.num_waiting
        )
        waiting = GaugeMetricFamily(
            self._names.full("num_requests_waiting_by_reason"),
            "The same; capacity: slots and pages are all that they wait for.",
            labels=[*LABELS, "reason"],
        )
        waiting.add_metric([*self._names.values, "capacity"], stats.num_waiting)
        yield waiting
        for reading in memory_gauges(stats, self.page_bytes):
            yield self._gauge(*reading)
        for reading in memory_counters(stats):
            yield self._counter(*reading)
        yield self._gauge(
            "device_busy_fraction",
            "Share of the last 10 s in which the device computed steps, at least.",
            self._busy.fraction(),
        )
        yield self._gauge("compiled_programs", "Programs compiled so far.", stats.num_programs)
        yield self._counter("engine_steps", "Steps dispatched to the device.", stats.num_steps)
        if stats.work is not None:
            for name, text, value in zip(WORK_NAMES, WORK_TEXTS, stats.work, strict=True):
                yield self._counter(name, text, value)
        phases = CounterMetricFamily(
            self._names.full("step_phase_seconds"),
            "Seconds of the engine's steps by phase; device_idle is an upper bound, device_busy "
            "a lower one.",
            labels=[*LABELS, "phase"],
        )
        for phase, seconds in stats.times.as_dict().items():
            phases.add_metric([*self._names.values, phase], seconds)
        yield phases

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._names.full(name), text, labels=LABELS)
        family.add_metric(self._names.values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._names.full(name), text, labels=LABELS)
        family.add_metric(self._names.values, value)
        return family
