"""Prometheus metrics of one engine, in a registry of their own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from jaxserve.boundary.messages import EngineStats, StepOutput
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.observability.buckets import (
    LATENCY_BUCKETS,
    OVERHEAD_BUCKETS,
    STEP_BUCKETS,
    TOKEN_BUCKETS,
)
from jaxserve.observability.cheap_histogram import CheapHistogram
from jaxserve.observability.engine_collector import EngineCollector
from jaxserve.observability.metric_names import LABELS, MetricNames
from jaxserve.observability.process_collector import ProcessCollector
from jaxserve.observability.request_metrics import EndedRequest, RequestHistograms
from jaxserve.outputs import ERROR, TIMEOUT, RequestMetrics


class Metrics:
    """Counters, gauges and histograms; names and labels follow vLLM's but for the prefix.

    Args:
        model_name: value of the label `model_name`.
        prefix: what the names begin with, before a colon.
        engine: value of the label `engine`.
    """

    def __init__(self, model_name: str, prefix: str = "jaxserve", engine: str = "0"):
        self.registry = CollectorRegistry()
        self._names = names = MetricNames(model_name, prefix, engine)

        def counters(name: str, text: str, label: str) -> Counter:
            labels = [*LABELS, label]
            return Counter(names.full(name), text, labels, registry=self.registry)

        def counter(name: str, text: str) -> Counter:
            metric = Counter(names.full(name), text, LABELS, registry=self.registry)
            return metric.labels(*names.values)

        def histogram(name: str, text: str, bounds: Sequence[float]) -> CheapHistogram:
            metric = CheapHistogram(names, name, text, bounds)
            self.registry.register(metric)
            return metric

        self._processes: dict[str, Callable[[], int | None]] = {}
        self._engine = EngineCollector(names)
        self.registry.register(self._engine)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        by_source = counters(
            "prompt_tokens_by_source",
            "Prompt tokens of requests that began, computed or found by the prefix cache.",
            "source",
        )
        self._computed_tokens = by_source.labels(*names.values, "local_compute")
        self._cached_tokens = by_source.labels(*names.values, "local_cache_hit")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence.", TOKEN_BUCKETS
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Arrival to dispatch of the first step.", LATENCY_BUCKETS
        )
        self._queue_overhead = histogram(
            "request_queue_overhead_seconds",
            "The same without the wait for the step in flight, of requests that found room.",
            OVERHEAD_BUCKETS,
        )
        self._page_wait = histogram(
            "paging_latency_seconds",
            "Time that a sequence waited for KV pages: with its turn come and a slot free, or "
            "after it had lost its pages; an observation each time that it gets a slot.",
            LATENCY_BUCKETS,
        )
        self._end_to_end = histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS
        )
        self._step_tokens = histogram(
            "iteration_tokens_total", "Prompt and generated tokens of a step.", STEP_BUCKETS
        )
        self._requests = RequestHistograms(histogram)
        self._finished = counters(
            "request_success", "Finished requests by reason.", "finished_reason"
        )
        for reason in ("stop", "length", "repetition", "abort", ERROR, TIMEOUT):
            self._finished.labels(*names.values, reason)
        self._restarts = counter("engine_restarts", "Times that a dead engine was started again.")
        self._refused = counters(
            "admission_rejections",
            "Requests that were refused because too much waited, by the limit.",
            "reason",
        )
        self._sleep_state = Gauge(
            names.full("engine_sleep_state"),
            "1 for the state that the engine is in: awake, or its level of sleep.",
            [*LABELS, "sleep_state"],
            registry=self.registry,
        )
        self.record_sleep(0)
        # the endpoint picker of the Gateway API reads it of every server: here no adapter is served
        adapters = Gauge(
            names.full("lora_requests_info"),
            "Adapters that requests use, and the most of them at once; the value is the time "
            "since when it is so.",
            [*LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            registry=self.registry,
        )
        adapters.labels(*names.values, "0", "", "").set_to_current_time()

    @property
    def stats(self) -> EngineStats:
        """The engine's newest snapshot."""
        return self._engine.stats

    def totals(self) -> dict[str, int]:
        """What was counted since the start, without a scrape."""
        return {
            "prompt_tokens": _count(self._prompt_tokens),
            "generation_tokens": _count(self._generation_tokens),
            "finished": _count(self._finished),
            "refused": _count(self._refused),
            "restarts": _count(self._restarts),
        }

    def record_stats(self, stats: EngineStats) -> None:
        """Take in a snapshot of the engine."""
        self._engine.record(stats)

    def set_engine(self, config: ResolvedConfig, page_bytes: int) -> None:
        """The engine is there.

        Args:
            config: the resolved configuration.
            page_bytes: bytes of one KV page over all layers and devices.
        """
        self._engine.page_bytes = page_bytes
        num_tokens = (config.cache.num_pages - 1) * config.cache.page_size
        labels = {
            "block_size": config.cache.page_size,
            "num_gpu_blocks": config.cache.num_pages,
            "kv_cache_size_tokens": num_tokens,
            "kv_cache_max_concurrency": round(num_tokens / config.scheduler.max_model_len, 2),
            "cache_dtype": config.asked.kv_cache_dtype,
            "enable_prefix_caching": config.asked.enable_prefix_caching,
            "max_model_len": config.scheduler.max_model_len,
            "max_num_seqs": config.scheduler.max_num_seqs,
        }
        names = [*LABELS, *labels]
        text = "What the KV cache was made with, as labels."
        info = Gauge(self._names.full("cache_config_info"), text, names, registry=self.registry)
        info.labels(*self._names.values, *map(str, labels.values())).set(1)
        for name, limit, text in (
            ("device_flops_per_second", config.asked.device_flops_per_second or 0.0, "do"),
            ("device_bytes_per_second", config.asked.device_bytes_per_second or 0.0, "read"),
        ):
            if limit:
                told = f"What one device can {text}, as the setting of this name says."
                gauge = Gauge(self._names.full(name), told, LABELS, registry=self.registry)
                gauge.labels(*self._names.values).set(limit)

    def watch_processes(self, processes: Mapping[str, Callable[[], int | None]]) -> None:
        """Tell of more processes, by name: each is asked for its id when it is scraped."""
        if not self._processes:
            self.registry.register(ProcessCollector(self._names, self._processes))
        self._processes.update(processes)

    def watch_serving(self, serves: Callable[[], bool]) -> None:
        """Tell whether the engine serves, which is asked when it is scraped."""
        text = "1 while the engine serves; 0 while it loads or is replaced, or once it is given up."
        gauge = Gauge(self._names.full("engine_serving"), text, LABELS, registry=self.registry)
        gauge.labels(*self._names.values).set_function(lambda: float(serves()))

    def record_step(self, output: StepOutput) -> None:
        """Take in what a step says of itself and of the pages that its sequences waited for."""
        for seconds in output.page_waits:
            self._page_wait.observe(seconds)
        if output.step is not None:
            self._step_tokens.observe(output.step.num_prefill_tokens + len(output.tokens))

    def record_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def record_begun(self, num_prompt: int, num_cached: int) -> None:
        """A request is in its first step, and that many tokens of its prompt were found."""
        self._cached_tokens.inc(num_cached)
        self._computed_tokens.inc(num_prompt - num_cached)

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

    def record_refused(self, limit: str, count: int = 1) -> None:
        """Requests were not let in; `limit` is the setting that kept them out."""
        self._refused.labels(*self._names.values, limit).inc(count)

    def record_sleep(self, level: int | None) -> None:
        """The engine sleeps at this level; 0: it is awake; None: it lacks its pages alone."""
        for number, state in enumerate(("awake", "weights_offloaded", "discard_all")):
            self._sleep_state.labels(*self._names.values, state).set(number == level)

    def record_restart(self) -> None:
        """An engine that had died serves again."""
        self._restarts.inc()

    def record_finished(self, times: RequestMetrics, reason: str, count: int = 1) -> None:
        """`count` sequences of one request ended at once."""
        self._finished.labels(*self._names.values, reason).inc(count)
        if times.finished_time is not None and reason not in ("abort", ERROR, TIMEOUT):
            self._end_to_end.observe(times.finished_time - times.arrival_time)

    def record_ended(self, ended: EndedRequest) -> None:
        """Every sequence of a request has ended."""
        self._requests.record(ended)


def _count(metric: Counter) -> int:
    """The sum of a counter over its labels."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))
