"""What /metrics says: histograms as prometheus_client would write them, phases of the steps."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from jaxserve.engine import EngineStats
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.step_times import StepTimes
from jaxserve.observability.token_histogram import TokenHistogram


def test_the_token_histogram_is_exposed_as_the_librarys_own():
    bounds = (0.001, 0.01, 0.1, 1.0)
    registry, other = CollectorRegistry(), CollectorRegistry()
    ours = TokenHistogram("jaxserve:test_seconds", "Help.", "tiny", bounds)
    registry.register(ours)
    theirs = Histogram(
        "jaxserve:test_seconds", "Help.", ["model_name"], registry=other, buckets=bounds
    ).labels("tiny")
    rng = random.Random(0)
    for value in [*bounds, *(10 ** rng.uniform(-4, 1) for _ in range(200))]:
        ours.observe(value)
        theirs.observe(value)
    want = [line for line in generate_latest(other).splitlines() if b"_created" not in line]
    assert generate_latest(registry).splitlines() == want


def test_phases_count_up_with_the_engine():
    metrics = Metrics("tiny")
    for seconds in (1.5, 2.0):
        times = StepTimes(plan=seconds, device_idle=seconds / 2)
        metrics.record_stats(EngineStats(0, 0, 0.0, 0, 0, 0, times))
    text = generate_latest(metrics.registry).decode()
    name = 'jaxserve:step_phase_seconds_total{model_name="tiny",phase='
    assert f'{name}"plan"}} 2.0' in text
    assert f'{name}"device_idle"}} 1.0' in text
    assert f'{name}"wait"}} 0.0' in text


def test_what_was_added_since_an_earlier_snapshot():
    later = StepTimes(plan=3.0, wait=5.0)
    assert later.since(StepTimes(plan=1.0)) == StepTimes(plan=2.0, wait=5.0)
