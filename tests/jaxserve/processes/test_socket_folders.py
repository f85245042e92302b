"""Folders of servers that are gone are removed, and only those."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from jaxserve.processes.socket_folders import OWNER, PREFIX, SOCKET, own, remove_stale


def made(root: Path, name: str, *files: str) -> Path:
    folder = root / f"{PREFIX}{name}"
    folder.mkdir()
    for file in files:
        (folder / file).touch()
    return folder


def test_only_what_nobody_holds_is_removed(tmp_path: Path) -> None:
    stale = made(tmp_path, "stale", OWNER)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale / SOCKET))
    bare = made(tmp_path, "bare", OWNER)
    used = made(tmp_path, "used")
    kept = [
        used,
        made(tmp_path, "being-made"),
        made(tmp_path, "no-owner", SOCKET),
        made(tmp_path, "other-files", OWNER, "notes.txt"),
    ]
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    linked = made(tmp_path, "linked-owner")
    (tmp_path / "target").touch()
    (linked / OWNER).symlink_to(tmp_path / "target")
    abandoned = made(tmp_path, "abandoned")  # its server was ended before it had the lock
    os.utime(abandoned, (1e9, 1e9))
    holder = own(used)
    assert set(remove_stale(tmp_path)) == {stale, bare, abandoned}
    assert all(folder.exists() for folder in [*kept, linked])
    assert os.path.lexists(tmp_path / f"{PREFIX}link") and not stale.exists()
    holder.close()
    assert remove_stale(tmp_path) == [used]
