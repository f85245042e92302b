"""Cache folders that were made here, told from folders that hold the things of others.

What clears a cache removes nothing in a folder without the marker, whatever the names in it.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

MARKER = ".made-by-jaxserve"
TEXT = "jaxserve made this folder, and removes old entries of its caches from it.\n"


def make(folder: Path) -> None:
    """Make a folder, for this user alone, and mark it; one that is there is marked if it is empty.

    One that cannot be marked, as on a full disk, is used all the same, and a line in the log.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if set(os.listdir(folder)) <= {"lost+found"}:  # which a new volume has
            (folder / MARKER).write_text(TEXT)
    except OSError as error:
        logger.warning("the cache %s will not be cleared: %s", folder, error)


def is_own(folder: Path | int) -> bool:
    """Whether `make` has marked a folder, which is a path or an open descriptor."""
    try:
        if isinstance(folder, int):
            facts = os.stat(MARKER, dir_fd=folder, follow_symlinks=False)
        else:
            facts = (folder / MARKER).lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode)
