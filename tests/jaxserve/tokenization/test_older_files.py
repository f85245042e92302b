"""Folders without tokenizer.json: what transformers converts, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.errors import ValidationError
from jaxserve.tokenization import Tokenizer
from tests.jaxserve.tokenization.conftest import CORPUS

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def configured(folder: Path, name: str | None) -> None:
    named = {} if name is None else {"tokenizer_class": name}
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL | named))


@pytest.mark.parametrize("name", ["GPT2TokenizerFast", None])
def test_vocabulary_and_merges(byte_level_folder: Path, tmp_path: Path, name: str | None) -> None:
    whole = json.loads((byte_level_folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(whole["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in whole["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    configured(tmp_path, name)
    found, wanted = Tokenizer(tmp_path), Tokenizer(byte_level_folder)
    assert found.eos_token_id == wanted.eos_token_id == 2
    for text in CORPUS:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == wanted.encode(text, add_special_tokens=False)
        assert found.decode(ids) == text


def test_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(CORPUS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), model_type="bpe",
        vocab_size=380, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    configured(tmp_path, "LlamaTokenizer")
    found = Tokenizer(tmp_path)
    oracle = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    for text in CORPUS:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text)
        assert found.decode(ids) == text


def test_what_is_not_converted_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "AutoTokenizer as T; T.from_pretrained"
    with pytest.raises(ValidationError, match=f"it holds none.*sentencepiece.*{command}"):
        Tokenizer(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(
        ValidationError, match=f"pip install transformers mistral-common.*{command}"
    ):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no protobuf")
    configured(tmp_path, "Evil")
    with pytest.raises(ValidationError, match="tokenizer_class='Evil' is none of LlamaTokenizer"):
        Tokenizer(tmp_path)
    configured(tmp_path, None)
    monkeypatch.setattr("jaxserve.tokenization.older_files._has_sentencepiece", lambda: False)
    with pytest.raises(ValidationError, match=f"with the extra `sentencepiece`.*{command}"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValidationError, match="no JSON object"):
        Tokenizer(tmp_path)
