"""Paged against contiguous attention: the same results from all candidates, and the options."""

from __future__ import annotations

import json

import pytest

from benchmarks import paged_attention


@pytest.mark.slow
def test_the_quick_run(tmp_path, capsys):
    path = tmp_path / "attention.json"
    assert paged_attention.main(["--quick", "--output-json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["rows"], row["context"]) == (2, 64)
    assert "paging costs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--contexts", "100"], "--contexts [100]: multiples of --page-size 16"),
        (["--rows", "0"], "above 0"),
        (["--heads", "5"], "multiple of --kv-heads"),
    ],
)
def test_mistakes_are_named(words, named, capsys):
    with pytest.raises(SystemExit):
        paged_attention.main(words)
    assert named in capsys.readouterr().err
