"""The commands that load a server at its edge: what they count, and a short run of each."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks import ramp
from benchmarks.open_loop import Exchange
from benchmarks.verify import soak
from benchmarks.verify.edge_load import percentile, running_server


def test_the_rate_rises_evenly_and_stays() -> None:
    times = ramp.arrivals(1000, 10, 20)
    assert len(times) == 25_000 and times == sorted(times)
    for second, expected in ((0, 50), (4, 450), (9, 950), (10, 1000), (29, 1000)):
        count = sum(second <= time < second + 1 for time in times)
        assert abs(count - expected) <= 2, second


def answer(status: int, head: bytes = b"", text: str = "x", tokens: int = 16) -> Exchange:
    told = {"usage": {"completion_tokens": tokens}, "choices": [{"text": text}]}
    return Exchange(0, 0.0, status=status, head=head, body=json.dumps(told).encode())


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (answer(200), None),
        (answer(200, text="y"), "another text"),
        (answer(200, tokens=15), "15 tokens"),
        (answer(503, b"http/1.1 503\r\nretry-after: 2\r\n\r\n"), None),
        (answer(503, b"http/1.1 503\r\n\r\n"), "a 503 without Retry-After"),
        (answer(503, b"http/1.1 503\r\nretry-after: 0.5\r\n\r\n"), "a 503 without Retry-After"),
        (answer(500), "status 500"),
        (Exchange(0, 0.0, error="no answer in time"), "no answer in time"),
    ],
)
def test_what_is_wrong_with_an_answer(given: Exchange, wrong: str | None) -> None:
    assert ramp.mistake(given, "x") == wrong


def test_goodput_is_what_was_served_in_time_from_when_it_was_due() -> None:
    exchanges = [
        Exchange(0, due=1.0, begun=1.0, ended=1.5, status=200),
        Exchange(1, due=1.0, begun=3.0, ended=3.5, status=200),
        Exchange(2, due=1.0, begun=1.0, ended=1.001, status=503),
        Exchange(3, due=1.0, begun=1.0, ended=3.0, status=200),
    ]
    outcome = ramp.Outcome(exchanges, [], 4.0, 2**20, 3 * 2**20)
    assert outcome.goodput() == 0.5
    assert outcome.since_due(200) == [0.5, 2.5, 2.0]
    assert outcome.since_begun(200) == [0.5, 0.5, 2.0]
    assert "| 4 | 3 | 25.0 % | 0 |" in outcome.row("x") and "3 (+2)" in outcome.row("x")
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0 and percentile([], 0.5) != 0


@pytest.mark.slow
def test_a_short_run_of_each() -> None:
    with running_server("--max-num-seqs", "8", "--compile-ahead", "2") as server:
        outcome = ramp.load(server, ramp.arrivals(30, 1, 1))
        assert not outcome.wrong and len(outcome.exchanges) == 45
        traffic, samples = asyncio.run(soak.run(server, 3.0, 0))
        assert not traffic.wrong and samples and traffic.counts["left: at its time-out"]
        gauges = server.wait_until_idle()
        assert gauges["integrity_failures_total"] == 0
        assert "Traceback" not in server.log.read_text()


def test_who_runs_or_has_ended_has_arrived_too() -> None:
    gauges = {"num_requests_waiting": 936.0, "num_requests_running": 64.0, "steps": 5.0}
    assert ramp.arrived(gauges) == 1000
    assert ramp.arrived(gauges | {"request_success_total": 3.0}) == 1003
