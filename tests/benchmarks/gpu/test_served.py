"""The section of servers: one that is absent is told, and so is one that does not start."""

from __future__ import annotations

import pytest

from benchmarks.gpu import served
from benchmarks.gpu.setting import bare_setting


def run(monkeypatch, server):
    monkeypatch.setitem(served.SERVERS, "it", server)
    return served.served(bare_setting(True, {}, 60.0), "it")


def test_a_server_that_is_not_installed_is_not_measured(monkeypatch):
    section = run(monkeypatch, served.Server(("no_such_server",), "no_such_server"))
    assert not section.failures
    (row,) = section.rows
    assert row[-1].startswith("NOT MEASURED: no_such_server is not installed in ")
    assert len(row) == len(section.columns)


def test_a_server_that_ends_is_a_failure_with_its_last_words(monkeypatch):
    section = run(monkeypatch, served.Server((), "this"))  # it prints a poem and ends
    (failure,) = section.failures
    assert failure.startswith("it ended: ") and "more of those!" in failure
    assert not section.rows


@pytest.mark.slow
def test_our_own_serves_several_clients():
    setting = bare_setting(True, {}, 120.0)
    section = served.served(setting, served.OURS)
    assert not section.failures
    assert "4 of 4 requests, 2 at once" in section.rows[0][-1]
    assert setting.shared[f"served tok_s {served.OURS}"] > 0
