"""Names of full pages by what they hold, so that equal prefixes can be found again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

KEY_BYTES = 16


def root_key(extras: Iterable[str] = ()) -> bytes:
    """The key before the first page.

    Args:
        extras: what else keys and values depend on, or must not be shared across, in order: an
            adapter, a salt, the digest of an image.
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
        tokens: of the pages; what does not fill the last one has no key.
        page_size: tokens a page.
        before: key of the page before, `root_key` for the first one.
    """
    key, flat = before, np.asarray(tokens, np.int32).astype("<i4").tobytes()
    keys, stride = [], 4 * page_size
    for begin in range(0, len(flat) - stride + 1, stride):
        key = hashlib.blake2b(key + flat[begin : begin + stride], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys
