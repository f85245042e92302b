"""Texts that must not be generated, as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import ValidationError
from jaxserve.sampling_params import MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS
from jaxserve.tokenization.tokenizer import Tokenizer


def bad_word_sequences(tokenizer: Tokenizer, bad_words: Sequence[str]) -> list[list[int]]:
    """The token sequences that spell each word, without and with a space before it.

    The last token of a sequence must not be sampled while the output ends in the others.

    Raises:
        ValidationError: a word gives no tokens, or the sequences are too many or too long.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if not tokens:
                raise ValidationError("bad_words", word, "texts that the tokenizer can spell")
            sequences[tuple(tokens)] = None
    if len(sequences) > MAX_BAD_WORD_SEQUENCES:
        raise ValidationError(
            "bad_words", bad_words, f"at most {MAX_BAD_WORD_SEQUENCES} token sequences"
        )
    if sum(map(len, sequences)) > MAX_BAD_WORD_TOKENS:
        raise ValidationError(
            "bad_words", bad_words, f"at most {MAX_BAD_WORD_TOKENS} tokens in all sequences"
        )
    return [list(sequence) for sequence in sequences]
