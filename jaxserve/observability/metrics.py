"""Prometheus metrics of one engine, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxserve.engine import EngineStats
from jaxserve.observability.step_times import StepTimes
from jaxserve.observability.token_histogram import TokenHistogram
from jaxserve.outputs import RequestMetrics

# Seconds. Fine below 50 ms, where queueing and first tokens of a healthy server lie.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
OVERHEAD_BUCKETS = (0.00025, 0.0005, 0.001, 0.0015, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """Counters, gauges and histograms; names follow vLLM's with the prefix `jaxserve:`.

    Args:
        model_name: value of the label `model_name`.
    """

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self._preemptions_seen = 0

        def counter(name: str, text: str) -> Counter:
            metric = Counter(f"jaxserve:{name}", text, ["model_name"], registry=self.registry)
            return metric.labels(model_name)

        def gauge(name: str, text: str) -> Gauge:
            metric = Gauge(f"jaxserve:{name}", text, ["model_name"], registry=self.registry)
            return metric.labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(
                f"jaxserve:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
            )
            return metric.labels(model_name)

        self._running = gauge("num_requests_running", "Sequences that own a slot.")
        self._waiting = gauge("num_requests_waiting", "Sequences that wait for a slot.")
        self._page_usage = gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        self._steps = counter("engine_steps", "Steps dispatched to the device.")
        self._steps_seen = 0
        self._programs = gauge("compiled_programs", "Programs compiled so far.")
        self._preemptions = counter("num_preemptions", "Requests preempted for want of pages.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        phases = Counter(
            "jaxserve:step_phase_seconds",
            "Seconds of the engine's steps by phase; device_idle is an upper bound.",
            ["model_name", "phase"],
            registry=self.registry,
        )
        self._times_seen = StepTimes()
        self._phases = {
            phase: phases.labels(model_name, phase) for phase in self._times_seen.as_dict()
        }
        self._first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS
        )
        self._inter_token = TokenHistogram(
            "jaxserve:inter_token_latency_seconds",
            "Time between two tokens of a sequence.",
            model_name,
            TOKEN_BUCKETS,
        )
        self.registry.register(self._inter_token)
        self._queue = histogram(
            "request_queue_time_seconds", "Arrival to dispatch of the first step.", LATENCY_BUCKETS
        )
        self._queue_overhead = histogram(
            "request_queue_overhead_seconds",
            "The same without the wait for the step in flight, of requests that found room.",
            OVERHEAD_BUCKETS,
        )
        self._end_to_end = histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS
        )
        self._finished = Counter(
            "jaxserve:request_success",
            "Finished requests by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._model_name = model_name
        for reason in ("stop", "length", "abort"):
            self._finished.labels(model_name, reason)

    def record_stats(self, stats: EngineStats) -> None:
        """Take in a snapshot of the engine."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._page_usage.set(stats.page_usage)
        self._programs.set(stats.num_programs)
        self._steps.inc(stats.num_steps - self._steps_seen)
        self._steps_seen = stats.num_steps
        self._preemptions.inc(stats.num_preemptions - self._preemptions_seen)
        self._preemptions_seen = stats.num_preemptions
        for phase, seconds in stats.times.since(self._times_seen).as_dict().items():
            self._phases[phase].inc(seconds)
        self._times_seen = stats.times

    def record_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def record_token(self, times: RequestMetrics, now: float, previous: float | None) -> None:
        """One token of a sequence, `previous` being the time of its last one."""
        if times.first_token_time is None:
            self._first_token.observe(now - times.arrival_time)
            if times.first_scheduled_time is not None:
                self._queue.observe(times.first_scheduled_time - times.arrival_time)
            if times.queue_overhead is not None:
                self._queue_overhead.observe(times.queue_overhead)
        elif previous is not None:
            self._inter_token.observe(now - previous)

    def record_generated(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def record_finished(self, times: RequestMetrics, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()
        if times.finished_time is not None and reason != "abort":
            self._end_to_end.observe(times.finished_time - times.arrival_time)
