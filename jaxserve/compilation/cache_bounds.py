"""What the caches of compiled programs may hold; the rest is removed when a process starts.

Entries that nothing has used for `MOST_AGE_S` go, and beyond `MOST_BYTES` those that were used
longest ago. Each process holds a lock on a mark in the folders that it uses: what the oldest of
them may have used since it began stays. A removed entry is made anew, by the next start that wants
it. Folders are opened once and never through a link, so that nothing outside is touched; inside,
only what is named exactly as an entry is removed, and only where `own_folder` has made the folder.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple

from pallas_kernels.native import own_folder
from pallas_kernels.native.build import BUILD_PREFIX
from pallas_kernels.native.build import cache_folder as native_folder

logger = logging.getLogger(__name__)

MOST_AGE_S = 30 * 86400.0
MOST_BYTES = 8 << 30
ABANDONED_S = 3600.0  # no file and no build of native kernels takes so long to write
# Linux notes that a file was read once a day
NOTED_S = 86400.0
MARKS = "in-use"
MARK_NAME = re.compile(r"[0-9]+-[a-z0-9_]{8}")


class Kind(NamedTuple):
    """One kind of entries.

    Attributes:
        part: the folder in that of the cache where they lie; ".": that one.
        entries: what their whole names are.
        pieces: what the names are of what a process that was killed leaves half written.
        are_folders: those are folders, else files.
    """

    part: str
    entries: re.Pattern[str]
    pieces: re.Pattern[str]
    are_folders: bool = False


PROGRAMS = Kind(".", re.compile(r".+-[0-9a-f]{64}-cache"), re.compile(r"whole\.json\.[0-9]+"))
STEPS = Kind("steps", re.compile(r"[0-9a-f]{64}\.step"), re.compile(r"[0-9a-f]{64}\.[0-9]+"))
NATIVE = Kind(
    ".",
    re.compile(r"jaxserve-[0-9a-f]{20}\.so"),
    re.compile(rf"{BUILD_PREFIX}[a-z0-9_]{{8}}"),
    are_folders=True,
)


class Mark(NamedTuple):
    """Tells others that this process uses a folder while the file, of that name, is locked."""

    name: str
    file: IO[bytes]


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
    if os.unlink not in os.supports_dir_fd:
        return  # Windows has no folders that are held open while what is in them is removed
    native = native_folder()
    found: dict[Path, Sequence[Kind]] = dict.fromkeys(programs, (PROGRAMS, STEPS))
    if used is not None:
        used = used.resolve()
        found.setdefault(used, (STEPS,))
    found[native] = (NATIVE,)
    own: list[str] = []
    for folder in (used, native):
        if folder is None:
            continue
        held = mark(folder)
        if held is None:
            del found[folder]  # other users of it cannot be told either
        else:
            own.append(held.name)
    bound(found, own)


def bound(
    found: Mapping[Path, Sequence[Kind]], own: Collection[str] = (), now: float | None = None
) -> list[str]:
    """Remove what is too old, too much, or half written by a process that is gone.

    Args:
        found: what is bounded of each folder; those that are not there, are links, or were not made
            by `own_folder` are passed over.
        own: marks of this process.
        now: seconds since 1970.

    Returns:
        The names that were removed, which is logged; so is what cannot be.
    """
    now = time.time() if now is None else now
    removed: list[str] = []
    entries: list[Entry] = []
    with ExitStack() as stack:
        for folder, kinds in found.items():
            try:
                root = _opened(stack, folder)
            except OSError:
                continue  # not there, a link, or not ours to read
            try:
                since = _in_use_since(root, own, now)
                for kind in kinds:
                    try:
                        handle = _opened(stack, kind.part, root)
                    except OSError:
                        continue  # not there, a link, or not ours to read
                    if not own_folder.is_own(handle):
                        where = folder / kind.part
                        logger.info("%s was not made by jaxserve: it is not cleared", where)
                        continue
                    entries += _entries(kind, handle, since)
                    removed += _remove_pieces(kind, handle, now)
            except OSError as error:
                logger.warning("the cache %s is not cleared: %s", folder, error)
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
def mark(folder: Path) -> Mark | None:
    """Tell others that this process uses a folder, once; None, with a line in the log, if it fails.

    The file is locked until the process ends, however it does; a later start removes it.
    """
    import fcntl

    try:
        own_folder.make(folder)
        with ExitStack() as stack:
            root = _opened(stack, folder)
            with suppress(FileExistsError):
                os.mkdir(MARKS, 0o700, dir_fd=root)
            marks = _opened_marks(stack, root)
            name = f"{os.getpid()}-{secrets.token_hex(4)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            file = os.fdopen(os.open(name, flags, 0o600, dir_fd=marks), "rb+")
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning("the cache %s is not cleared, nor marked as in use: %s", folder, error)
        return None
    return Mark(name, file)


def _opened(stack: ExitStack, folder: Path | str, parent: int | None = None) -> int:
    """A descriptor of a folder, which is no link, until the stack is left."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        handle = os.open(folder, flags, dir_fd=parent)
    except NotADirectoryError as error:  # what Linux says of a link too
        raise NotADirectoryError(error.errno, "a link, or no folder", str(folder)) from error
    stack.callback(os.close, handle)
    return handle


def _opened_marks(stack: ExitStack, parent: int) -> int:
    handle = _opened(stack, MARKS, parent)
    if os.fstat(handle).st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "a folder of another user", MARKS)
    return handle


def _in_use_since(root: int, own: Collection[str], now: float) -> float | None:
    """When the oldest other process that uses a folder began; None: there is none."""
    import fcntl

    since = None
    with ExitStack() as stack:
        try:
            marks = _opened_marks(stack, root)
        except FileNotFoundError:
            return None
        for name, facts in _own(marks, MARK_NAME):
            if name in own or not stat.S_ISREG(facts.st_mode):
                continue
            try:
                handle = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=marks)
            except FileNotFoundError:
                continue  # its process has ended in this moment
            with os.fdopen(handle, "rb+") as file:
                began = facts.st_mtime
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    since = began if since is None else min(since, began)
                    continue
                if began < now - ABANDONED_S:  # a younger one may be about to be locked
                    with suppress(FileNotFoundError):  # another start was faster
                        os.unlink(name, dir_fd=marks)
    return since


def _entries(kind: Kind, handle: int, since: float | None) -> Iterator[Entry]:
    notes_reads = not os.fstatvfs(handle).f_flag & os.ST_NOATIME
    for one, facts in _own(handle, kind.entries):
        if not stat.S_ISREG(facts.st_mode):
            continue
        used = max(facts.st_atime, facts.st_mtime)
        is_free = since is None or (notes_reads and used < since - NOTED_S)
        yield Entry(handle, one, facts.st_size, used, is_free)


def _remove_pieces(kind: Kind, handle: int, now: float) -> list[str]:
    removed = []
    for name, facts in _own(handle, kind.pieces):
        if facts.st_mtime > now - ABANDONED_S:
            continue
        if kind.are_folders and stat.S_ISDIR(facts.st_mode):
            shutil.rmtree(name, dir_fd=handle)
        elif not kind.are_folders and stat.S_ISREG(facts.st_mode):
            os.unlink(name, dir_fd=handle)
        else:
            continue
        removed.append(name)
    return removed


def _own(handle: int, names: re.Pattern[str]) -> Iterator[tuple[str, os.stat_result]]:
    """What is named so and is this user's, with the facts of the thing itself."""
    for one in os.listdir(handle):
        if not names.fullmatch(one):
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
