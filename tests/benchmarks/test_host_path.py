"""The host benchmark runs: a stub step behind the real scheduler, packing and commit."""

from __future__ import annotations

import json

import pytest

from benchmarks import host_path


@pytest.mark.slow
def test_it_measures_every_phase(tmp_path, capsys):
    output = tmp_path / "host.json"
    arguments = ["--rows", "3", "--layers", "2", "--steps", "5", "--repeats", "2"]
    assert host_path.main([*arguments, "--output-json", str(output)]) == 0
    phases = json.loads(output.read_text())["us_per_step"]["3"]
    assert set(phases) == set(host_path.PHASES)
    assert all(value > 0 for value in phases.values())
    assert "| 3 |" in capsys.readouterr().out
