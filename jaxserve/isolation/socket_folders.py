"""The folders of sockets, and what is left of those whose servers were ended hard.

A server holds a lock on a file of its folder for as long as it lives: the kernel gives the lock up
with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

PREFIX = "jaxserve-"
SOCKET, OWNER = "engine.sock", "owner"
ABANDONED_S = 3600.0  # no folder is so long without its lock


def own(folder: Path) -> IO[bytes]:
    """Mark a folder as in use until the file that is returned is closed, or the process ends."""
    file = (folder / OWNER).open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def remove_stale(root: Path | None = None) -> list[Path]:
    """Remove folders of this user whose servers are gone, and nothing else.

    Args:
        root: where they are; the system's folder for temporary files when None.
    """
    found = Path(tempfile.gettempdir() if root is None else root).glob(f"{PREFIX}*")
    removed = [folder for folder in found if _is_stale(folder) and _remove(folder)]
    if removed:
        logger.info("removed %d folders of servers that are gone", len(removed))
    return removed


def _is_stale(folder: Path) -> bool:
    try:
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            return False
        names = {one.name for one in folder.iterdir()}
        if not names:  # being made, or its process was ended before it had a lock
            return facts.st_mtime < time.time() - ABANDONED_S
        if OWNER not in names or not names <= {SOCKET, OWNER}:
            return False  # it holds files that are no server's
        with os.fdopen(os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # in use, or gone in this moment
    return True


def _remove(folder: Path) -> bool:
    try:
        for name in (SOCKET, OWNER):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:
        logger.debug("%s stays: %s", folder, error)
        return False
    return True
