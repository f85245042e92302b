"""`benchmarks/benchmark.py` prints and writes a row a batch size."""

from __future__ import annotations

import json

import pytest

from benchmarks import benchmark


@pytest.mark.slow
def test_a_row_a_batch_size(tmp_path, capsys):
    output = tmp_path / "rows.json"
    words = ["--batch_size", "2", "3", "--warmup", "1", "--iterations", "2"]
    words += ["--compile_ahead", "2"]
    words += ["--input_len", "4", "--output_len", "3"]
    assert benchmark.main([*words, "--output_json", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["batch size"] for row in rows] == [2, 3]
    for row in rows:
        assert row["QPS"] * 3 == pytest.approx(row["output tok/s"])
        assert 0 < row["P50 latency, ms"] <= row["P99 latency, ms"]
        assert row["peak memory, MiB"] > 50
        assert 0 < row["CPU, %"] <= 110
    assert capsys.readouterr().out.count("\n") == 4
