"""Text from tokens as they come: only whole characters, constant time a token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxserve.tokenization.tokenizer import Tokenizer

# A character has at most 4 bytes and a token at least one.
PROMPT_TAIL = 4


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text.

    Bytes that may still become a character are held back; bytes that cannot become one give
    U+FFFD, as in `bytes.decode("utf-8", "replace")`. All text together equals
    `tokenizer.decode(all ids)`, continued after the prompt if there is one. The one exception:
    where a run of `<0xNN>` tokens of a sentencepiece-style tokenizer is invalid somewhere,
    `decode` gives U+FFFD for the whole run and this keeps the run's valid characters.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        """
        Args:
            tokenizer: its byte table is used.
            prompt_token_ids: what the text continues; gives no text itself, but may end within a
                character, and a first word after it keeps its space. Those below 0 are no tokens.
            skip_special_tokens: special tokens give no text.
            spaces_between_special_tokens: False spells an added token that follows another one
                without the space that some tokenizers put between them.
        """
        self._table = tokenizer.byte_table
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._joined = {} if spaces_between_special_tokens else tokenizer.added_tokens
        self._after_added = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._within_character = False
        self._started = False
        self._has_new_bytes = False
        prompt = [i for i in prompt_token_ids[-PROMPT_TAIL:] if i >= 0 and i not in self._skipped]
        if prompt:
            self._started = True
            self._decode(b"".join(self._table[i] for i in prompt))

    def append(self, token_id: int) -> str:
        """The text that is certain now and was not before; "" within a character."""
        if token_id in self._skipped:
            return ""
        if self._started and not self._within_character and not self._joined:
            text = self._table.text(token_id)  # most tokens are whole characters
            if text is not None:
                return text
        return self._decode(self._bytes(token_id))

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True) if self._has_new_bytes else ""

    def _decode(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        self._within_character = self._utf8.getstate()[0] != b""
        return text

    def _bytes(self, token_id: int) -> bytes:
        if self._joined:
            spelling = self._joined.get(token_id)
            follows = self._after_added
            self._after_added = spelling is not None
            if spelling is not None and follows:
                return spelling.encode()
        self._has_new_bytes = True
        if not self._started:
            self._started = token_id in self._table
            return self._table.at_start(token_id)
        return self._table[token_id]
