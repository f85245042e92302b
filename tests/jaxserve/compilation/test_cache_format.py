"""JAX's private functions for cache entries: which versions have them, and what is lost else."""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import pytest
from jax._src import compilation_cache as private

from checkpoints import bundled_model_path
from jaxserve.compilation.cache_format import SIGNATURES, cache_format, compression_of
from tests.command_line import run

# Of JAX. Another release: look what `jax._src.compilation_cache` compresses with, then add it.
VERSIONS = ("0.10", "0.11", "0.12")


class FakeZstandard:
    """The package `zstandard` as far as JAX uses it; the content is zlib's behind its signature."""

    def __init__(self) -> None:
        self.ZstdCompressor = lambda: SimpleNamespace(compress=self._compress)
        self.ZstdDecompressor = lambda: SimpleNamespace(decompress=self._decompress)

    @staticmethod
    def _compress(data: bytes) -> bytes:
        return SIGNATURES["zstd"] + zlib.compress(data)

    @staticmethod
    def _decompress(data: bytes) -> bytes:
        if not data.startswith(SIGNATURES["zstd"]):
            raise ValueError("not zstd")
        return zlib.decompress(data[4:])


@contextmanager
def compressing_with(zstandard: Any) -> Iterator[None]:
    with (
        mock.patch.object(private, "zstd", None),
        mock.patch.object(private, "zstandard", zstandard),
    ):
        yield


def zlib_alone() -> Any:
    """JAX as in an environment without zstandard."""
    return compressing_with(None)


def zstandard_installed() -> Any:
    """JAX as in an environment with zstandard."""
    return compressing_with(FakeZstandard())


def entry_of(data: bytes) -> bytes:
    """A cache entry as JAX writes it."""
    return private.compress_executable(data)


def test_what_is_used_is_there_in_the_versions_that_are_named() -> None:
    version = ".".join(jax.__version__.split(".")[:2])
    assert version in VERSIONS, f"jax {version} is new: see VERSIONS"
    found = cache_format()
    assert found.compression in SIGNATURES and found.decompress is not None
    assert found.decompress(entry_of(b"program")) == b"program"
    with pytest.raises(Exception):  # noqa: B017 zlib's or zstandard's
        found.decompress(entry_of(b"program" * 50)[:-3])


def test_how_jax_compresses_is_asked_of_jax() -> None:
    with zlib_alone():
        assert cache_format().compression == compression_of(entry_of(b"")) == "zlib"
    with zstandard_installed():
        assert cache_format().compression == compression_of(entry_of(b"")) == "zstd"
    assert compression_of(b"") == compression_of(bytes(8)) == "unknown"


RENAMED = textwrap.dedent(
    """
    import sys
    import jax
    from jax.experimental.compilation_cache import compilation_cache
    private = sys.modules["jax._src.compilation_cache"]
    if sys.argv[3] == "module":
        sys.modules["jax._src.compilation_cache"] = None  # importing it fails
    else:  # JAX itself goes on by the new name
        private.decompress, private.decompress_executable = private.decompress_executable, None
        del private.decompress_executable
    from jaxserve import LLM
    llm = LLM(sys.argv[1], max_model_len=64, max_num_seqs=2, num_pages=9, compile_ahead=2,
              compile_in_background=False, max_num_batched_tokens=16, compilation_cache=sys.argv[2])
    print(llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].finish_reason)
    llm.close()
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["module", "function"])
def test_a_rename_costs_a_message_and_no_start(tmp_path: Path, what: str) -> None:
    torn = tmp_path / "jit_torn-cache"
    torn.write_bytes(entry_of(bytes(range(256)) * 50)[:-20])
    words = str(bundled_model_path()), str(tmp_path), what
    done = run(*words, program=("-c", RENAMED))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["stop"], ["length"])
    said = f"jax {jax.__version__} keeps compilation-cache entries in a way"
    assert done.stderr.count(said) == 1
    assert torn.exists()
