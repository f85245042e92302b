"""The benchmark measures the cost of messages between server and engine."""

from __future__ import annotations

import json

import pytest

from benchmarks import process_boundary


@pytest.mark.slow
def test_it_measures_both_sides(tmp_path, capsys) -> None:
    output = tmp_path / "boundary.json"
    arguments = ["--streams", "3", "--steps", "5", "--repeats", "2", "--output-json", str(output)]
    assert process_boundary.main(arguments) == 0
    found = json.loads(output.read_text())["us_per_step"]["3"]
    assert set(found) == {"write", "read", "round_trip"} and all(v > 0 for v in found.values())
    assert "| 3 |" in capsys.readouterr().out
