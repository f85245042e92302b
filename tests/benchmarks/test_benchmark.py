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
    out = capsys.readouterr().out
    assert out.startswith("jaxserve ") and out.count("\n") == 6


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--iterations", "0"], "iterations=0"),
        (["--batch_size", "2", "0"], "batch_size=[2, 0]"),
        (["--batch_size", "2", "--model", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line(words, named, capsys):
    assert benchmark.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("benchmark.py: ") and named in error and error.count("\n") == 1
