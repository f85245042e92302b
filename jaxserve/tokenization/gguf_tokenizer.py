"""The tokenizer of a GGUF file: its metadata, made into transformers' tokenizer by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.gguf import GGUFFile
from jaxserve.errors import ValidationError

# transformers' names of the metadata that a tokenizer is made of
FIELDS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
# Pre-tokenisers whose texts get the first token where a file does not say (llama.cpp)
BEGUN = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
).union(("tekken", "chameleon"))
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def gguf_tokenizer(path: Path) -> Any:
    """transformers' fast tokenizer of a GGUF file, with its chat template.

    Raises:
        ValidationError: a kind of tokenizer that transformers does not read, or a transformers
            that reads none without PyTorch.
        CheckpointError: the file is damaged.
    """
    file = GGUFFile(path)
    file.close()
    metadata = {
        key.removeprefix("tokenizer."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.")
    }
    tokens = metadata.get("ggml.tokens")
    if not tokens:
        raise ValidationError("tokenizer", str(path), "a GGUF file with tokenizer.ggml.tokens")
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import convert_gguf_tokenizer
    except ImportError as error:
        raise ValidationError(
            "tokenizer", str(path), f"a folder with tokenizer.json: transformers says {error}"
        ) from error
    fields = {
        name: metadata[f"ggml.{key}"] for key, name in FIELDS.items() if f"ggml.{key}" in metadata
    }
    try:
        backend, _ = convert_gguf_tokenizer(str(file.metadata["general.architecture"]), fields)
        backend = _within(backend, len(tokens))
        special = {
            name: tokens[metadata[f"ggml.{key}"]]
            for name, key in SPECIAL.items()
            if f"ggml.{key}" in metadata
        }
        is_begun = metadata.get("ggml.model") == "llama" or metadata.get("ggml.pre") in BEGUN
        adds_bos = metadata.get("ggml.add_bos_token", is_begun)
        _set_first_token(backend, special.get("bos_token") if adds_bos else None)
        made = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        made.chat_template = metadata.get("chat_template")
    except Exception as error:  # the Rust tokenizer raises plain Exception
        allowed = f"a GGUF file whose tokenizer transformers reads: {error}"
        raise ValidationError("tokenizer", str(path), allowed) from error
    return made


def _within(backend: Any, count: int) -> Any:
    """The tokenizer without what transformers' classes add behind the file's own tokens."""
    from tokenizers import Tokenizer

    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < count]
    return Tokenizer.from_str(json.dumps(spec))


def _set_first_token(backend: Any, bos: str | None) -> None:
    """Texts begin with this token, or with none."""
    from tokenizers.processors import Sequence, TemplateProcessing

    if bos is None:
        backend.post_processor = Sequence([])
        return
    backend.post_processor = TemplateProcessing(
        single=f"{bos}:0 $A:0",
        pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
        special_tokens=[(bos, backend.token_to_id(bos))],
    )
