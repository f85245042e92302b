"""`--tool-call-parser` and `--enable-auto-tool-choice`: typed, or what the bundled model has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError
from server import cli
from server.commands.parser_flags import parsers
from server.tools.choice import Parsers

BOTH = ("--enable-auto-tool-choice", "--tool-call-parser", "mistral")


def _read(*words: str) -> Parsers:
    return parsers(cli.build_parser("serve").parse_args(["serve", *words]))


@pytest.fixture
def other(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(tmp_path)


def test_the_bundled_model_has_tools_unless_they_are_refused() -> None:
    path = str(bundled_model_path())
    assert _read() == _read(path) == _read("--model", path) == Parsers("hermes", True)
    assert not _read("--no-enable-auto-tool-choice").is_auto
    assert not _read("--chat-template", "{{ messages }}").is_auto
    assert _read(*BOTH) == Parsers("mistral", True)


def test_another_model_needs_both_flags(other: str) -> None:
    assert _read(other) == Parsers() and _read(other, *BOTH) == Parsers("mistral", True)
    assert not _read(other, *BOTH[1:]).is_auto
    with pytest.raises(ValidationError, match="tool_call_parser"):
        _read(other, BOTH[0])
