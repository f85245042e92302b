"""JAX's persistent compilation cache, in a folder of this machine's own.

Compiled CPU code is for the processor that compiled it, and a home folder may be shared by several:
the folder's name holds what the code depends on beside what JAX's own key covers. JAX compresses
entries by what is installed (zstandard, or zlib) and reads only what it would write itself, so how
it compresses is in the name too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxserve.compilation import cache_bounds
from jaxserve.compilation.cache_format import UNKNOWN, CacheFormat, cache_format, compression_of
from jaxserve.errors import ValidationError
from pallas_kernels.native import own_folder

logger = logging.getLogger(__name__)

WHOLE = "whole.json"  # which entries were found whole: their sizes and times, by name


def default_folder(compression: str) -> Path:
    """`jaxserve/xla/<key>` in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`).

    Args:
        compression: how JAX compresses here, from `cache_format`.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxserve" / "xla" / _machine_key(compression)


def use(setting: str) -> Path | None:
    """Let JAX keep compiled programs on disk and find them there again.

    A folder that the process has already told JAX (`JAX_COMPILATION_CACHE_DIR`) is respected.

    Args:
        setting: "auto" for the default folder, "off", or a folder.

    Returns:
        The folder in use; None when the cache is off or cannot be written, which is logged.

    Raises:
        ValidationError: a folder that was named cannot be made.
    """
    from jax.experimental.compilation_cache import compilation_cache

    enabled = jax.config.values["jax_enable_compilation_cache"]
    if enabled is (setting == "off"):
        jax.config.update("jax_enable_compilation_cache", not enabled)
        compilation_cache.reset_cache()  # JAX decides once whether it uses the cache
    if setting == "off":
        cache_bounds.tidy([], None)
        return None
    configured = jax.config.values["jax_compilation_cache_dir"]
    if setting == "auto" and configured:
        cache_bounds.tidy([], Path(configured))
        return Path(configured)
    entries = cache_format()
    folder = default_folder(entries.compression) if setting == "auto" else Path(setting)
    try:
        own_folder.make(folder)  # compiled code is run as it is found: no other user may write it
    except OSError as error:
        if setting != "auto":
            raise ValidationError(
                "compilation_cache", setting, f"auto, off or a folder that can be made ({error})"
            ) from error
        logger.warning("no compilation cache: %s", error)
        return None
    if str(folder) != configured:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # JAX opens the cache once: a folder that is named later needs it opened again
        compilation_cache.reset_cache()
    # beside the default folder lie those of other versions and machines
    ours = [*folder.parent.resolve().iterdir()] if setting == "auto" else [folder.resolve()]
    cache_bounds.tidy(ours, folder)
    remove_torn(folder, entries)
    # every program is worth keeping: tracing is all that a warm start should cost
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


def remove_torn(folder: Path, entries: CacheFormat) -> list[str]:
    """Remove entries that a process left half written when it was ended, or the disk was full.

    JAX would warn of them at every start and never write them anew. An entry is read once: what was
    found whole and has not changed since is not read again. Entries that another environment has
    compressed in another way are its own and stay; so does all in a folder that was not made by
    `own_folder`.

    Returns:
        The names that were removed, which is logged.
    """
    if entries.decompress is None or not own_folder.is_own(folder):
        return []
    known = _known_whole(folder)
    whole: dict[str, list[int]] = {}
    torn, foreign = [], 0
    for path in folder.iterdir():
        if not cache_bounds.PROGRAMS.entries.fullmatch(path.name):
            continue
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                continue
            stamp = [facts.st_size, facts.st_mtime_ns]
            if known.get(path.name) == stamp:
                whole[path.name] = stamp
                continue
            entry = path.read_bytes()
            if compression_of(entry) not in (entries.compression, UNKNOWN):
                foreign += 1
            elif _is_whole(entry, entries.decompress):
                whole[path.name] = stamp
            else:
                path.unlink()
                torn.append(path.name)
        except OSError:
            continue  # removed by another process, or not ours to read
    if torn:
        logger.warning(
            "removed %d unreadable entries of the compilation cache %s: they are compiled anew",
            len(torn),
            folder,
        )
    if foreign:
        logger.warning(
            "%d entries of the compilation cache %s are of an environment where JAX compresses "
            "otherwise (this one writes %s, by what is installed: zstandard or not): such programs "
            "are compiled at every start; let each environment have a folder of its own",
            foreign,
            folder,
            entries.compression,
        )
    if whole != known:
        _write_whole(folder, whole)
    return torn


def _is_whole(entry: bytes, decompress: Callable[[bytes], bytes]) -> bool:
    try:
        decompress(entry)
    except Exception:  # zlib's, zstandard's or Python 3.14's error, by what JAX compresses with
        return False
    return True


def _known_whole(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / WHOLE).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_whole(folder: Path, whole: dict[str, list[int]]) -> None:
    written = folder / f"{WHOLE}.{os.getpid()}"
    try:
        written.write_text(json.dumps(whole))
        written.replace(folder / WHOLE)
    except OSError as error:
        written.unlink(missing_ok=True)
        logger.warning("the compilation cache %s cannot be written: %s", folder, error)


def _machine_key(compression: str) -> str:
    facts = [jaxlib.__version__, compression, platform.machine(), platform.processor()]
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        facts += [line for line in lines if line.startswith(("model name", "flags"))][:2]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
