"""The server's own histograms around a load test: parsed, subtracted, shown."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from jaxserve.bench.server_metrics import (
    Reading,
    parse_histograms,
    parse_phases,
    queue_markdown,
    queue_report,
    step_markdown,
    step_report,
)


@pytest.mark.parametrize("prefix", ["jaxserve:", "vllm:"])
def test_only_what_came_between_the_two_readings_counts(prefix):
    registry = CollectorRegistry()
    name = f"{prefix}request_queue_time_seconds"
    bounds = (0.001, 0.01, 0.1)
    histogram = Histogram(name, "Help.", ["model_name"], registry=registry, buckets=bounds)
    histogram.labels("a").observe(5.0)
    before = parse_histograms(generate_latest(registry).decode())
    for _ in range(9):
        histogram.labels("a").observe(0.004)
    histogram.labels("b").observe(0.05)
    after = parse_histograms(generate_latest(registry).decode())
    report = queue_report(before, after, [50.0, 90.0, 99.0])
    assert report == {
        "num_queue": 10.0,
        "mean_queue_ms": pytest.approx(8.6),
        "p50_queue_ms_at_most": 10.0,
        "p90_queue_ms_at_most": 10.0,
        "p99_queue_ms_at_most": 100.0,
    }
    assert "| 10 | 8.60 | 10 | 10 | 100 |" in queue_markdown(report, [50.0, 90.0, 99.0])


def test_above_the_last_bucket_there_is_no_bound():
    registry = CollectorRegistry()
    Histogram(
        "jaxserve:request_queue_overhead_seconds", "", registry=registry, buckets=[1.0]
    ).observe(2)
    report = queue_report({}, parse_histograms(generate_latest(registry).decode()), [50.0])
    assert report["p50_queue_overhead_ms_at_most"] is None


def test_a_server_without_the_histogram_is_said_to_have_none():
    assert parse_histograms("# TYPE other counter\nother_total 3\n") == {}
    assert "reports none" in queue_markdown(queue_report({}, {}, [50.0]), [50.0])


def test_without_a_request_between_there_is_no_figure():
    registry = CollectorRegistry()
    Histogram("vllm:request_queue_time_seconds", "", registry=registry).observe(2)
    reading = parse_histograms(generate_latest(registry).decode())
    assert queue_report(reading, reading, [50.0]) == {}


STEPS = """# TYPE jaxserve:step_phase_seconds_total counter
jaxserve:step_phase_seconds_total{model_name="m",phase="plan"} %s
jaxserve:step_phase_seconds_total{model_name="m",phase="http"} %s
# TYPE jaxserve:engine_steps_total counter
jaxserve:engine_steps_total{model_name="m"} %s
"""


def test_where_the_steps_of_the_test_spent_their_time():
    before, after = (Reading({}, *parse_phases(STEPS % v)) for v in ((1, 2, 10), (1.002, 2.01, 30)))
    report = step_report(before, after)
    assert report == {
        "num_steps": 20,
        "plan_us_per_step": pytest.approx(100),
        "http_us_per_step": pytest.approx(500),
    }
    assert step_markdown(report).endswith("us a step in 20 steps: plan 100, http 500")
    assert step_report(after, before) == step_report(Reading({}, {}, 0), Reading({}, {}, 0)) == {}
