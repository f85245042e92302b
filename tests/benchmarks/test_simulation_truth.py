"""The comparison of simulated with live runs: what it takes for near enough."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.simulation_truth import (
    CALIBRATING,
    METRICS,
    MIXED,
    WARM,
    WORKLOADS,
    Run,
    Sent,
    as_runs,
    calibrating,
    compare,
    judged,
    requests_of,
    simulated,
)
from jaxserve.observability.load_trace import LoadTrace, TracedRequest, read_trace
from tests.load_traces import small_setting, write_trace

LIVE = [90.0, 95.0, 100.0, 105.0, 130.0]


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("ttft p50, ms", 114.0, True),
        ("ttft p50, ms", 116.0, False),
        ("ttft p50, ms", 86.0, True),
        ("ttft p99, ms", 124.0, True),
        ("ttft p99, ms", 129.0, True),
        ("ttft p99, ms", 131.0, False),
        ("requests/s", 84.0, False),
    ],
)
def test_a_median_may_be_off_by_15_percent_and_a_tail_within_the_live_runs(name, value, good):
    share, found = judged(name, value, LIVE)
    assert found == good and share == pytest.approx(value / 100 - 1)


def test_less_than_a_millisecond_is_no_difference():
    assert judged("queue p50, ms", 1.9, [1.0] * 5)[1] and not judged("requests/s", 1.9, [1.0])[1]


def test_the_table_counts_what_is_too_far_off():
    run = Run("steady", 0.0, 1.0, dict.fromkeys(METRICS, 100.0), [])
    figures = dict.fromkeys(METRICS, 101.0) | {"tpot p50, ms": 200.0}
    lines, wrong = compare([run], {"steady": figures})
    assert wrong == 1 and sum("too far" in line for line in lines) == 1


def test_five_workloads_are_compared_and_others_calibrate():
    assert len(WORKLOADS) == 5 and MIXED not in WORKLOADS
    assert not {*CALIBRATING} & {*WORKLOADS.values()}
    assert len(WORKLOADS) % len(CALIBRATING), "each is before each of them"
    assert all(math.isfinite(load.request_rate) for load in WORKLOADS.values())


def test_what_was_recorded_is_told_apart_by_its_order():
    """Two requests warm up, two calibrate, two are compared."""
    requests = [
        TracedRequest(float(at), 5, 2, queue=0.01 * at, ttft=0.1, last=0.2) for at in range(6)
    ]
    trace = LoadTrace(Path("t"), {}, requests)
    tests = [Sent(name, 2, {}, [0.15, 0.16]) for name in (WARM, MIXED, "steady")]
    _, first, second = as_runs(trace, tests)
    assert (first.begin, first.end, second.begin) == (2.0, 3.2, 4.0)
    assert first.figures["queue p50, ms"] == pytest.approx(25.0)
    assert first.edges == pytest.approx([0.05, 0.06])
    part = calibrating(trace, [first, second], Path("t"))
    assert [one.arrival for one in part.requests] == [2.0, 3.0]


def test_a_workload_is_simulated_by_a_calibration(tmp_path):
    setting = small_setting()
    trace = read_trace(write_trace(tmp_path / "trace.jsonl", setting))
    load = WORKLOADS["steady"]
    found = simulated(setting, trace, load, 20, 0.003, 0)
    assert set(found) == set(METRICS) and min(found.values()) > 0
    assert found["requests/s"] < load.request_rate * 1.4
    assert len(requests_of(load, 20)) == 20
