"""How JAX writes the entries of its compilation cache: the only private part of JAX that is used.

`tests/jaxserve/compilation/test_cache_format.py` names the versions for which it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax

logger = logging.getLogger(__name__)

# The first bytes of what each compression writes.
SIGNATURES = {"zstd": b"\x28\xb5\x2f\xfd", "zlib": b"\x78"}
UNKNOWN = "unknown"


class CacheFormat(NamedTuple):
    """What this process writes and can read.

    Attributes:
        compression: "zstd" or "zlib", which JAX chooses by what is installed, or "unknown".
        decompress: raises where an entry is not whole; None where JAX has changed.
    """

    compression: str
    decompress: Callable[[bytes], bytes] | None


def cache_format() -> CacheFormat:
    """The format of this process; a JAX that has moved it costs the check of entries, said here."""
    try:
        from jax._src.compilation_cache import compress_executable, decompress_executable

        written = compress_executable(b"")
    except Exception as error:  # a private function may go, or take other arguments
        logger.warning(
            "jax %s keeps compilation-cache entries in a way that this jaxserve does not know "
            "(%s): entries that were left half written stay, and JAX will warn of them",
            jax.__version__,
            error,
        )
        return CacheFormat(UNKNOWN, None)
    return CacheFormat(compression_of(written), decompress_executable)


def compression_of(entry: bytes) -> str:
    """The compression that wrote an entry, by its first bytes; "unknown" for any other."""
    for name, signature in SIGNATURES.items():
        if entry.startswith(signature):
            return name
    return UNKNOWN
