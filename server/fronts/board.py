"""The board on which the processes of a server count, in memory that they share.

Each process has a row and writes no other, so that a sum needs no lock. Quotas are used up by all
of them, one at a time: they have a lock, which the system lets go of where a process has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from server.counts import NOW, Cell, Counts, Numbers

NUMBER_BYTES = 8
KEY_NUMBERS = 4  # two quotas of two numbers each


class Board:
    """Numbers in a file that has no name.

    Args:
        rows: processes.
        keys: API keys, which may have quotas.
        models: of the server.
        file: of a board that another process has made; None: one is made.
    """

    def __init__(self, rows: int, keys: int, models: int = 1, file: BinaryIO | None = None):
        self.quotas = models * rows * len(Cell)  # where they begin
        size = NUMBER_BYTES * (self.quotas + keys * KEY_NUMBERS)
        if file is None:
            file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the board)
            file.truncate(size)
        self.rows, self._file = rows, file
        self.numbers = memoryview(mmap.mmap(file.fileno(), size)).cast("d")

    @property
    def descriptor(self) -> int:
        """Of its file."""
        return self._file.fileno()

    def counts(self, row: int, model: int = 0) -> Counts:
        """Those of one process: of one model, and with the first of them of the server."""
        return _SharedCounts(self, row, model)

    def of_row(self, row: int, cell: Cell) -> float:
        """What one process counts, as another one sees it."""
        return float(self.numbers[row * len(Cell) + cell])

    def clear(self, row: int) -> None:
        """A process has died: what was there in it is there no more."""
        for cell in NOW:
            self.numbers[row * len(Cell) + cell] = 0.0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Within, no other process has the lock."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


class _SharedCounts(Counts):
    """One row of a board, of one model."""

    def __init__(self, board: Board, row: int, model: int):
        width, size = len(Cell), board.rows * len(Cell)
        rows = board.numbers[model * size : (model + 1) * size]
        super().__init__(board.rows, rows[row * width : (row + 1) * width])
        self._board = board
        self._of_all = [rows[cell::width] for cell in Cell]

    def total(self, cell: Cell) -> float:
        return sum(self._of_all[cell])

    def quota(self, place: int) -> Numbers:
        start = self._board.quotas + 2 * place
        return self._board.numbers[start : start + 2]

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self._board.locked()
