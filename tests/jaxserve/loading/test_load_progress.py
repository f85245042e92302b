"""The progress lines of a start."""

from __future__ import annotations

import io
import json
import logging
import queue
from collections.abc import Iterator

import pytest

from jaxserve.loading import load_progress
from jaxserve.loading.load_progress import LoadProgress
from jaxserve.observability.json_log import JsonFormatter

NEVER = 1e6


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """The logger `jaxserve` as a library finds it: no level, no handler, what it had put back."""
    logger = logging.getLogger("jaxserve")
    before = logger.level, logger.handlers, logger.propagate
    logger.setLevel(logging.NOTSET)
    logger.handlers, logger.propagate = [], False
    yield logger
    logger.handlers, logger.propagate = before[1:]
    logger.setLevel(before[0])


def test_each_line_says_what_is_being_done_how_much_of_it_and_since_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(load_progress, "_teller", lambda: lines.put)
    monkeypatch.setattr(load_progress, "FIRST_S", 0.001)
    monkeypatch.setattr(load_progress, "EVERY_S", 0.001)
    with LoadProgress(print) as report:
        seen = set()

        def until(text: str) -> None:
            for _ in range(100_000):
                line = lines.get(timeout=60).partition(" (")[0]
                if line == text:
                    return
                seen.add(line)
            raise AssertionError(text)

        until("starting")
        with report.phase("loading weights") as told:
            until("loading weights")
            told(1_500_000_000, 16_000_000_000)
            until("loading weights: 1.50 of 16.00 GB")
        with report.phase("compiling", "programs") as told:
            told(3, 21)
            until("compiling: 3 of 21 programs done")
            with report.phase("inner"):
                until("inner")
            until("compiling: 3 of 21 programs done")
        until("starting")
    assert str(report).endswith(" s so far)")
    assert seen <= {
        "starting",
        "loading weights",
        "loading weights: 1.50 of 16.00 GB",
        "compiling: 3 of 21 programs done",
        "inner",
    }


def test_a_quick_start_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(load_progress, "_teller", lambda: lines.append)
    monkeypatch.setattr(load_progress, "FIRST_S", NEVER)
    report = LoadProgress(print)
    with report, report.phase("compiling"):
        report.say("done")
    assert not lines and capsys.readouterr().out == "done\n"


def begun(monkeypatch: pytest.MonkeyPatch, shown: bool = True) -> None:
    """A start that waits until it has told something, or cannot."""
    monkeypatch.setattr(load_progress, "FIRST_S", 0.001)
    monkeypatch.setattr(load_progress, "EVERY_S", NEVER)
    report = LoadProgress(print, shown=shown)
    with report:
        report._ended.wait(0.05)


def test_where_nothing_is_logged_lines_are_plain_and_on_standard_error(
    ours: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(monkeypatch)
    assert capsys.readouterr() == ("", "jaxserve: starting (0 s so far)\n")


def test_nothing_is_told_to_those_who_do_not_want_it(
    ours: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(monkeypatch, shown=False)
    ours.setLevel(logging.WARNING)
    begun(monkeypatch)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("form", [JsonFormatter(), logging.Formatter("%(message)s")])
def test_lines_have_the_form_of_the_log(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch, form: logging.Formatter
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(load_progress.sys, "stderr", terminal)
    monkeypatch.setattr(load_progress, "TERMINAL_S", NEVER)
    handler = logging.StreamHandler(terminal)
    handler.setFormatter(form)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    begun(monkeypatch)
    shown = terminal.getvalue()
    if isinstance(form, JsonFormatter):
        assert json.loads(shown)["message"] == "starting (0 s so far)", "no terminal's line"
    else:
        assert "\rstarting (0 s so far)" in shown and shown.endswith("\r"), "and it is gone again"
