"""The table by batch size: what each comparison is asked for, its rows, and a real run."""

from __future__ import annotations

import json

import pytest

from benchmarks import batch_sizes


def report(ours, theirs, impossible=()):
    engines = {
        "jaxserve": {"output_tokens_per_second": ours},
        "transformers": {"output_tokens_per_second": theirs, "ratio": ours / theirs},
    }
    about = {name: {"peak_rss_mib": 1000.0} for name in engines}
    return {
        "engines": about,
        "cells": [{"engines": engines}],
        "rules": {"prefix cache": "off"},
        "environment": {"machine": "m"},
        "impossible": list(impossible),
    }


@pytest.fixture
def asked(monkeypatch):
    found = []

    def run(options, scratch):
        found.append(options)
        batch = options.batch_sizes[0]
        return report(10.0 * batch, 5.0, ["too fast"] if batch == 64 else [])

    monkeypatch.setattr(batch_sizes.peers, "run", run)
    monkeypatch.setattr(batch_sizes, "require", lambda *given: None)
    return found


def test_a_comparison_a_shape_and_batch_size(asked, capsys, tmp_path):
    path = tmp_path / "new" / "sizes.json"
    assert batch_sizes.main(["--batch-sizes", "1", "16", "--output-json", str(path)]) == 0
    assert [one.batch_sizes for one in asked] == [[1], [16]] * 2
    assert [one.model.name for one in asked] == ["llama-125m"] * 2 + ["llama-1b"] * 2
    one = asked[1]
    assert one.one_at_a_time and not (one.mixed or one.prefill or one.long)
    (_, ours), (_, theirs) = one.settings
    assert ours["load_format"] == theirs["load_format"] == "dummy"
    assert ours["num_pages"] == 16 * 512 // 16 + 1  # what the batch can fill
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 8 and rows[2]["output tok/s"] == 160 and rows[2]["times batch 16"] == 1
    assert rows[0]["times batch 16"] == pytest.approx(1 / 16) and rows[3]["ratio"] == 32
    out = capsys.readouterr().out
    assert "| llama-125m | 16 | jaxserve | 160 | 1 | 1000 | - |" in out
    assert "prefix cache: off" in out and path.with_suffix(".md").read_text() == out


def test_an_impossible_figure_fails_the_run(asked, capsys):
    assert batch_sizes.main(["--batch-sizes", "64"]) == 1
    assert "IMPOSSIBLE: llama-125m: too fast" in capsys.readouterr().out


def test_memory_is_the_devices_where_it_has_its_own():
    assert batch_sizes.memory_of({"peak_rss_mib": 5.0}, {"device_peak_mib": 7.0}) == 7.0
    assert batch_sizes.memory_of({"peak_rss_mib": 5.0}, {}) == 5.0


@pytest.mark.slow
def test_the_quick_run(tmp_path):
    path = tmp_path / "sizes.json"
    assert batch_sizes.main(["--quick", "--output-json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["engine"] for row in rows] == ["jaxserve", "transformers"]
    assert all(row["output tok/s"] > 0 and row["memory, MiB"] > 50 for row in rows)
