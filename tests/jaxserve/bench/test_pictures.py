"""The files of `--save-result` of the benchmarks without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from server.cli import main

pytest.importorskip("matplotlib", reason="needs the extra `bench`")

SMALL = ["--max-num-seqs", "2", "--max-model-len", "64", "--max-num-batched-tokens", "16"]
SHORT = {
    "latency": "--input-len 8 --output-len 4 --batch-size 2 --num-iters 1 --num-iters-warmup 0",
    "throughput": "--num-prompts 3 --input-len 8 --output-len 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("bench", SHORT)
def test_pictures_and_a_trace_of_a_benchmark(bench: str, tmp_path: Path) -> None:
    words = ["bench", bench, *SMALL, "--linear-backend", "xla", *SHORT[bench].split()]
    assert main([*words, "--save-result", "--result-dir", str(tmp_path / "new")]) == 0
    files = {file.name.partition(".")[2]: file for file in (tmp_path / "new").iterdir()}
    pictures = {"pages.png", "timeline.png", "latency.png"}
    assert files.keys() == {"json", "trace.json", *pictures}
    assert all(file.name.startswith(f"{bench}-2") for file in files.values())
    assert all(files[name].read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert "environment" in json.loads(files["json"].read_text())
    assert json.loads(files["trace.json"].read_text())["traceEvents"]


@pytest.mark.parametrize("bench", SHORT)
def test_what_cannot_be_drawn_is_refused_first(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", bench, "--save-result"]) == 1
    assert "matplotlib" in capsys.readouterr().err
