"""`--config` files with objects for quantisation and paging, in JSON and YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ValidationError
from server.cli import build_parser
from server.commands.engine_flags import engine_config
from server.commands.nested_config import size_in_bytes
from server.commands.several_models import command_lines

REPAIRED: dict[str, Any] = {
    "quantization": {"type": "explicit", "bit": 8},
    "paging": {"strategy": "demand", "page_size": 16, "cache_size": "256MB"},
}


def config_of(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "config"
    file.write_text(text)
    words = command_lines(["serve", "--config", str(file)])[0]
    return engine_config(build_parser("serve").parse_args(words))


def test_each_key_is_a_setting(tmp_path: Path) -> None:
    config = config_of(tmp_path, json.dumps(REPAIRED))
    assert config.quantization == "int8" and config.block_size == 16
    assert config.kv_cache_memory_bytes == 256_000_000
    yaml = "quantization: {type: explicit, bit: 8}\npaging:\n  cache_size: 1GiB\n"
    config = config_of(tmp_path, yaml)
    assert config.quantization == "int8" and config.kv_cache_memory_bytes == 2**30
    assert config_of(tmp_path, '{"quantization": "int8"}').quantization == "int8"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quantization": {"type": "explicit", "bit": 8, "scale_factor": -1}}, "scale_factor=-1"),
        ({"quantization": {"type": "explicit", "bit": 7}}, r"quantization\.bit=7"),
        ({"quantization": {"type": "explicit"}}, r"quantization\.bit=None"),
        ({"quantization": {"type": "implicit", "bit": 8}}, "type='implicit'"),
        ({"quantization": {"bits": 8}}, r"quantization\.bits=8"),
        ({"paging": {"strategy": "eager"}}, "strategy='eager'"),
        ({"paging": {"page_size": "256 apples"}}, "page_size='256 apples'.*tokens a page"),
        ({"paging": {"cache_size": "lots"}}, "cache_size='lots'"),
        ({"paging": {"size": 1}}, r"paging\.size=1"),
        ({"paging": {"page_size": 16}, "block_size": 32}, "block_size=32.*once"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(
    values: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=named):
        config_of(tmp_path, json.dumps(values))


@pytest.mark.parametrize("size", ["256MB", '"256MB"'])
def test_a_published_file_starts_and_says_what_has_no_effect(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """{"model": "checkpoints/tiny",
     "quantization": {"type": "explicit", "bit": 8, "scale_factor": 128},
     "paging": {"strategy": "demand", "page_size": SIZE}}"""
    file = tmp_path / "config.json"
    file.write_text(text.replace("SIZE", size))
    words = command_lines(["serve", "--config", str(file)])[0]
    assert words == ["serve", "--default-model=checkpoints/tiny", "--quantization=int8"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("has no effect" in line for line in lines)
    assert "scale_factor=128" in lines[0] and "page_size='256MB'" in lines[1]


def test_bad_json_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="readable YAML or JSON file; line 1"):
        config_of(tmp_path, '{"quantization": {"bit": 8}')


@pytest.mark.parametrize(
    ("text", "size"), [("1.5kB", 1500), ("2 KiB", 2048), ("7B", 7), ("1TB", 10**12), (12, 12)]
)
def test_sizes(text: Any, size: int) -> None:
    assert size_in_bytes("x", text) == size
