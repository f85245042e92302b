"""Caches of compiled programs hold what is used, and not more of it than their bound."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from jaxserve.compilation import cache_bounds
from jaxserve.compilation.cache_bounds import (
    ABANDONED_S,
    MARKS,
    MOST_AGE_S,
    NATIVE,
    PROGRAMS,
    STEPS,
    Kind,
    bound,
    mark,
    tidy,
)
from pallas_kernels.native import own_folder
from pallas_kernels.native.build import BUILD_PREFIX, library_path

NOW = 2e9
DAY = 86400.0
HASH = "0123456789abcdef" * 4


def named(name: str) -> str:
    """An entry as JAX names it."""
    return f"jit_{name}-{HASH}-cache"


def entry(folder: Path, name: str, age: float, size: int = 1) -> Path:
    """A file, in a folder of ours, that was last used `age` seconds before NOW."""
    own_folder.make(folder)
    return aged(folder / name, age, size)


def aged(path: Path, age: float, size: int = 1) -> Path:
    path.write_bytes(b"x" * size)
    os.utime(path, (NOW - age, NOW - age))
    return path


def cleared(*folders: Path) -> list[str]:
    """What is removed of compiled programs in these folders."""
    return bound(dict.fromkeys(folders, (PROGRAMS,)), now=NOW)


def in_use(folder: Path, age: float) -> int:
    """What a process that began so long ago holds; its lock ends with the descriptor."""
    (folder / MARKS).mkdir(exist_ok=True)
    path = aged(folder / MARKS / "123-abcd1234", age)
    handle = os.open(path, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def names(folder: Path) -> set[str]:
    found = {one.name for one in folder.iterdir() if one.is_file() or one.is_symlink()}
    return found - {own_folder.MARKER}


def test_what_nothing_has_used_for_a_month_goes(tmp_path: Path) -> None:
    entry(tmp_path, named("old"), MOST_AGE_S + DAY)
    entry(tmp_path, named("young"), MOST_AGE_S - DAY)
    read = entry(tmp_path, named("read"), MOST_AGE_S + DAY)
    os.utime(read, (NOW - DAY, NOW - MOST_AGE_S - DAY))  # written long ago, read lately
    assert cleared(tmp_path) == [named("old")]
    assert names(tmp_path) == {named("young"), named("read")}


FOREIGN = [
    "pip-cache",
    f"{HASH}-cache",
    f"jit_f-{HASH[1:]}-cache",
    f"jit_f-{HASH}-cache.bak",
    "result.json.2025",
    "whole.json.1a",
    "loss.2026.csv",
    f"{HASH}.step.1",
    f"{HASH}.1x",
    "jaxserve-mine.so",
    "build-notes",
]


@pytest.mark.parametrize("kind", [PROGRAMS, STEPS, NATIVE])
def test_what_is_named_otherwise_is_of_others_and_stays(tmp_path: Path, kind: Kind) -> None:
    folder = tmp_path / kind.part
    for name in FOREIGN:
        entry(folder, name, 2 * MOST_AGE_S)
    folders = ["build-folder", "build-abcd12345", f"jit_g-{HASH}-cache", f"{HASH}.7", "a.100"]
    if not kind.are_folders:
        folders += ["build-abcd1234", "whole.json.5"]
    for name in folders:
        (folder / name).mkdir()
        aged(folder / name / "weights.bin", 2 * MOST_AGE_S)
        os.utime(folder / name, (NOW - 2 * MOST_AGE_S,) * 2)
    assert bound({tmp_path: [kind]}, now=NOW) == []
    assert names(folder) == {*FOREIGN}
    assert all((folder / name / "weights.bin").exists() for name in folders)


def test_native_builds_are_named_as_what_is_cleared(tmp_path: Path) -> None:
    library = library_path(Path(sys.executable))  # asked for its version only
    assert NATIVE.entries.fullmatch(library.name)
    for _ in range(20):  # names that are drawn
        name = Path(tempfile.mkdtemp(dir=tmp_path, prefix=BUILD_PREFIX)).name
        assert NATIVE.pieces.fullmatch(name), name


def test_nothing_goes_from_a_folder_that_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another program may keep its own compiled programs there: JAX names them alike."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "shared"
    (folder / "steps").mkdir(parents=True)
    before = [folder / named("theirs"), folder / "whole.json.1", folder / "steps" / f"{HASH}.step"]
    for path in before:
        aged(path, 2 * MOST_AGE_S)
    for one in (folder, folder / "steps"):
        own_folder.make(one)
    with caplog.at_level(logging.INFO):
        tidy([folder], folder)
    assert all(path.exists() for path in before)
    assert not list(folder.rglob(own_folder.MARKER))
    assert caplog.text.count("was not made by jaxserve") == 2


def test_a_folder_that_was_there_and_empty_is_ours(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()  # of a volume that is new
    own_folder.make(tmp_path)
    assert own_folder.is_own(tmp_path)
    entry(tmp_path, named("old"), MOST_AGE_S + DAY)
    assert cleared(tmp_path) == [named("old")]
    (tmp_path / own_folder.MARKER).unlink()
    (tmp_path / own_folder.MARKER).symlink_to(aged(tmp_path / "file", DAY))
    assert not own_folder.is_own(tmp_path), "a link marks nothing"


def test_a_link_in_the_place_of_the_marks_is_one_line_and_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    entry(folder, named("old"), 2 * MOST_AGE_S)
    entry(folder / "steps", f"{HASH}.step", 2 * MOST_AGE_S)
    outside.mkdir()
    for name in ("thesis.txt", "123-abcd1234"):
        aged(outside / name, 2 * MOST_AGE_S)
    (folder / MARKS).symlink_to(outside)
    tidy([folder], folder)
    assert names(outside) == {"thesis.txt", "123-abcd1234"}, "nothing goes, and nothing is made"
    assert names(folder) == {named("old"), MARKS} and names(folder / "steps") == {f"{HASH}.step"}
    assert caplog.text.count("\n") == 1 and f"{folder} is not cleared" in caplog.text
    assert "a link, or no folder: 'in-use'" in caplog.text


def test_files_among_the_marks_that_are_none_stay(tmp_path: Path) -> None:
    entry(tmp_path, named("old"), 2 * MOST_AGE_S)
    (tmp_path / MARKS).mkdir()
    for name in ("thesis.txt", "12-", "123-abcd1234"):
        aged(tmp_path / MARKS / name, 2 * MOST_AGE_S)
    assert cleared(tmp_path) == [named("old")]
    assert names(tmp_path / MARKS) == {"thesis.txt", "12-"}


def test_marks_of_another_user_are_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry(tmp_path, named("old"), 2 * MOST_AGE_S)
    (tmp_path / MARKS).mkdir()
    aged(tmp_path / MARKS / "123-abcd1234", 2 * MOST_AGE_S)
    monkeypatch.setattr(cache_bounds.os, "getuid", lambda: os.geteuid() + 1)
    assert mark(tmp_path) is None and cleared(tmp_path) == []
    assert names(tmp_path / MARKS) == {"123-abcd1234"}
    assert "a folder of another user" in caplog.text


def test_beyond_the_bound_the_longest_unused_go_first_over_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_bounds, "MOST_BYTES", 250)
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, age in ((a, 4), (b, 3), (a, 2), (b, 1)):
        entry(folder, named(f"{age}"), age * DAY, 100)
    assert cleared(a, b) == [named("4"), named("3")]
    assert names(a) | names(b) == {named("2"), named("1")}


def test_what_a_living_process_may_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry(tmp_path, named("before"), MOST_AGE_S + 20 * DAY, 100)
    entry(tmp_path, named("since"), MOST_AGE_S + 5 * DAY, 100)
    handle = in_use(tmp_path, MOST_AGE_S + 10 * DAY)
    monkeypatch.setattr(cache_bounds, "MOST_BYTES", 10)
    assert cleared(tmp_path) == [named("before")]
    os.close(handle)  # as the kernel does when the process ends, however it does
    assert cleared(tmp_path) == [named("since")]
    assert names(tmp_path / MARKS) == set(), "marks of processes that are gone go too"


def test_a_process_marks_what_it_uses_until_it_ends(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from jaxserve.compilation import cache_bounds as c\n"
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
    entry(tmp_path, named("a"), 35 * DAY)
    assert cleared(tmp_path) == []
    process.kill()
    process.communicate()
    assert cleared(tmp_path) == [named("a")]


def test_what_killed_processes_left_half_written_goes_and_what_is_being_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache_bounds.time, "time", lambda: NOW)
    native, programs = tmp_path / "jaxserve" / "native", tmp_path / "programs"
    own_folder.make(native)
    for age, name in ((2 * ABANDONED_S, "build-old_1234"), (ABANDONED_S / 2, "build-new_1234")):
        (native / name).mkdir()
        aged(native / name / "linear.o", age)
        os.utime(native / name, (NOW - age, NOW - age))
    entry(programs, "whole.json.12", 2 * ABANDONED_S)
    entry(programs, "whole.json", 2 * ABANDONED_S)
    entry(programs / "steps", f"{HASH}.12", 2 * ABANDONED_S)
    entry(programs / "steps", f"{HASH}.13", 1.0)
    tidy([programs], programs)
    assert {one.name for one in native.iterdir()} == {"build-new_1234", MARKS, own_folder.MARKER}
    assert names(programs) == {"whole.json"}
    assert names(programs / "steps") == {f"{HASH}.13"}


def test_links_lead_nowhere(tmp_path: Path) -> None:
    outside, cache = tmp_path / "outside", tmp_path / "cache"
    old = 2 * MOST_AGE_S
    entry(outside, named("precious"), old)
    entry(outside / "steps", f"{HASH}.step", old)
    entry(cache, named("old"), old)
    links = {named("link"): named("precious"), "whole.json.1": "steps", "steps": "steps"}
    for link, target in links.items():
        (cache / link).symlink_to(outside / target)
        os.utime(cache / link, (NOW - old, NOW - old), follow_symlinks=False)
    (tmp_path / "linked").symlink_to(outside)
    folders = [cache, tmp_path / "linked", tmp_path / "none"]
    assert bound(dict.fromkeys(folders, (PROGRAMS, STEPS)), now=NOW) == [named("old")]
    assert names(outside) == {named("precious")} and names(cache) == {*links}
    assert names(outside / "steps") == {f"{HASH}.step"}


def test_several_starts_at_once_remove_each_entry_and_none_complains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(200):
        entry(tmp_path, named(f"{number}"), MOST_AGE_S + DAY)
    entry(tmp_path, named("young"), DAY)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            cleared(tmp_path)  # an entry may be gone since it was seen
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert names(tmp_path) == {named("young")}


def test_what_cannot_be_removed_is_one_line_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry(tmp_path, named("old"), MOST_AGE_S + DAY)

    def refused(name: str, *, dir_fd: int) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(cache_bounds.os, "unlink", refused)
    with caplog.at_level(logging.WARNING):
        assert cleared(tmp_path) == []
    assert caplog.text.count("\n") == 1 and named("old") in caplog.text


def test_a_folder_that_cannot_be_marked_is_used_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert mark(tmp_path / "file") is None
    assert "nor marked as in use" in caplog.text
