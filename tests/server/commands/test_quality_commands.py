"""`eval`, `convert` and `quantize`: what is wrong is one line and a code of 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import bundled_model_path
from server.cli import main

MODEL = str(bundled_model_path())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["eval", "ppl", "/nowhere.txt"], "FILE='/nowhere.txt'"),
        (["eval", "logits", MODEL, "/nowhere", "TEXT"], "model='/nowhere'"),
        (["convert", "/nowhere", "OUT"], "model='/nowhere'"),
        (["convert", MODEL, "FULL"], "not overwritten"),
        (["quantize", MODEL, "OUT", "--scheme", "int4-gptq"], "calibration=None"),
        (["quantize", MODEL, "OUT", "--scheme", "int4-awq", "--calibration", "TEXT"], "tokens"),
        (["quantize", MODEL, "OUT", "--policy", "POLICY"], "attention='int9'"),
        (["quantize", MODEL, "OUT", "--policy", "POLICY", "--scheme", "int8"], "--scheme='int8'"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "text").write_text("too short")
    (tmp_path / "policy").write_text(json.dumps({"attention": "int9"}))
    places = {name.upper(): str(tmp_path / name) for name in ("out", "full", "text", "policy")}
    assert main([places.get(word, word) for word in words]) == 1
    captured = capsys.readouterr()
    told = [line for line in captured.err.splitlines() if "so far)" not in line]  # a slow start
    assert len(told) == 1 and named in told[0] and not captured.out
    assert not (tmp_path / "out").exists()


def test_an_unknown_scheme_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", MODEL, "OUT", "--scheme", "int3"])
    assert "int3" in capsys.readouterr().err
