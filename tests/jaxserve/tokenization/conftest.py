"""Small tokenizers of the kinds that Llama-family models bring."""

import json
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as RustTokenizer

from jaxserve.tokenization import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, hello world. Hello again!",
    "def main():\n    return {'key': [1, 2, 3]}\n",
    "你好，世界。今天天气很好，我们去公园散步吧。",
    "Les élèves étudient à l'école. 🙂🙂 👨‍👩‍👧 🚀",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(backend: RustTokenizer, folder: Path, template: str | None = TEMPLATE) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory):
    """Like Llama 3: byte-level BPE, BOS added by a template."""
    backend = RustTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    return save(backend, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory):
    """Like Llama 2: spaces spelt as U+2581, `<0xNN>` tokens for bytes outside the vocabulary."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    draft = RustTokenizer(models.BPE(unk_token="<unk>"))
    draft.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL + byte_tokens, show_progress=False
    )
    draft.train_from_iterator(CORPUS[:2], trainer)
    state = json.loads(draft.to_str())
    state["model"]["byte_fallback"] = True
    state["model"]["fuse_unk"] = True
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    backend = RustTokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return save(backend, tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory):
    """Unigram with the Metaspace decoder."""
    backend = RustTokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return save(backend, tmp_path_factory.mktemp("metaspace"), template=None)


@pytest.fixture(scope="session")
def word_level_folder(tmp_path_factory):
    """Whole words and no decoder: `decode` joins tokens with spaces."""
    backend = RustTokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "dog": 4}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    return save(backend, tmp_path_factory.mktemp("word_level"), template=None)


@pytest.fixture(scope="session")
def byte_level(byte_level_folder):
    return Tokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_folder):
    return Tokenizer(sentencepiece_folder)


@pytest.fixture(scope="session")
def metaspace(metaspace_folder):
    return Tokenizer(metaspace_folder)


@pytest.fixture(scope="session")
def word_level(word_level_folder):
    return Tokenizer(word_level_folder)
