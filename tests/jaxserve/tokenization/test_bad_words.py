"""Bad words become token sequences with and without a space before them."""

import pytest

from jaxserve.errors import ValidationError
from jaxserve.tokenization import bad_words


def bad_word_sequences(tokenizer, words, vocab_size=None):
    return bad_words.bad_word_sequences(tokenizer, words, vocab_size or tokenizer.vocab_size)


def test_both_spellings_are_found(byte_level):
    sequences = bad_word_sequences(byte_level, ["hello", " world"])
    texts = {byte_level.decode(sequence) for sequence in sequences}
    assert texts == {"hello", " hello", "world", " world"}


def test_duplicates_are_dropped(byte_level):
    assert bad_word_sequences(byte_level, ["dog", " dog", "dog"]) == bad_word_sequences(
        byte_level, ["dog"]
    )
    assert bad_word_sequences(byte_level, []) == []


def test_whitespace_can_be_bad(byte_level):
    texts = {byte_level.decode(ids) for ids in bad_word_sequences(byte_level, ["\n", " "])}
    assert texts == {"\n", " \n", " ", "  "}


def test_words_without_tokens_are_refused(word_level):
    with pytest.raises(ValidationError, match="spell") as error:
        bad_word_sequences(word_level, [" "])
    assert error.value.field == "bad_words"


def test_limits(byte_level):
    with pytest.raises(ValidationError, match="128 token sequences"):
        bad_word_sequences(byte_level, [f"w{i}" for i in range(65)])
    with pytest.raises(ValidationError, match="1024 tokens"):
        bad_word_sequences(byte_level, ["ﷺ" * 200])


def test_too_many_are_refused_before_any_is_spelled(byte_level, monkeypatch):
    monkeypatch.setattr(type(byte_level), "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(ValidationError, match="128 words"):
        bad_word_sequences(byte_level, [f"w{i}" for i in range(5000)])
    with pytest.raises(ValidationError, match="65536 characters"):
        bad_word_sequences(byte_level, ["x" * 70_000])


def test_what_the_model_has_no_token_for_is_left_out(byte_level):
    all_of = bad_word_sequences(byte_level, ["dog", "<|tool|>"])
    tool = byte_level.vocab_size - 1
    assert any(tool in sequence for sequence in all_of)
    left = bad_word_sequences(byte_level, ["dog", "<|tool|>"], vocab_size=tool)
    assert left == [sequence for sequence in all_of if tool not in sequence] != []
