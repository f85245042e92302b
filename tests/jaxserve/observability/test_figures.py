"""Pictures and the trace show what they are given."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from jaxserve.boundary.step_history import StepRecord
from jaxserve.errors import JaxServeError
from jaxserve.memory.page_pool import PageState
from jaxserve.observability.figures import (
    Span,
    latency_figure,
    pages_figure,
    timeline_figure,
)
from jaxserve.observability.perfetto import write_trace
from jaxserve.observability.request_lives import (
    PreemptionEvent,
    RequestLife,
    SequenceLife,
)

pytest.importorskip("matplotlib", reason="needs the extra `bench`")


def step(number: int) -> StepRecord:
    begin = 100.0 + number
    times = begin, begin + 0.3, begin + 0.9, 0.1, 0.15, 0.05, 0.5, 0.05, 0.55
    return StepRecord(number, *times, 4, 1, 4, 16, 5, 2, 10 + number)


STEPS = [step(number) for number in range(4)]
SPANS = [Span(100.0, 100.2, 101.0, 103.0), Span(101.0, None, 102.0, 103.5)]


def test_the_map_has_a_cell_a_page():
    counts = {PageState.USED: 5, PageState.SHARED: 2, PageState.CACHED: 3, PageState.FREE: 7}
    states = np.repeat([*counts], [*counts.values()])
    figure = pages_figure(states, STEPS)
    left, right = figure.axes
    shown = left.images[0].get_array().compressed()
    assert sorted(shown) == sorted(states)
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels == ["free: 7", "cached: 3", "in use: 5", "shared: 2"]
    assert list(right.lines[0].get_ydata()) == [10, 11, 12, 13]


def test_the_timeline_has_a_bar_a_request_and_the_tokens_of_each_step():
    figure = timeline_figure(STEPS, SPANS)
    requests, tokens, busy = figure.axes
    widths = [bar.get_width() for bar in requests.patches[:6]]
    assert widths == pytest.approx([0.2, 0.8, 2.0, 0.0, 1.0, 1.5])
    assert [bar.get_height() for bar in tokens.patches] == [4] * 4 + [16] * 4
    assert busy.get_ylabel() == "device busy"
    assert len(timeline_figure([], SPANS).axes) == 1
    assert len(timeline_figure([], []).axes) == 1


def test_latencies_are_shares_of_requests():
    figure = latency_figure({"a": [0.003, 0.001, 0.002], "b": []})
    first, second = figure.axes
    assert list(first.lines[0].get_xdata()) == pytest.approx([1, 2, 3])
    assert first.lines[0].get_ydata()[-1] == 1.0
    assert second.texts[0].get_text() == "none"


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(JaxServeError, match=r"\.\[bench\]"):
        latency_figure({"a": [1.0]})


def test_the_trace_has_steps_requests_and_counters(tmp_path):
    one = SequenceLife("0.0", preemptions=[PreemptionEvent(2, 102.0)])
    life = RequestLife("7", 5, 99.0, {"0.0": one}, 2, 100.0, 101.0, 103.0, 103.0, ["stop"])
    waits = RequestLife("8", 5, 99.5, {})
    path = tmp_path / "out.json"
    write_trace(path, STEPS, [life, waits])
    events = json.loads(path.read_text())["traceEvents"]
    slices = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault(event["name"], []).append((event["ts"], event["dur"]))
    assert slices["plan"][0] == pytest.approx((100.0e6, 0.1e6))
    assert slices["pack"][0] == pytest.approx((100.1e6, 0.15e6))
    assert slices["dispatch"][0] == pytest.approx((100.25e6, 0.05e6))
    assert slices["wait"][0] == pytest.approx((100.4e6, 0.5e6))
    assert slices["commit"][0] == pytest.approx((100.9e6, 0.05e6))
    assert slices["step 0"][0] == pytest.approx((100.35e6, 0.55e6))
    assert slices["queue"] == [(99.0e6, 1.0e6)] and slices["decode"] == [(101.0e6, 2.0e6)]
    pages = [event["args"]["pages"] for event in events if event["name"] == "pages in use"]
    assert pages == [10, 11, 12, 13]
    assert [event["ts"] for event in events if event["ph"] == "i"] == [102.0e6]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"engine", "host", "device", "requests", "request 7", "request 8"}
