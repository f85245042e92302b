"""The table of prompts with images, made of little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import images
from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.models import config_reader

pytest.importorskip("torch")


@pytest.mark.slow
def test_a_model_that_reads_images_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gemma = SimpleNamespace(images=ImageFacts(9, (3, 8, 8), 4, sees_whole=True))
    monkeypatch.setattr(config_reader, "read_model_config", lambda folder: gemma)
    monkeypatch.setattr(images, "use_cores", lambda count: None)
    with pytest.raises(SystemExit, match="1"):
        images.main(["--model", "gemma"])
    assert "gemma is no LLaVA 1.5" in capsys.readouterr().err


@pytest.mark.slow
def test_both_engines_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert images.main(["--images", "1", "2", "--requests", "2", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ")[1] for line in lines if line.startswith("| ")][1:]
    assert rows == ["jaxserve", "transformers"] * 2
    assert sum("2 of 2 answers of 8 tokens are the same" in line for line in lines) == 2
