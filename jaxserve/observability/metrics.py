"""Prometheus metrics of one engine, in a registry of their own."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Histogram

from jaxserve.engine import EngineStats
from jaxserve.observability.engine_collector import EngineCollector
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

        def counter(name: str, text: str) -> Counter:
            metric = Counter(f"jaxserve:{name}", text, ["model_name"], registry=self.registry)
            return metric.labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(
                f"jaxserve:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
            )
            return metric.labels(model_name)

        self._engine = EngineCollector(model_name)
        self.registry.register(self._engine)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
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
        self._engine.stats = stats

    def record_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def record_first_token(self, times: RequestMetrics) -> None:
        """A request got its first token."""
        assert times.first_token_time is not None
        self._first_token.observe(times.first_token_time - times.arrival_time)
        if times.first_scheduled_time is not None:
            self._queue.observe(times.first_scheduled_time - times.arrival_time)
        if times.queue_overhead is not None:
            self._queue_overhead.observe(times.queue_overhead)

    def record_tokens(self, num_tokens: int, last_times: list[float], now: float) -> None:
        """Tokens that came at `now`; `last_times` are those of the ones before them, if any."""
        self._generation_tokens.inc(num_tokens)
        # sequences that run together got their last tokens together: few times differ
        for last_time, count in Tally(last_times).items():
            self._inter_token.observe(now - last_time, count)

    def record_finished(self, times: RequestMetrics, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()
        if times.finished_time is not None and reason != "abort":
            self._end_to_end.observe(times.finished_time - times.arrival_time)
