"""The documented commands that make the tables of stores and of quantised quality."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quantization.__main__ import Row, bytes_table, main, speed_table
from benchmarks.quantization.schemes import policies
from benchmarks.quantization.worker import Measured
from tests.command_line import output_of

ROOT = Path(__file__).parents[2]


def test_every_scheme_and_the_policy_of_the_docs_are_measured() -> None:
    page = (ROOT / "docs" / "quantization_quality.md").read_text()
    known = policies()
    assert all(f"| {name} |" in page or f"| `{name}` |" in page for name in known)


def test_the_tables_of_rows() -> None:
    facts = {"commit": "0", "jax": "0"}
    speeds = {"1": 0.01, "16": 0.1}, {"1": 50.0, "16": 400.0}
    own = Measured(1000, 1500, 1000, 1500, 10**9, 10.0, 0.5, *speeds, facts)
    small = Measured(250, 750, 260, 760, 10**9, None, None, *speeds, facts)
    rows = [Row("m", "none", own), Row("m", "int8", small)]
    assert "| m | int8 | 0.00 | 25.0% |" in bytes_table(rows)
    assert "| 10.000 | 1.0000 | 50.0% |" in bytes_table(rows)
    assert "| m | int8 | 10.0 | 50.0 | 100.0 | 400.0 |" in speed_table(rows)


@pytest.mark.slow
def test_a_store_loads_beside_safetensors() -> None:
    said = output_of("-m", "benchmarks.store_load", "--quick").splitlines()
    rows = {line.split("|")[1].strip(): line for line in said if "|" in line}
    beside = float(rows["orbax"].split("|")[-2])
    assert 0 <= beside < 1.0, said


@pytest.mark.slow
def test_the_table_of_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.json"
    schemes = ["int8", "int4-dynamic", "int4-awq", "fp8"]
    words = ["--quick", "--no-speed", "--models", "bundled", "--schemes", *schemes]
    assert main([*words, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in schemes)
    found = json.loads(output.read_text())["rows"]
    rows = {row["scheme"]: row["measured"] for row in found}
    own = rows["none"]
    ratios = {name: row["perplexity"] / own["perplexity"] for name, row in rows.items()}
    assert max(ratios[name] for name in ("int8", "fp8")) <= 1.01
    assert ratios["int4-awq"] <= min(1.05, ratios["int4-dynamic"])
    sizes = {name: row["stored_layer_bytes"] for name, row in rows.items()}
    shares = {name: size / sizes["none"] for name, size in sizes.items()}
    assert shares["int8"] < 0.26 and shares["int4-awq"] < 0.15
    assert all(row["exact_match"] > 0.9 for row in rows.values())
