"""Flags of the engine: one to one with `EngineConfig`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from checkpoints import bundled_model_path
from jaxserve.config import EngineConfig
from jaxserve.errors import ValidationError
from server.cli import build_parser
from server.commands.engine_flags import engine_config, integer


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def config(*words: str) -> EngineConfig:
    return engine_config(build_parser().parse_args(["serve", *words]))


def test_every_flag_reaches_its_field(model: str) -> None:
    given = {
        "tokenizer": "/t",
        "dtype": "float32",
        "load_format": "dummy",
        "seed": 7,
        "max_model_len": 512,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "prefill_chunk": 48,
        "block_size": 32,
        "num_pages": 99,
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": 2,
        "max_logprobs": 5,
        "decode_backend": "xla",
        "prefill_backend": "xla",
        "linear_backend": "xla",
        "quantization": "int8",
        "compile_ahead": 4,
        "compilation_cache": "/c",
        "preset": "bulk",
        "kv_cache_memory_bytes": 1000,
    }
    words = [word for k, v in given.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    words += ["--no-overlap", "--no-compile-in-background", "--served-model-name", "a", "b"]
    made = config(model, *words)
    expected = {
        **given,
        "model": model,
        "overlap": False,
        "compile_in_background": False,
        "served_model_name": ("a", "b"),
        "skip_tokenizer_init": False,  # the commands make text, so it has no flag
    }
    assert dataclasses.asdict(made) == expected


def test_defaults_are_those_of_the_config(model: str) -> None:
    assert config(model) == EngineConfig(model=model)
    assert config("--model", model) == EngineConfig(model=model)


def test_models_that_cannot_be(model: str) -> None:
    with pytest.raises(ValidationError, match="/nowhere"):
        config("/nowhere")
    with pytest.raises(ValidationError, match="--model"):
        config(model, "--model", "/other")
    with pytest.raises(ValidationError, match="block_size"):
        config(model, "--block-size", "3")


def test_the_bundled_model_is_the_default() -> None:
    made = config()
    assert made.model == str(bundled_model_path())
    assert made.served_model_name == (bundled_model_path().name,)


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1M", 2**20)]
)
def test_numbers_for_people(text: str, value: int) -> None:
    assert integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.2345k", "1e3", "0x10", "4 k"])
def test_numbers_for_nobody(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        integer(text)
