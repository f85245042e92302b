"""Files of pages: what comes back is what was written, or nothing."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.memory import cold_store
from jaxserve.memory.cold_store import HEADER, ColdStore

MODEL, OTHER = b"m" * 16, b"o" * 16
PAGE = 96
KEYS = [bytes([number]) * 16 for number in range(5)]
Opened = Callable[..., ColdStore]


def content(key: bytes) -> list[np.ndarray]:
    """Of two arrays, as a host page has them."""
    return [np.full((2, 4), key[0], np.float64), np.full(16, key[0], np.uint16)]


def whole(key: bytes) -> bytes:
    return b"".join(part.tobytes() for part in content(key))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens stores in one folder and closes them."""
    made = []

    def make(model: bytes = MODEL, most: int = 1 << 20, folder: Path | None = None) -> ColdStore:
        made.append(ColdStore(folder or tmp_path / "pages", model, PAGE, most))
        return made[-1]

    yield make
    for store in made:
        store.close()


def read(store: ColdStore, *keys: bytes) -> list[bytes | None]:
    found: dict[int, bytes | None] = {}
    store.read(keys, found.__setitem__).result(10)
    return [found[place] for place in range(len(keys))]


def written(opened: Opened, *keys: bytes, **how: Any) -> None:
    store = opened(**how)
    for key in keys:
        store.write(key, content(key))
    store.close()


def test_a_later_start_with_the_model_finds_what_was_written(
    opened: Opened, tmp_path: Path
) -> None:
    written(opened, *KEYS[:3])
    folder = tmp_path / "pages"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    again = opened()
    assert KEYS[0] in again and KEYS[3] not in again
    assert read(again, *KEYS[:2], KEYS[3]) == [whole(KEYS[0]), whole(KEYS[1]), None]
    assert (again.num_files, again.num_bytes) == (3, 3 * (HEADER.size + PAGE))
    assert {*again.newest(9)} == {*KEYS[:3]}
    other = opened(OTHER)
    assert KEYS[0] not in other and other.newest(9) == [] and other.num_files == 3
    again.forget_all()
    assert KEYS[0] not in again and read(again, KEYS[0]) == [None]


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def of_another_key(path: Path) -> None:
    path.write_bytes(path.with_name(path.name.replace("0" * 32, "01" * 16)).read_bytes())


def of_another_model(path: Path) -> None:
    path.write_bytes(path.with_name(path.name.replace(MODEL.hex(), OTHER.hex())).read_bytes())


def empty(path: Path) -> None:
    path.write_bytes(b"")


def a_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "harm",
    [torn, longer, changed, of_another_key, of_another_model, empty, a_link, gone],
    ids=lambda harm: harm.__name__,
)
def test_what_is_not_as_it_was_written_is_never_used(
    opened: Opened, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    written(opened, *KEYS[:2])
    written(opened, KEYS[0], model=OTHER)
    store = opened()
    path = tmp_path / "pages" / f"{MODEL.hex()}-{KEYS[0].hex()}.kv"
    harm(path)
    assert read(store, KEYS[0], KEYS[1]) == [None, whole(KEYS[1])]
    assert KEYS[0] not in store and (path.is_symlink() or not path.exists())


def test_the_files_used_longest_ago_make_room(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 3 * (HEADER.size + PAGE)
    written(opened, KEYS[4], model=OTHER)
    for path in (tmp_path / "pages").iterdir():
        os.utime(path, (1, 1))
    foreign = tmp_path / "pages" / "notes.txt"
    foreign.write_text("mine")
    left = tmp_path / "pages" / f"{MODEL.hex()}-{KEYS[4].hex()}.kv.77.part"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    store = opened(most=most)
    for key in KEYS[:3]:
        store.write(key, content(key))
    assert read(store, KEYS[4]) == [None]
    store.close()
    assert not left.exists() and foreign.read_text() == "mine"
    again = opened(most=most)
    assert again.num_bytes == most and {*again.newest(9)} == {*KEYS[:3]}
    read(again, KEYS[0])
    again.write(KEYS[3], content(KEYS[3]))
    again.close()
    assert {*opened(most=most).newest(9)} == {KEYS[0], KEYS[2], KEYS[3]}
    fill_disk(monkeypatch)
    assert opened(most=most // 3).newest(9) == [KEYS[3]], "a lower limit holds on a full disk, too"


def fill_disk(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
    """Nothing can be written any more, by an error of this number."""

    def full(path: Path, target: Path) -> None:
        raise OSError(number, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_ends_the_writing_and_nothing_else(
    number: int,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    store = opened()
    store.write(KEYS[0], content(KEYS[0]))
    assert read(store, KEYS[4]) == [None]
    while KEYS[0] not in store:
        pass

    fill_disk(monkeypatch, number)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        store.write(KEYS[1], content(KEYS[1]))
        store.close()
        assert "No space left on device; no more pages are written there" in caplog.text
        caplog.clear()
        begun = opened()  # a start on a disk that is full
        assert "No space left on device; no more pages are written there" in caplog.text
    assert read(begun, KEYS[0]) == [whole(KEYS[0])]
    assert begun.pays(1, 10.0) and not begun.pays(1, 1e-9), "the start has read one"
    other = opened(OTHER)
    assert read(other, KEYS[0]) == [None] and not other.pays(1, 1e9), "it could read none"
    begun.write(KEYS[3], content(KEYS[3]))
    assert begun.num_unwritten == 1
    with pytest.raises(OSError, match="No space left"):
        opened(folder=tmp_path / "empty")
    monkeypatch.undo()
    again = opened()
    assert read(again, KEYS[0], KEYS[1]) == [whole(KEYS[0]), None]
    store.write(KEYS[2], content(KEYS[2]))
    assert store.num_unwritten == 1


def test_a_folder_that_cannot_be_used_is_an_error(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        opened(folder=tmp_path / "file" / "pages")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        opened(folder=shared)


def test_a_disk_that_stalls_or_is_slow_is_left_alone_and_tried_again(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    now = [1000.0]
    monkeypatch.setattr(cold_store.time, "monotonic", lambda: now[0])
    may_go_on, began = threading.Event(), threading.Event()

    def slow(path: Path, *rest: Any) -> Any:
        began.set()
        may_go_on.wait(10)
        raise FileNotFoundError(path)

    assert store.pays(1, None) and store.pays(1, 1e-9), "it was not tried yet"
    monkeypatch.setattr(os, "open", slow)
    done = store.read([KEYS[0]], lambda place, data: None)
    began.wait(10)
    now[0] += cold_store.PATIENCE_S + 0.1
    assert not store.pays(1, None)
    may_go_on.set()
    done.result(10)
    assert store.pays(1, 1.0) and not store.pays(1, 1e-9), "by the median of the last reads"
    assert store.pays(1, 1e-9, 10**10) and not store.pays(10**10, 1e-9)
    now[0] += cold_store.RETRY_S + 0.1
    assert store.pays(1, 1e-9)
