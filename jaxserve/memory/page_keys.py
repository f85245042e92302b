"""Names of full pages by what they hold, so that equal prefixes can be found again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

KEY_BYTES = 16
MINUS = np.int64(-(2**63))  # the sign of a word


class KeySpan(NamedTuple):
    """Places of a prompt whose keys and values depend on something else than the token ids.

    Attributes:
        start, length: which places.
        content: what they depend on.
    """

    start: int
    length: int
    content: bytes


def root_key(extras: Iterable[str] = ()) -> bytes:
    """The key before the first page.

    Args:
        extras: what else keys and values depend on, or must not be shared across, in order: an
            adapter, a salt.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for extra in extras:
        data = extra.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # else "a", "b" would equal "ab"
    return digest.digest()


def group_key(key: bytes, group: int) -> bytes:
    """The key of the page that holds the same tokens for another group of layers."""
    return key + bytes((group,)) if group else key


def page_keys(tokens: Sequence[int], page_size: int, before: bytes) -> list[bytes]:
    """The keys of full pages, one behind the other.

    A key is a hash of the page's tokens and of the key before it, and so of all tokens before it
    and of the extras: two pages with one key hold the same keys and values.

    Args:
        tokens: of the pages, see `key_tokens`; what does not fill the last one has no key.
        page_size: tokens a page.
        before: key of the page before, `root_key` for the first one.
    """
    key, flat = before, np.asarray(tokens, "<i8").tobytes()
    keys, stride = [], 8 * page_size
    for begin in range(0, len(flat) - stride + 1, stride):
        key = hashlib.blake2b(key + flat[begin : begin + stride], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def key_tokens(tokens: list[int], name: str, spans: Sequence[KeySpan]) -> list[int]:
    """Token ids as page keys read them: words of a digest take the places of spans.

    The words are of 63 bits, since a page may have one place of a span, and negative, as no token
    id is. Of spans that overlap each counts.

    Args:
        tokens: ids, or what this has made of them; they stay as they are.
        name: the feature that names the spans.
        spans: its.
    """
    made = [*tokens] if spans else tokens
    for start, length, content in spans:
        if not 0 <= start < start + length <= len(tokens):
            allowed = f"places of the {len(tokens)} tokens"
            raise ValueError(f"key_spans of {name}: {length} from {start} on are no {allowed}")
        digest = hashlib.blake2b(root_key([name]))
        digest.update(np.array(made[start : start + length], "<i8").tobytes())
        digest.update(content)
        words = np.frombuffer(digest.digest(), "<i8") | MINUS
        made[start : start + length] = np.resize(words, length).tolist()
    return made
