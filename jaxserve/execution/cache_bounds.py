"""What the caches of compiled programs may hold; the rest is removed when a process starts.

Entries that nothing has used for `MOST_AGE_S` go, and beyond `MOST_BYTES` those that were used
longest ago. Each process holds a lock on a mark in the folders that it uses: what the oldest of
them may have used since it began stays. A removed entry is made anew, by the next start that wants
it. Folders are opened once and never through a link, so that nothing outside is touched.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, NamedTuple

from pallas_kernels.native.build import BUILD_PREFIX
from pallas_kernels.native.build import cache_folder as native_folder

logger = logging.getLogger(__name__)

MOST_AGE_S = 30 * 86400.0
MOST_BYTES = 8 << 30
ABANDONED_S = 3600.0  # no file and no build of native kernels takes so long to write
# Linux notes that a file was read once a day
NOTED_S = 86400.0
MARKS = "in-use"


class Place(NamedTuple):
    """A folder of entries.

    Attributes:
        folder: where they lie.
        entries: patterns of their names.
        pieces: patterns of what a process that was killed leaves half written.
        marks: the folder where processes that use the entries are known.
    """

    folder: Path
    entries: str
    pieces: str
    marks: Path


class Entry(NamedTuple):
    """One file: in which open folder, its size, when it was last used, whether it may go."""

    handle: int
    name: str
    size: int
    used: float
    is_free: bool


def tidy(programs: Sequence[Path], used: Path | None) -> None:
    """Bound the caches of this user, and tell other processes what this one uses of them.

    Args:
        programs: folders of compiled programs, with kept steps in them.
        used: the one of this process, of which others may own all but the kept steps; None: none.
    """
    native = native_folder()
    found = [Place(one, "*-cache", "*.json.[0-9]*", one / MARKS) for one in programs]
    for one in dict.fromkeys([*programs, *([] if used is None else [used.resolve()])]):
        found.append(Place(one / "steps", "*.step", "*.[0-9]*", one / MARKS))
    found.append(Place(native, "jaxserve-*.so", f"{BUILD_PREFIX}*", native / MARKS))
    bound(found)
    for folder in (used, native):
        if folder is not None:
            mark(folder)


def bound(found: Sequence[Place], now: float | None = None) -> list[str]:
    """Remove what is too old, too much, or half written by a process that is gone.

    Args:
        found: the folders; those that are not there, or are links, are passed over.
        now: seconds since 1970.

    Returns:
        The names that were removed, which is logged; so is what cannot be.
    """
    if os.unlink not in os.supports_dir_fd:
        return []  # Windows has no folders that are held open while what is in them is removed
    now = time.time() if now is None else now
    removed: list[str] = []
    entries: list[Entry] = []
    with ExitStack() as stack:
        for place in found:
            try:
                handle = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue  # not there, a link, or not ours to read
            stack.callback(os.close, handle)
            try:
                entries += _entries(place, handle, _in_use_since(place.marks, now))
                removed += _remove_pieces(place, handle, now)
            except OSError as error:
                logger.warning("the cache %s cannot be tidied: %s", place.folder, error)
        held = sum(entry.size for entry in entries)
        freed = 0
        for entry in sorted(entries, key=lambda entry: entry.used):
            is_old = entry.used < now - MOST_AGE_S
            if entry.is_free and (is_old or held - freed > MOST_BYTES) and _unlink(entry):
                freed += entry.size
                removed.append(entry.name)
    if removed:
        logger.info("removed %d old entries of caches (%.1f MB)", len(removed), freed / 1e6)
    return removed


@functools.cache
def mark(folder: Path) -> IO[bytes] | None:
    """Tell others that this process uses a folder, once; None where that cannot be told.

    The file that is returned is locked until the process ends, however it does.
    """
    if os.unlink not in os.supports_dir_fd:
        return None
    import fcntl

    try:
        (folder / MARKS).mkdir(mode=0o700, parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115 (it stays open)
            dir=folder / MARKS, prefix=f"{os.getpid()}-"
        )
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        logger.info("%s: not marked as in use (%s)", folder, error)
        return None
    return file


def _in_use_since(marks: Path, now: float) -> float | None:
    """When the oldest process that uses a folder began; None: there is none."""
    import fcntl

    since = None
    try:
        files = [one.path for one in os.scandir(marks) if one.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return None
    for path in files:
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # its process has ended in this moment
        with os.fdopen(handle, "rb+") as file:
            began = os.fstat(handle).st_mtime
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                since = began if since is None else min(since, began)
                continue
            if began < now - ABANDONED_S:  # a younger one may be about to be locked
                Path(path).unlink(missing_ok=True)
    return since


def _entries(place: Place, handle: int, since: float | None) -> Iterator[Entry]:
    notes_reads = not os.fstatvfs(handle).f_flag & os.ST_NOATIME
    for one, facts in _own(handle, place.entries):
        if not stat.S_ISREG(facts.st_mode):
            continue
        used = max(facts.st_atime, facts.st_mtime)
        is_free = since is None or (notes_reads and used < since - NOTED_S)
        yield Entry(handle, one, facts.st_size, used, is_free)


def _remove_pieces(place: Place, handle: int, now: float) -> list[str]:
    removed = []
    for name, facts in _own(handle, place.pieces):
        if facts.st_mtime > now - ABANDONED_S:
            continue
        if stat.S_ISDIR(facts.st_mode):
            shutil.rmtree(name, dir_fd=handle)
        else:
            os.unlink(name, dir_fd=handle)
        removed.append(name)
    return removed


def _own(handle: int, pattern: str) -> Iterator[tuple[str, os.stat_result]]:
    """What is named so and is this user's, with the facts of the thing itself."""
    for one in os.listdir(handle):
        if not fnmatchcase(one, pattern):
            continue
        try:
            facts = os.stat(one, dir_fd=handle, follow_symlinks=False)
        except FileNotFoundError:
            continue  # another start was faster
        if facts.st_uid == os.getuid():
            yield one, facts


def _unlink(entry: Entry) -> bool:
    try:
        os.unlink(entry.name, dir_fd=entry.handle)
    except FileNotFoundError:
        return True  # another start was faster
    except OSError as error:
        logger.warning("an old entry of a cache stays: %s", error)
        return False
    return True
