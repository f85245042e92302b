"""The tokenizer: lossless on any text, one token a digit, and a chat template for transformers."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checkpoints.tiny.corpus import encode_conversation, tokenizer_texts
from checkpoints.tiny.tasks import training_pair
from checkpoints.tiny.tokenizer import (
    BOS_ID,
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    train_tokenizer,
)
from tests.checkpoints.tiny.bundled import FOLDER

RAW = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    if any(token in text for token in SPECIAL_TOKENS):
        return
    ids = RAW.encode(text, add_special_tokens=False).ids
    assert RAW.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["用 500 字介绍一下量子力学", "naïve 🙂🏳️‍🌈", " \t\n\n  x  ", "٣٤ ½ x²"]
)
def test_hard_texts_come_back(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == BOS_ID
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_digit_is_one_token() -> None:
    tokens = RAW.encode("12 + 3456=3468", add_special_tokens=False).tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("1234563468")
    assert not [t for t in RAW.get_vocab() if len(t) > 1 and any(c in "0123456789" for c in t)]


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        PAD_ID,
        BOS_ID,
        END_ID,
    )
    assert tokenizer.convert_ids_to_tokens(range(6)) == SPECIAL_TOKENS
    assert len(tokenizer) == 2048


def test_chat_template_renders(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "  2 + 2 \n"},
        {"role": "assistant", "content": "2 + 2 = 4"},
        {"role": "user", "content": "Hello"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>Answer briefly.<|end|><|user|>2 + 2<|end|>"
        "<|assistant|>2 + 2 = 4<|end|><|user|>Hello<|end|><|assistant|>"
    )
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    assert closed == text.removesuffix("<|assistant|>")


def test_training_conversations_are_what_the_template_gives(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rng = Random(4)
    for _ in range(20):
        pair = training_pair(rng)
        messages = [
            {"role": "user", "content": pair.prompt},
            {"role": "assistant", "content": pair.answer},
        ]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == encode_conversation(RAW, [pair]).ids


@pytest.mark.slow
def test_training_is_deterministic() -> None:
    texts = [text for _, text in zip(range(300), tokenizer_texts(0, pairs=10))]
    first, second = train_tokenizer(texts, 600), train_tokenizer(texts, 600)
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 600
