"""Compiles the C++ sources with the machine's own compiler into a shared library.

The library is made for this CPU and kept in the user's cache folder. Its name holds a hash of all
that it depends on: the sources, the flags, the compiler, the CPU's features and jaxlib's headers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib

from pallas_kernels.native import own_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "sources"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fPIC",
    "-Wno-psabi",  # vectors are passed between inlined functions only
    "-Wno-ignored-attributes",
)
BUILD_PREFIX = (
    "build-"  # of the folder of a build in progress; `cache_bounds` of jaxserve removes old ones
)
TIMEOUT = 300  # seconds that one source may compile


class BuildError(RuntimeError):
    """The library could not be built; the message says why."""


def find_compiler() -> Path | None:
    """The first C++ compiler on PATH."""
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def cache_folder() -> Path:
    """The folder of built libraries: `$XDG_CACHE_HOME/jaxserve/native`, by default in ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jaxserve" / "native"


def cpu_features() -> frozenset[str]:
    """Instruction sets of this CPU by Linux's names; empty where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def library_path(compiler: Path, extra_flags: tuple[str, ...] = ()) -> Path:
    """The place of the library for this machine, built or not.

    Raises:
        BuildError: the compiler does not tell its version.
    """
    version = _run([str(compiler), "--version"], "asking for the compiler's version")
    parts = [
        version,
        " ".join((*FLAGS, *extra_flags)),
        platform.machine(),
        " ".join(sorted(cpu_features())),
        jaxlib.__version__,
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_folder() / f"jaxserve-{digest.hexdigest()[:20]}.so"


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """The library's path; compiles it when the cache does not hold it.

    Args:
        extra_flags: appended to the compiler's flags, for example to leave an instruction set out.

    Raises:
        BuildError: there is no compiler, it failed, or the cache folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH")
    target = library_path(compiler, extra_flags)
    if target.exists():
        return target
    started = time.monotonic()
    try:
        own_folder.make(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=BUILD_PREFIX) as folder:
            built = _compile(compiler, extra_flags, Path(folder))
            # another process may have been faster: a rename replaces its file by an equal one
            built.replace(target)
    except OSError as error:
        raise BuildError(f"the cache folder {target.parent} cannot be used: {error}") from error
    logger.info("compiled %s in %.1f s with %s", target, time.monotonic() - started, compiler)
    return target


def _compile(compiler: Path, extra_flags: tuple[str, ...], folder: Path) -> Path:
    flags = [*FLAGS, *extra_flags, "-isystem", jax.ffi.include_dir()]

    def compile_one(source: Path) -> str:
        output = str(folder / f"{source.stem}.o")
        _run([str(compiler), *flags, "-c", str(source), "-o", output], f"compiling {source.name}")
        return output

    # the longest first, so that all threads end together
    sources = sorted(SOURCES.glob("*.cc"), key=lambda source: -source.stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sources))
    library = folder / "library.so"
    _run([str(compiler), "-shared", *objects, "-o", str(library)], "linking the native library")
    return library


def _run(command: list[str], doing: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{doing} failed: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise BuildError(f"{doing} failed with exit status {done.returncode}: {first}")
    return done.stdout
