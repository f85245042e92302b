"""Texts that must not be generated, as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS
from jaxserve.tokenization.tokenizer import Tokenizer

MAX_BAD_WORD_CHARACTERS = 2**16  # in all words, before they are tokenised


def bad_word_sequences(
    tokenizer: Tokenizer, bad_words: Sequence[str], vocab_size: int
) -> list[list[int]]:
    """The token sequences that spell each word, without and with a space before it.

    The last token of a sequence must not be sampled while the output ends in the others. Sequences
    with a token that the model does not have are left out, since it cannot generate them.

    Args:
        tokenizer: spells the words.
        bad_words: the words.
        vocab_size: tokens of the model, which may be fewer than the tokenizer's.

    Raises:
        ValidationError: a word gives no tokens, or words or sequences are too many or too long.
    """
    # each different word gives a sequence at least, so this can be said before they are spelled
    if len(bad_words) > MAX_BAD_WORD_SEQUENCES and len(set(bad_words)) > MAX_BAD_WORD_SEQUENCES:
        count = f"{len(bad_words)} words"
        raise ValidationError("bad_words", count, f"at most {MAX_BAD_WORD_SEQUENCES} words")
    characters = sum(map(len, set(bad_words)))
    if characters > MAX_BAD_WORD_CHARACTERS:
        raise ValidationError(
            "bad_words",
            f"{characters} characters",
            f"at most {MAX_BAD_WORD_CHARACTERS} characters in all words",
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(bad_words):
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if not tokens:
                raise ValidationError("bad_words", word, "texts that the tokenizer can spell")
            if max(tokens) < vocab_size:
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
