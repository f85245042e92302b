"""Puts a folder in its place at once: a reader sees the whole old one or the whole new one.

A new folder grows beside its place under another name. A rename puts it there; where an old one is
in the way the two are exchanged, which Linux does in one step.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

from checkpoints.errors import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def partial_folder(out: Path) -> Path:
    """The folder that grows to become `out`."""
    return out.parent / f".{out.name}.partial"


def publish(new: Path, out: Path) -> None:
    """Put a finished folder in its place; an old one there is deleted.

    Raises:
        CheckpointError: `out` exists and this system cannot exchange two folders.
    """
    if out.is_dir() and any(out.iterdir()):
        _exchange(new, out)
        shutil.rmtree(new)
    else:
        os.rename(new, out)
    _sync(out.parent)


def check_place(out: Path, ours: str | None = None) -> None:
    """Refuses an output folder that holds something else.

    Args:
        out: the folder; absent, empty, or one that was made by us before.
        ours: name of the file that says so; None: only an empty one is taken.

    Raises:
        CheckpointError: it is a file, or a folder of something else.
    """
    if out.exists() and not out.is_dir():
        raise CheckpointError(out, "it is a file, a folder is to be written")
    if out.is_dir() and any(out.iterdir()) and (ours is None or not (out / ours).is_file()):
        why = "" if ours is None else f" and has no {ours}"
        raise CheckpointError(out, f"it is not empty{why}, so it is not overwritten")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(out, f"cannot be made ({error.strerror})") from error


def sync_file(file: Path) -> None:
    """Have a file on the disk before it is relied on."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(a: Path, b: Path) -> None:
    if not sys.platform.startswith("linux"):
        raise CheckpointError(b, "it exists, and this system cannot replace it: delete it first")
    libc = ctypes.CDLL(None, use_errno=True)
    places = (os.fsencode(a), os.fsencode(b))
    if libc.renameat2(_AT_FDCWD, places[0], _AT_FDCWD, places[1], _RENAME_EXCHANGE):
        reason = os.strerror(ctypes.get_errno())
        raise CheckpointError(
            b, f"it exists, and the file system cannot replace it ({reason}): delete it first"
        )


def _sync(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        sync_file(folder)
