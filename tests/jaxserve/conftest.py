"""Shared models and engines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny random float32 model, by the name of its case in `tests.tiny_models`."""
    from tests.tiny_models import make_case

    root = tmp_path_factory.mktemp("models")

    def folder(case: str, **overrides: Any) -> Path:
        path = root / f"{case}-{zlib.crc32(repr(overrides).encode())}"
        return path if path.exists() else make_case(path, case, **overrides)

    return folder


@pytest.fixture(scope="module")
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Makes small engines and closes them after the module."""
    made: list[LLM] = []

    def make(model: Path | str, **settings: Any) -> LLM:
        defaults: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "max_model_len": 192,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 32,
            "block_size": 8,
            "compile_ahead": 2,
            "compile_in_background": False,
        }
        made.append(LLM(model=str(model), **(defaults | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
