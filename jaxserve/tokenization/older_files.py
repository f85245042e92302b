"""The tokenizer of a folder without tokenizer.json, made of its older files by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import ValidationError

SENTENCEPIECE = "tokenizer.model"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
# transformers' classes that convert the files of text models; none runs code from the folder
CLASSES = ("LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer")


def converted_tokenizer(folder: Path) -> Any:
    """transformers' fast tokenizer of sentencepiece's file, or of a vocabulary and merges.

    Raises:
        ValidationError: there are no such files, they are of a class that is not converted, or
            transformers cannot convert them here; says how to make a tokenizer.json.
    """
    if (folder / SENTENCEPIECE).is_file():
        default = "LlamaTokenizer"
    elif (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        default = "GPT2Tokenizer"
    else:
        raise _error(folder, "it holds none")
    name = _class_name(folder) or default
    if name not in CLASSES:
        raise _error(folder, f"its tokenizer_class={name!r} is none of {', '.join(CLASSES)}")
    if default == "LlamaTokenizer" and not _has_sentencepiece():
        raise _error(folder, "its tokenizer.model is read with the extra `sentencepiece`")
    import transformers

    try:
        return getattr(transformers, name).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the Rust tokenizer raises plain Exception
        raise _error(folder, f"transformers does not convert it: {error}") from error


def _class_name(folder: Path) -> str | None:
    """What tokenizer_config.json names, without the ending of older fast classes."""
    file = folder / "tokenizer_config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        found = values.get("tokenizer_class")
    except (ValueError, AttributeError) as error:
        raise _error(folder, f"its tokenizer_config.json is no JSON object: {error}") from error
    return None if found is None else str(found).removesuffix("Fast")


def _has_sentencepiece() -> bool:
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    return bool(is_sentencepiece_available() and is_protobuf_available())


def _error(folder: Path, problem: str) -> ValidationError:
    needed = "mistral-common" if (folder / "tekken.json").is_file() else "sentencepiece protobuf"
    allowed = (
        f"a folder with tokenizer.json; {problem}. To make one: pip install transformers {needed}; "
        'python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained({str(folder)!r}).save_pretrained('OUT')\"; and --tokenizer OUT"
    )
    return ValidationError("tokenizer", str(folder), allowed)
