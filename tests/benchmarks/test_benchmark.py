"""`benchmarks/benchmark.py` prints and writes a row a batch size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import benchmark

RESULTS = Path(benchmark.__file__).parent / "results"


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
    "given", ["[16 32 64 128]", "[16,32,64,128]", "16,32,64,128", "{16,32,64,128}"]
)
def test_a_list_of_sizes_is_told_how_it_is_given(given, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--batch_size", given])
    error = capsys.readouterr().err.splitlines()[-1]
    assert repr(given) in error and error.endswith("--batch_size 16 32 64 128")


def row(size, queries, memory):
    return {"batch size": size, "QPS": queries, "peak memory, MiB": memory}


def test_figures_that_fall_with_the_batch_size_are_told():
    rows = [row(32, 20.0, 300.0), row(16, 10.0, 200.0), row(64, 15.0, 400.0)]
    assert benchmark.falling(rows[:2]) == []
    assert benchmark.falling(rows) == ["QPS: 15 at 64, 20 at 32"]
    assert benchmark.falling([row(1, 1.0, 5.0), row(2, 2.0, 4.0)]) == [
        "peak memory, MiB: 4 at 2, 5 at 1"
    ]


def test_recorded_figures_rise_with_the_batch_size():
    for path in RESULTS.glob("batch-sizes-*.json"):
        rows = json.loads(path.read_text())["rows"]
        assert [row["batch size"] for row in rows] == [16, 32, 64, 128], path
        assert benchmark.falling(rows) == [], path


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
