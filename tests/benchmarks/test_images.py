"""The table of prompts with images, made of little."""

from __future__ import annotations

import pytest

from benchmarks import images

pytest.importorskip("torch")


@pytest.mark.slow
def test_both_engines_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert images.main(["--images", "1", "2", "--requests", "2", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ")[1] for line in lines if line.startswith("| ")][1:]
    assert rows == ["jaxserve", "transformers"] * 2
    assert sum("2 of 2 answers of 8 tokens are the same" in line for line in lines) == 2
