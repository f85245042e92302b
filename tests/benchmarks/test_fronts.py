"""The processor time of requests by process, measured with an engine that costs nothing."""

from __future__ import annotations

import json

import pytest

from benchmarks.fronts import main


@pytest.mark.slow
def test_each_process_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--fronts", "2", "--requests", "20", "--at-once", "4", "--tokens", "4", "--json"]
    assert main(words) == 0
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["ms_each"].keys() == {"server", "engine", "front 0", "front 1"}
    assert found["per_second"] > 0
