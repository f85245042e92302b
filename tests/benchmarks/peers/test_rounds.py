"""Rounds alternate, a failure is recorded and costs no other cell, medians and ratios are right."""

from __future__ import annotations

import pytest

from benchmarks.peers.process import WorkerError
from benchmarks.peers.report import make_report, markdown
from benchmarks.peers.rounds import Contestant, alternate, one_at_a_time
from benchmarks.peers.workload import fixed_batch

CELLS = [fixed_batch(2, 3, 50, 90), fixed_batch(4, 3, 50, 90)]
FIRST = [prompt[0] for prompt in CELLS[0].prompts]


class Scripted:
    """A worker whose rounds take the seconds of a script; an exception in it is raised."""

    conversion_seconds = 0.0
    startup_seconds = 2.0
    peak_rss_mib = 100.0

    def __init__(self, name, script, log):
        self.versions = {name: "1.0"}
        self._name, self._script, self._log = name, script, log

    def start(self):
        self._log.append(f"+{self._name}")

    def run(self, cell, number):
        self._log.append(f"{self._name}{cell}")
        value = self._script.pop(0)
        if isinstance(value, Exception):
            raise value
        tokens = [prompt[0] for prompt in CELLS[cell].prompts]
        figures = {"bytes_read": 3e9} if self._name == "a" else {}
        return {"seconds": value, "first_tokens": tokens, "figures": figures}

    def close(self, patience):
        self._log.append(f"-{self._name}")


def contestant(name, script, log):
    return Contestant(name, lambda: Scripted(name, script, log), lambda line: None)


def quiet(line):
    pass


def test_rounds_alternate_while_all_are_loaded():
    log = []
    alternate([contestant("a", [1.0] * 6, log), contestant("b", [1.0] * 6, log)], 2, 2, quiet)
    cell = ["a{}", "b{}", "b{}", "a{}", "a{}", "b{}"]
    rounds = [step.format(number) for number in (0, 1) for step in cell]
    assert log == ["+a", "+b", *rounds, "-a", "-b"]


@pytest.mark.parametrize("order", [alternate, one_at_a_time])
def test_every_engine_has_every_round_once(order):
    asked = {"a": [], "b": []}

    class Asked(Scripted):
        def run(self, cell, number):
            asked[self._name].append((cell, number))
            return super().run(cell, number)

    made = [Contestant(n, lambda n=n: Asked(n, [1.0] * 6, []), quiet) for n in asked]
    order(made, 2, 2, quiet)
    assert asked["a"] == asked["b"] == [(cell, n) for cell in (0, 1) for n in (0, 1, 2)]


@pytest.mark.parametrize("order", [alternate, one_at_a_time])
def test_what_is_interrupted_waits_for_no_worker(order):
    class Interrupted(Scripted):
        def run(self, cell, number):
            raise SystemExit(143)

        def close(self, patience):
            self._log.append(patience)

    log = []
    with pytest.raises(SystemExit):
        order([Contestant("a", lambda: Interrupted("a", [], log), quiet)], 1, 1, quiet)
    assert log == ["+a", 0.0]


def test_one_at_a_time_never_loads_two():
    log = []
    one_at_a_time([contestant("a", [1.0] * 4, log), contestant("b", [1.0] * 4, log)], 2, 1, quiet)
    assert log == ["+a", "a0", "a0", "a1", "a1", "-a", "+b", "b0", "b0", "b1", "b1", "-b"]


def test_medians_and_ratios_without_the_first_round():
    # 100 output tokens in cell 0; the first of each script is the round that does not count
    a = contestant("a", [9.0, 2.0, 1.0, 4.0], [])
    b = contestant("b", [0.1, 5.0, 3.0, 20.0], [])
    report = make_report(
        alternate([a, b], 1, 3, quiet), CELLS[:1], {"model": "m"}, {"prefix cache": "off"}
    )
    ours, theirs = report["cells"][0]["engines"].values()
    assert ours["seconds"] == [2.0, 1.0, 4.0]
    assert ours["median_seconds"] == 2.0 and theirs["median_seconds"] == 5.0
    assert ours["output_tokens_per_second"] == 50.0
    assert theirs["output_tokens_per_second"] == 20.0
    assert theirs["ratio"] == 2.5 and "ratio" not in ours
    assert ours["gigabytes_per_second"] == 1.5
    assert theirs["same_first_tokens"] == 1.0
    text = markdown(report)
    assert "| a | 50 | 2.0 | 100 |" in text and "| b | 20 (2.50x) | 2.0 | 100 |" in text
    assert "prefix cache: off" in text and "model: m" in text and "b: b 1.0" in text


def test_other_first_tokens_are_told():
    a, b = contestant("a", [1.0] * 2, []), contestant("b", [1.0] * 2, [])
    records = alternate([a, b], 1, 1, quiet)
    records[1].answers[0][0]["first_tokens"] = [FIRST[0], -1]
    result = make_report(records, CELLS[:1], {}, {})["cells"][0]["engines"]["b"]
    assert result["same_first_tokens"] == 0.5


@pytest.mark.parametrize("order", [alternate, one_at_a_time])
def test_a_failed_cell_is_told_and_the_next_one_runs(order):
    log = []
    script = [1.0, WorkerError("out of memory"), 1.0, 2.0]
    a, b = contestant("a", [1.0] * 4, []), contestant("b", script, log)
    report = make_report(order([a, b], 2, 1, quiet), CELLS, {}, {})
    first, second = (cell["engines"]["b"] for cell in report["cells"])
    assert first == {"failure": "out of memory"}
    assert second["seconds"] == [2.0] and second["ratio"] == 2.0
    assert log == ["+b", "b0", "b0", "-b", "+b", "b1", "b1", "-b"]
    assert "- b, batch 2: out of memory" in markdown(report)
    assert "| b | failed | 100 (2.00x) |" in markdown(report)


@pytest.mark.parametrize("order", [alternate, one_at_a_time])
def test_an_engine_that_does_not_start_is_a_row_with_its_reason(order):
    starts = []

    class Missing(Scripted):
        def start(self):
            starts.append(1)
            raise WorkerError("not installed: No module named 'b'")

    a = contestant("a", [1.0] * 4, [])
    b = Contestant("b", lambda: Missing("b", [], []), quiet)
    report = make_report(order([a, b], 2, 1, quiet), CELLS, {}, {})
    assert len(starts) == 1
    assert report["engines"]["b"]["failure"] == "not installed: No module named 'b'"
    assert "| b | not run: not installed: No module named 'b' | - | - | - |" in markdown(report)
    assert report["cells"][1]["engines"]["a"]["seconds"] == [1.0]
