"""Tokenizers of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.tokenization.gguf_tokenizer import gguf_tokenizer
from tests.checkpoints.gguf.files import write_gguf

TOKENS = ["<s>", "</s>", "a", "b", "ab"]


@pytest.mark.parametrize(
    ("more", "begun"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_which_texts_get_a_first_token(tmp_path: Path, more: dict[str, Any], begun: bool) -> None:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata | more, {"output_norm.weight": ("F32", np.zeros((1, 4)))})
    assert gguf_tokenizer(path).encode("ab") == [0, 4][not begun :]
