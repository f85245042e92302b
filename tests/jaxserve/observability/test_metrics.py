"""The text of /metrics: names, labels, histograms as prometheus_client would write them."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from jaxserve.boundary.messages import EngineStats, PageStats, StepOutput, TierStats
from jaxserve.boundary.step_history import StepRecord
from jaxserve.boundary.step_times import StepTimes
from jaxserve.boundary.work import Work
from jaxserve.observability.cheap_histogram import CheapHistogram
from jaxserve.observability.metric_names import LABELS, MetricNames
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.request_metrics import EndedRequest
from jaxserve.outputs import RequestMetrics
from tests.resolved_config import resolved_config

# What dashboards of vLLM ask for, by what the text format calls them.
OF_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "engine_sleep_state": "gauge",
    "admission_rejections_total": "counter",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "lora_requests_info": "gauge",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "mm_cache_queries_total": "counter",
    "mm_cache_hits_total": "counter",
    "num_preemptions_total": "counter",
    "prompt_tokens_total": "counter",
    "prompt_tokens_by_source_total": "counter",
    "generation_tokens_total": "counter",
    "request_success_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram",
    "request_params_n": "histogram",
    "request_num_preemptions": "histogram",
    "iteration_tokens_total": "histogram",
}


def test_a_cheap_histogram_is_exposed_as_the_librarys_own():
    bounds = (0.001, 0.01, 0.1, 1.0)
    registry, other = CollectorRegistry(), CollectorRegistry()
    names = MetricNames("tiny")
    ours = CheapHistogram(names, "test_seconds", "Help.", bounds)
    registry.register(ours)
    theirs = Histogram(
        "jaxserve:test_seconds", "Help.", LABELS, registry=other, buckets=bounds
    ).labels(*names.values)
    rng = random.Random(0)
    for value in [*bounds, *(10 ** rng.uniform(-4, 1) for _ in range(200))]:
        ours.observe(value)
        theirs.observe(value)
    want = [line for line in generate_latest(other).splitlines() if b"_created" not in line]
    assert generate_latest(registry).splitlines() == want


@pytest.mark.parametrize("prefix", ["jaxserve", "vllm"])
def test_names_and_labels_are_those_of_vllm(prefix):
    metrics = Metrics("tiny", prefix)
    metrics.set_engine(resolved_config(), 4096)
    lines = generate_latest(metrics.registry).decode().splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    assert all(name.startswith(f"{prefix}:") for name in kinds)
    assert OF_VLLM.items() <= {name.partition(":")[2]: kind for name, kind in kinds.items()}.items()
    values = [line for line in lines if not line.startswith("#")]
    (cache,) = (line for line in values if "cache_config_info" in line)
    assert 'kv_cache_size_tokens="' in cache and 'kv_cache_max_concurrency="' in cache
    assert values and all('engine="0"' in line and 'model_name="tiny"' in line for line in values)


def test_queue_and_paging_are_seen_from_a_millisecond_on():
    text = generate_latest(Metrics("tiny").registry).decode()
    for name in ("request_queue_time_seconds", "paging_latency_seconds"):
        bounds = [
            float(line.partition('le="')[2].partition('"')[0])
            for line in text.splitlines()
            if line.startswith(f"jaxserve:{name}_bucket")
        ]
        assert bounds[0] == 0.001 and len([bound for bound in bounds if bound <= 0.05]) >= 6


def test_phases_count_up_with_the_engine():
    metrics = Metrics("tiny")
    for seconds in (1.5, 2.0):
        times = StepTimes(plan=seconds, device_idle=seconds / 2)
        metrics.record_stats(EngineStats(0, 0, 0.0, 0, 0, 0, times))
    for phase, seconds in (("plan", 2.0), ("device_idle", 1.0), ("wait", 0.0)):
        assert value(metrics, "step_phase_seconds_total", phase=phase) == seconds


WORK = {"flops": 9, "read_bytes": 8, "write_bytes": 7}


def test_work_has_vllms_names_and_is_absent_where_it_is_not_counted():
    metrics = Metrics("tiny", prefix="vllm")
    stats = EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes())
    metrics.record_stats(stats)
    assert "estimated_" not in generate_latest(metrics.registry).decode()
    metrics.record_stats(
        stats._replace(work=Work(**WORK)).after(stats._replace(work=Work(1, 1, 1)))
    )
    text = generate_latest(metrics.registry).decode()
    for name, counted in WORK.items():
        line = (
            f'vllm:estimated_{name}_per_gpu_total{{engine="0",model_name="tiny"}} {counted + 1}.0'
        )
        assert line in text


def test_what_a_device_can_do_is_told_where_it_was_said():
    metrics = Metrics("tiny")
    limits = {"device_flops_per_second": 2e12, "device_bytes_per_second": 3e11}
    metrics.set_engine(resolved_config(enable_mfu_metrics=True, **limits), 4096)
    assert {name: value(metrics, name) for name in limits} == limits
    metrics = Metrics("tiny")
    metrics.set_engine(resolved_config(enable_mfu_metrics=True), 4096)
    assert "device_flops" not in generate_latest(metrics.registry).decode()


def test_what_was_added_since_an_earlier_snapshot():
    later = StepTimes(plan=3.0, wait=5.0)
    assert later.since(StepTimes(plan=1.0)) == StepTimes(plan=2.0, wait=5.0)


def test_a_step_counts_its_tokens_and_the_waits_for_pages():
    metrics = Metrics("tiny")
    step = StepRecord(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 2, 30, 3, 0, 9)
    stats = EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes())
    output = StepOutput(
        ["0.0", "1.0", "2.0"], [5, 6, 7], {}, {}, {}, {}, stats, {}, [], step, [0.0, 0.6]
    )
    metrics.record_step(output)
    assert value(metrics, "iteration_tokens_total_sum") == 33
    assert value(metrics, "paging_latency_seconds_count") == 2
    assert value(metrics, "paging_latency_seconds_bucket", le="0.001") == 1
    assert value(metrics, "paging_latency_seconds_bucket", le="0.5") == 1
    assert value(metrics, "paging_latency_seconds_bucket", le="0.75") == 2


def test_pages_and_bytes_of_each_tier_are_told():
    metrics = Metrics("tiny")
    metrics.set_engine(resolved_config(), 4096)
    tiers = TierStats(
        num_host_pages=50, num_held=40, num_arriving=3, num_files=7, file_bytes=30_000
    )
    tiers = tiers._replace(num_out=9, num_back=8, num_lost=6, num_recomputed=5, num_read=4)
    pages = PageStats(num_pages=20, num_active=11, tiers=tiers._replace(num_unwritten=2))
    metrics.record_stats(EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes(), pages=pages))
    told = {
        "kv_pages": 20,
        "kv_pool_bytes": 20 * 4096,
        "kv_pages_in_use": 11,
        "kv_host_pages": 50,
        "kv_host_pool_bytes": 50 * 4096,
        "kv_host_pages_in_use": 40,
        "kv_host_bytes": 40 * 4096,
        "kv_host_pages_arriving": 3,
        "kv_disk_pages": 7,
        "kv_disk_bytes": 30_000,
        "kv_pages_offloaded_total": 9,
        "kv_pages_restored_total": 8,
        "kv_pages_dropped_total": 6,
        "kv_pages_recomputed_total": 5,
        "kv_pages_read_total": 4,
        "kv_pages_unwritten_total": 2,
    }
    assert {name: value(metrics, name) for name in told} == told


def test_a_request_that_is_over_counts_its_lengths_and_times():
    metrics = Metrics("tiny")
    times = RequestMetrics(10.0, 10.5, None, 11.0, 13.0, 13.0)
    metrics.record_ended(EndedRequest(times, 7, [3, 5], 9, 2, True))
    for name, total in (
        ("request_prompt_tokens", 7),
        ("request_generation_tokens", 8),
        ("request_max_num_generation_tokens", 5),
        ("request_params_max_tokens", 9),
        ("request_params_n", 2),
        ("request_num_preemptions", 2),
        ("request_prefill_time_seconds", 0.5),
        ("request_decode_time_seconds", 2.0),
        ("request_inference_time_seconds", 2.5),
        ("request_time_per_output_token_seconds", 0.5),
    ):
        assert value(metrics, f"{name}_sum") == total
    metrics.record_ended(EndedRequest(times, 7, [3], None, 0, False))
    assert value(metrics, "request_prompt_tokens_count") == 2
    assert value(metrics, "request_params_max_tokens_count") == 1
    assert value(metrics, "request_decode_time_seconds_count") == 1


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample of a metric."""
    all_labels = {"model_name": "tiny", "engine": "0", **labels}
    return metrics.registry.get_sample_value(f"jaxserve:{name}", all_labels)
