"""What each token adds to the text, as bytes: the ground that streaming text stands on."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from jaxserve.errors import ValidationError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders under which a token adds the same bytes wherever it stands after the first token.
CONTEXT_FREE_DECODERS = (
    "ByteFallback",
    "ByteLevel",
    "Fuse",
    "Metaspace",
    "Replace",
    "Strip",
    "WordPiece",
)


class TokenBytes:
    """Bytes of each token in the middle of a text, found once and kept: `table[token_id]`.

    Byte-level tokenizers spell bytes as printable characters; sentencepiece-style ones have tokens
    `<0xNN>` for single bytes and spell the rest out. Both are concatenations of bytes that are
    UTF-8 only as a whole. Ids outside the vocabulary add nothing.
    """

    def __init__(self, backend: Any):
        """backend: a `tokenizers.Tokenizer`.

        Raises:
            ValidationError: the tokenizer's decoder looks at a token's neighbours.
        """
        self._backend = backend
        self._bytes = functools.cache(self._find)
        self._texts: dict[int, str | None] = {}
        kinds = _decoder_kinds(backend.decoder)
        for kind in kinds:
            if kind not in CONTEXT_FREE_DECODERS:
                raise ValidationError(
                    "tokenizer decoder", kind, f"one of {', '.join(CONTEXT_FREE_DECODERS)}"
                )
        self._byte_of_letter = _byte_of_letter() if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds
        self._strips_start = "Strip" in kinds
        self._anchor, self._anchor_text = self._find_anchor()

    def __getitem__(self, token_id: int) -> bytes:
        return self._bytes(token_id)

    def text(self, token_id: int) -> str | None:
        """Text of a token whose bytes are whole characters, None for any other."""
        if token_id not in self._texts:
            try:
                self._texts[token_id] = self[token_id].decode()
            except UnicodeDecodeError:
                self._texts[token_id] = None
        return self._texts[token_id]

    def __contains__(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def at_start(self, token_id: int) -> bytes:
        """Bytes of a token that is the first of a text, where some tokenizers drop a space."""
        token = self._backend.id_to_token(token_id)
        if token is None or self._byte_of_letter:
            return self[token_id]
        if self._is_byte(token):
            data = self[token_id]
            return data.removeprefix(b" ") if self._strips_start else data
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def _find(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of_letter:
            # A token with a letter outside the byte alphabet is an added one, spelt as it is.
            if all(letter in self._byte_of_letter for letter in token):
                return bytes(self._byte_of_letter[letter] for letter in token)
            return token.encode()
        if self._is_byte(token):
            return bytes([int(token[3:5], 16)])
        text = self._backend.decode([self._anchor, token_id], skip_special_tokens=False)
        return text[len(self._anchor_text) :].encode()

    def _is_byte(self, token: str) -> bool:
        return self._has_byte_tokens and BYTE_TOKEN.fullmatch(token) is not None

    def _find_anchor(self) -> tuple[int, str]:
        """A token with visible text; decoding behind it shows what a token adds after others."""
        added = self._backend.get_added_tokens_decoder()
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=True)):
            token = self._backend.id_to_token(token_id)
            if token is None or token_id in added or self._is_byte(token):
                continue
            text = self._backend.decode([token_id], skip_special_tokens=False)
            if text.strip():
                return token_id, text
        raise ValidationError("tokenizer", "vocabulary", "at least one token with visible text")


def _decoder_kinds(decoder: Any) -> list[str]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


def _byte_of_letter() -> dict[str, int]:
    """The printable alphabet of byte-level BPE (Radford et al. 2019, GPT-2): letter -> byte.

    Printable Latin-1 bytes stand for themselves, the others for the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return letters
