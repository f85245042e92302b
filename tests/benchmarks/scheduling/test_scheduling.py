"""The benchmark of policies: its trace, its clock, its figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scheduling import __main__ as command
from benchmarks.scheduling.formula import Costs, simulate
from benchmarks.scheduling.report import change, highest_rate
from benchmarks.scheduling.served import Served, figures, interval
from benchmarks.scheduling.trace import Item, bimodal


def test_a_trace_has_the_same_requests_at_every_rate() -> None:
    slow, fast = bimodal(500, 2.0, 3), bimodal(500, math.inf, 3)
    assert [(i.prompt_len, i.output_len) for i in slow] == [
        (i.prompt_len, i.output_len) for i in fast
    ]
    assert sum(item.is_short for item in slow) / 500 == pytest.approx(0.8, abs=0.05)
    assert slow[-1].arrival == pytest.approx(250, rel=0.15) and fast[-1].arrival == 0
    assert {item.is_short for item in slow if item.prompt_len >= 1000} == {False}


def test_the_simulated_clock_is_its_formula() -> None:
    items = [Item(1.0, 600, 3), Item(1.2, 20, 1)]
    costs = Costs(step=0.01, token=0.001)
    first, second = simulate(items, "fcfs", costs)
    assert first.first_token == pytest.approx(1.0 + (0.01 + 0.512) + (0.01 + 0.088 + 0.02))
    assert second.first_token == first.first_token
    assert first.last_token == pytest.approx(first.first_token + 2 * 0.011)
    short = simulate([Item(0.0, 1500, 1), Item(0.1, 20, 1)], "length", costs)[1]
    assert short.first_token == pytest.approx(2 * 0.522), "in the next step"


def test_figures_of_a_run() -> None:
    served = [Served(Item(float(i), 20, 10), i + 0.5, i + 1.0) for i in range(10)]
    served.append(Served(Item(0.0, 1000, 10), 3.0, 4.0))
    found = figures(served)
    assert (found.short_p50, found.short_p99, found.long_p99) == (0.5, 0.5, 3.0)
    assert found.tokens_per_second == pytest.approx((10 * 30 + 1010) / 10.0)


def test_intervals_are_students() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, high - mean) == (3.0, pytest.approx(1.9634, rel=1e-3))
    assert low == pytest.approx(6 - high) and interval([1.0])[1:] == (-math.inf, math.inf)


def test_the_highest_rate_within_a_limit() -> None:
    rows = [{"rate": rate, "x": x} for rate, x in ((10.0, 1.0), (20.0, 2.0), (30.0, 8.0))]
    assert highest_rate(rows, "x", 5.0) == pytest.approx(25.0)
    assert (highest_rate(rows, "x", 0.5), highest_rate(rows, "x", 9.0)) == (None, 30.0)


@pytest.mark.slow
def test_short_prompts_first_helps_them_and_costs_no_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the simulated clock, which nothing disturbs, so that the figure is a fact."""
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    monkeypatch.setattr(command, "LOADS", (0.2, 0.9))
    words = ["scheduling", "simulated", "--num-prompts", "250", "--seeds", "2", "--output"]
    monkeypatch.setattr("sys.argv", [*words, str(tmp_path)])
    assert command.main() == 0
    report: dict[str, Any] = json.loads((tmp_path / "scheduling-simulated.json").read_text())
    assert change(report, "short_p99")[0] < -0.6
    assert abs(change(report, "tokens_per_second")[0]) < 0.01
    assert (tmp_path / "scheduling-simulated.png").read_bytes().startswith(b"\x89PNG")
    assert "| short prompts, p99, s |" in capsys.readouterr().out
