"""Caches of compiled programs hold what is used, and not more of it than their bound."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxserve.execution import cache_bounds
from jaxserve.execution.cache_bounds import ABANDONED_S, MARKS, MOST_AGE_S, Place, bound, mark, tidy

NOW = 2e9
DAY = 86400.0


def entry(folder: Path, name: str, age: float, size: int = 1) -> Path:
    """A file that was last used `age` seconds before NOW."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(b"x" * size)
    os.utime(path, (NOW - age, NOW - age))
    return path


def place(folder: Path) -> Place:
    return Place(folder, "*-cache", "*.json.[0-9]*", folder / MARKS)


def in_use(folder: Path, age: float) -> int:
    """What a process that began so long ago holds; its lock ends with the descriptor."""
    path = entry(folder / MARKS, "123-abc", age)
    handle = os.open(path, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def names(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir() if one.is_file() or one.is_symlink()}


def test_what_nothing_has_used_for_a_month_goes(tmp_path: Path) -> None:
    entry(tmp_path, "old-cache", MOST_AGE_S + DAY)
    entry(tmp_path, "young-cache", MOST_AGE_S - DAY)
    read = entry(tmp_path, "read-cache", MOST_AGE_S + DAY)
    os.utime(read, (NOW - DAY, NOW - MOST_AGE_S - DAY))  # written long ago, read lately
    entry(tmp_path, "somebody's", MOST_AGE_S + DAY)
    assert bound([place(tmp_path)], NOW) == ["old-cache"]
    assert names(tmp_path) == {"young-cache", "read-cache", "somebody's"}


def test_beyond_the_bound_the_longest_unused_go_first_over_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_bounds, "MOST_BYTES", 250)
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, age in ((a, 4), (b, 3), (a, 2), (b, 1)):
        entry(folder, f"{age}-cache", age * DAY, 100)
    assert bound([place(a), place(b)], NOW) == ["4-cache", "3-cache"]
    assert names(a) | names(b) == {"2-cache", "1-cache"}


def test_what_a_living_process_may_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry(tmp_path, "before-cache", MOST_AGE_S + 20 * DAY, 100)
    entry(tmp_path, "since-cache", MOST_AGE_S + 5 * DAY, 100)
    handle = in_use(tmp_path, MOST_AGE_S + 10 * DAY)
    monkeypatch.setattr(cache_bounds, "MOST_BYTES", 10)
    assert bound([place(tmp_path)], NOW) == ["before-cache"]
    os.close(handle)  # as the kernel does when the process ends, however it does
    assert bound([place(tmp_path)], NOW) == ["since-cache"]
    assert names(tmp_path / MARKS) == set(), "marks of processes that are gone go too"


def test_a_process_marks_what_it_uses_until_it_ends(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from jaxserve.execution import cache_bounds as c\n"
        "c.mark(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    (file,) = (tmp_path / MARKS).iterdir()
    os.utime(file, (NOW - 40 * DAY, NOW - 40 * DAY))
    entry(tmp_path, "a-cache", 35 * DAY)
    assert bound([place(tmp_path)], NOW) == []
    process.kill()
    process.communicate()
    assert bound([place(tmp_path)], NOW) == ["a-cache"]


def test_what_killed_processes_left_half_written_goes_and_what_is_being_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache_bounds.time, "time", lambda: NOW)
    native, programs = tmp_path / "jaxserve" / "native", tmp_path / "programs"
    for age, name in ((2 * ABANDONED_S, "old"), (ABANDONED_S / 2, "new")):
        entry(native / f"build-{name}", "linear.o", age)
        os.utime(native / f"build-{name}", (NOW - age, NOW - age))
    entry(programs, "whole.json.12", 2 * ABANDONED_S)
    entry(programs, "whole.json", 2 * ABANDONED_S)
    entry(programs / "steps", "abc.12", 2 * ABANDONED_S)
    entry(programs / "steps", "abc.13", 1.0)
    tidy([programs], programs)
    assert {one.name for one in native.iterdir()} == {"build-new", MARKS}
    assert names(programs) == {"whole.json"}
    assert names(programs / "steps") == {"abc.13"}


def test_links_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    old = 2 * MOST_AGE_S
    entry(outside, "precious-cache", old)
    entry(outside / "build-folder", "file", old)
    cache = tmp_path / "cache"
    entry(cache, "old-cache", old)
    (cache / "link-cache").symlink_to(outside / "precious-cache")
    (cache / "link.json.1").symlink_to(outside / "build-folder")
    for link in ("link-cache", "link.json.1"):
        os.utime(cache / link, (NOW - old, NOW - old), follow_symlinks=False)
    (tmp_path / "linked").symlink_to(outside)
    found = bound([place(cache), place(tmp_path / "linked"), place(tmp_path / "none")], NOW)
    assert "old-cache" in found and "precious-cache" not in found
    assert names(outside) == {"precious-cache"}
    assert (outside / "build-folder" / "file").exists()


def test_several_starts_at_once_remove_each_entry_and_none_fails(tmp_path: Path) -> None:
    for number in range(200):
        entry(tmp_path, f"{number}-cache", MOST_AGE_S + DAY)
    entry(tmp_path, "young-cache", DAY)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            bound([place(tmp_path)], NOW)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert names(tmp_path) == {"young-cache"}


def test_what_cannot_be_removed_is_one_line_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry(tmp_path, "old-cache", MOST_AGE_S + DAY)

    def refused(name: str, *, dir_fd: int) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(cache_bounds.os, "supports_dir_fd", {refused})
    monkeypatch.setattr(cache_bounds.os, "unlink", refused)
    with caplog.at_level(logging.WARNING):
        assert bound([place(tmp_path)], NOW) == []
    assert caplog.text.count("\n") == 1 and "old-cache" in caplog.text


def test_a_folder_that_cannot_be_marked_is_used_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert mark(tmp_path / "file") is None
