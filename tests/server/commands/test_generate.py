"""`jaxserve generate` with a scripted engine."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import jaxserve.async_engine
from jaxserve.errors import ValidationError
from server.cli import main
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(jaxserve.async_engine, "AsyncEngine", lambda config: engine)
    return engine


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_text_comes_to_standard_output(
    engine: FakeEngine, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", "ab", "--max-tokens", "3", "--temperature", "0.5", "--stop", "x"]
    assert main(["generate", model, *words]) == 0
    assert capsys.readouterr().out == "hel\n"
    params = engine.params[0]
    assert (params.max_tokens, params.temperature, params.stop) == (3, 0.5, ["x"])
    assert engine.prompts == [[2, 97, 98]] and engine.shut_down


def test_the_prompt_may_come_from_standard_input(
    engine: FakeEngine, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("xy"))
    assert main(["generate", model]) == 0
    assert engine.prompts == [[2, 120, 121]]


def test_refusals_are_one_line(
    engine: FakeEngine, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, "--prompt", "a", "--temperature", "9"]) == 1
    assert main(["generate", "/nowhere", "--prompt", "a"]) == 1
    engine.fail_after = 0
    engine.failure = lambda: ValidationError("prompt", "a", "another one")
    assert main(["generate", model, "--prompt", "a"]) == 1
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if not line.startswith("loading")]
    assert [line.split("=")[0] for line in errors] == [
        "jaxserve: temperature",
        "jaxserve: model",
        "jaxserve: prompt",
    ]


def test_ctrl_c_ends_it(engine: FakeEngine, model: str) -> None:
    def interrupt() -> Exception:
        raise KeyboardInterrupt

    engine.fail_after = 2
    engine.failure = interrupt
    assert main(["generate", model, "--prompt", "a"]) == 130
    assert engine.aborted and engine.shut_down
