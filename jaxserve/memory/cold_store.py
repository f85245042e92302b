"""KV pages as files in a folder: a tier that outlives its process.

A file is named by the model and by the page's key. Its header repeats both, and has a digest of
everything: what is torn, changed or of another model is never used. A folder on a disk may stall,
get full or go away, so the engine's thread never touches it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import queue
import re
import stat
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

logger = logging.getLogger(__name__)

MAGIC = b"jskvpg01"
MODEL_BYTES, DIGEST_BYTES, MOST_KEY_BYTES = 16, 32, 32
HEADER = struct.Struct(f"<8s{MODEL_BYTES}sB{MOST_KEY_BYTES}sQ{DIGEST_BYTES}s")
NAME = re.compile(r"[0-9a-f]{32}-(?:[0-9a-f]{2}){16,17}\.kv")
PART = re.compile(NAME.pattern + r"\.\d+\.part")  # that is being written
OLD_S = 3600.0  # after which a part is what a killed process has left
MOST_QUEUED = 64  # pages that wait to be written
PATIENCE_S = 3.0  # that a read may take before requests are computed instead
RETRY_S = 10.0  # after which a disk that was too slow is tried again
FLUSH_S = 2.0  # that an engine that ends waits for what is to be written
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has none
FULL = (errno.ENOSPC, errno.EDQUOT)
READS = 15  # whose median is the time of the next one

Deliver = Callable[[int, bytes | None], None]


class ColdStore:
    """Files of pages, the least recently used removed where they are too many.

    Args:
        folder: of this user alone; made where there is none.
        model: MODEL_BYTES that stand for the weights and for the form of the pages.
        page_bytes: of what a page holds.
        most_bytes: of all files in the folder with names like these, of other models too.

    Raises:
        OSError: the folder cannot be made, written or read, or others may write to it.

    Attributes:
        num_unwritten: pages that were not written, since too many waited or the disk was full.
    """

    def __init__(self, folder: Path, model: bytes, page_bytes: int, most_bytes: int):
        self._folder, self._model = folder, model
        self._page_bytes, self._most_bytes = page_bytes, most_bytes
        self.num_unwritten = 0
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        is_own = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
        if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{folder} is another user's, or others may write to it")
        self._files = self._scan()
        self._num_bytes = sum(self._files.values())
        self._make_room(0)
        self._is_full = False
        self._seconds: deque[float] = deque([self._try_out()] * READS, READS)
        self._last_read = 0.0  # when it ended
        self._reading_since: float | None = None
        self._to_write: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[Sequence[bytes], Deliver, Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._writer = threading.Thread(target=self._write_all, name="kv-files", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read_all, name="kv-files-read", daemon=True).start()

    def __contains__(self, key: bytes) -> bool:
        return self._name(key) in self._files

    @property
    def num_files(self) -> int:
        """Of this model or others."""
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Of these files."""
        return self._num_bytes

    def pays(self, count: int, recompute_seconds: float | None, num_spared: int = 0) -> bool:
        """Whether reading so many pages takes less time than computing them, and others.

        Args:
            count: of pages.
            recompute_seconds: of one page; None: reading always pays.
            num_spared: pages beside these that need not be computed either.
        """
        since = self._reading_since
        if since is not None and time.monotonic() - since > PATIENCE_S:
            return False  # the disk has stalled
        if recompute_seconds is None or time.monotonic() - self._last_read > RETRY_S:
            return True
        return count * median(self._seconds) < (count + num_spared) * recompute_seconds

    def newest(self, count: int) -> list[bytes]:
        """Keys of this model's pages, the most recently used first."""
        ours = self._model.hex() + "-"
        with self._lock:
            names = [name for name in reversed(self._files) if name.startswith(ours)]
        return [
            bytes.fromhex(name.removeprefix(ours).removesuffix(".kv")) for name in names[:count]
        ]

    def write(self, key: bytes, parts: Sequence[np.ndarray]) -> None:
        """Have a page written, unless it is there or too many wait; copies what it holds."""
        if key in self:
            return
        if self._is_full or self._to_write.qsize() >= MOST_QUEUED:
            self.num_unwritten += 1
            return
        self._to_write.put((key, b"".join(part.tobytes() for part in parts)))

    def read(self, keys: Sequence[bytes], deliver: Deliver) -> Future[None]:
        """Have pages read by another thread, in order.

        Args:
            keys: of pages.
            deliver: called by that thread with the place of a key and what its page holds; None:
                there is no such page, or it is not to be used.

        Returns:
            Done when all are delivered.
        """
        future: Future[None] = Future()
        self._to_read.put((keys, deliver, future))
        return future

    def forget_all(self) -> None:
        """Find nothing any more that was written so far; a later start with the model does."""
        self._model = os.urandom(MODEL_BYTES)

    def close(self) -> None:
        """Write what waits, as far as that is soon done, and end the threads."""
        self._to_write.put(None)
        self._to_read.put(None)
        self._writer.join(FLUSH_S)

    def _name(self, key: bytes) -> str:
        return f"{self._model.hex()}-{key.hex()}.kv"

    def _scan(self) -> OrderedDict[str, int]:
        """Sizes of the files by name, the least recently used first; removes old parts."""
        found: list[tuple[float, str, int]] = []
        now = self._now_of_disk()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    continue
                facts = entry.stat(follow_symlinks=False)
                if NAME.fullmatch(entry.name):
                    found.append((facts.st_mtime, entry.name, facts.st_size))
                elif PART.fullmatch(entry.name) and now - facts.st_mtime > OLD_S:
                    os.unlink(entry.path)
        return OrderedDict((name, size) for _, name, size in sorted(found))

    def _now_of_disk(self) -> float:
        """The time of a file that is written now; shows that files can be written."""
        path = self._folder / f".{os.getpid()}.probe"
        path.write_bytes(b"")
        try:
            return path.stat().st_mtime
        finally:
            path.unlink()

    def _try_out(self) -> float:
        """Seconds that a page takes to be read and checked. Raises OSError.

        On a full disk it is a page that is there; `math.inf` where none is of this model.
        """
        key = os.urandom(16)
        path = self._folder / self._name(key)
        try:
            self._write(key, bytes(self._page_bytes))
            begin = time.monotonic()
            if self._checked(self._name(key), key) is None:
                raise OSError(f"{path} does not hold what was written to it")
            return time.monotonic() - begin
        except OSError as error:
            if error.errno not in FULL or not self._files:
                raise
            self._write_no_more(error)  # what is there can be read
            begin = time.monotonic()
            is_read = any(self.read_one(key) is not None for key in self.newest(1))
            return time.monotonic() - begin if is_read else math.inf
        finally:
            path.unlink(missing_ok=True)

    def _write_all(self) -> None:
        while (one := self._to_write.get()) is not None:
            key, data = one
            name = self._name(key)
            if name in self._files or self._is_full:
                continue
            try:
                self._make_room(HEADER.size + len(data))
                self._write(key, data)
            except OSError as error:
                self._write_no_more(error)
                continue
            with self._lock:
                self._files[name] = HEADER.size + len(data)
                self._num_bytes += self._files[name]

    def _write_no_more(self, error: OSError) -> None:
        self._is_full = True
        logger.warning(
            "kv_offloading_path=%s: %s; no more pages are written there until the next start, and "
            "the engine serves on",
            self._folder,
            error,
        )

    def _make_room(self, size: int) -> None:
        while self._files and self._num_bytes + size > self._most_bytes:
            with self._lock:
                name, freed = self._files.popitem(last=False)
                self._num_bytes -= freed
            (self._folder / name).unlink(missing_ok=True)

    def _write(self, key: bytes, data: bytes) -> None:
        name = self._name(key)
        part = self._folder / f"{name}.{os.getpid()}.part"
        head = self._head(key, len(data))
        digest = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
        digest.update(data)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_LINK
            with open(os.open(part, flags, 0o600), "wb") as file:
                file.write(head)
                file.write(digest.digest())
                file.write(data)
            part.rename(self._folder / name)
        except OSError:
            with suppress(OSError):  # the error that is raised says more
                part.unlink(missing_ok=True)
            raise

    def _head(self, key: bytes, length: int) -> bytes:
        """A header without its digest."""
        whole = HEADER.pack(MAGIC, self._model, len(key), key, length, b"")
        return whole[:-DIGEST_BYTES]

    def _read_all(self) -> None:
        while (job := self._to_read.get()) is not None:
            keys, deliver, future = job
            for place, key in enumerate(keys):
                self._reading_since = begin = time.monotonic()
                data = self.read_one(key)
                self._reading_since, self._last_read = None, time.monotonic()
                self._seconds.append(self._last_read - begin)
                deliver(place, data)
            future.set_result(None)

    def read_one(self, key: bytes) -> bytes | None:
        """What a page holds; None, and its file is forgotten, if that cannot be used."""
        name = self._name(key)
        try:
            data = self._checked(name, key)
            if data is not None:
                os.utime(self._folder / name)
        except OSError as error:
            logger.warning("kv_offloading_path: %s cannot be read: %s", name, error)
            data = None
        with self._lock:
            if data is not None and name in self._files:
                self._files.move_to_end(name)
            elif data is None:
                self._num_bytes -= self._files.pop(name, 0)
        return data

    def _checked(self, name: str, key: bytes) -> bytes | None:
        """What a file holds; None, and it is removed, if it is not what its name says."""
        path = self._folder / name
        with open(os.open(path, os.O_RDONLY | NO_LINK), "rb") as file:
            whole = file.read(HEADER.size + self._page_bytes + 1)
        head = self._head(key, self._page_bytes)
        found, data = whole[len(head) : HEADER.size], whole[HEADER.size :]
        if whole[: len(head)] == head and len(data) == self._page_bytes:
            digest = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
            digest.update(data)
            if digest.digest() == found:
                return data
        logger.warning("%s is torn, changed or of another model: it is removed, not used", path)
        path.unlink(missing_ok=True)
        return None
