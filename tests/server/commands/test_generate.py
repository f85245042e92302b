"""`jaxserve generate` with a scripted engine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

import jaxserve.async_engine
from jaxserve.errors import ValidationError
from server.cli import main
from tests.server.fake_engine import FakeEngine


class TextEngine(FakeEngine):
    """Takes text prompts, as the engine does."""

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, priority: int = 0
    ) -> Any:  # type: ignore[override]
        params.max_tokens = params.max_tokens or self.max_model_len
        if isinstance(prompt, str):
            prompt = {"prompt_token_ids": self.tokenizer.encode(prompt)}
        async for output in super().generate(prompt, params, request_id):
            yield output


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TextEngine:
    engine = TextEngine()
    monkeypatch.setattr(jaxserve.async_engine, "AsyncEngine", lambda config: engine)
    return engine


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_text_comes_to_standard_output(
    engine: TextEngine, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", "ab", "--max-tokens", "3", "--temperature", "0.5", "--stop", "x"]
    assert main(["generate", model, *words]) == 0
    assert capsys.readouterr().out == "hel\n"
    params = engine.params[0]
    assert (params.max_tokens, params.temperature, params.stop) == (3, 0.5, ["x"])
    assert engine.prompts == [[2, 97, 98]] and engine.shut_down


def test_the_prompt_may_come_from_standard_input(
    engine: TextEngine, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("xy"))
    assert main(["generate", model]) == 0
    assert engine.prompts == [[2, 120, 121]]


def test_refusals_are_one_line(
    engine: TextEngine, model: str, capsys: pytest.CaptureFixture[str]
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


def test_ctrl_c_ends_it(engine: TextEngine, model: str) -> None:
    def interrupt() -> Exception:
        raise KeyboardInterrupt

    engine.fail_after = 2
    engine.failure = interrupt
    assert main(["generate", model, "--prompt", "a"]) == 130
    assert engine.aborted and engine.shut_down
