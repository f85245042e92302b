"""The order of runs: rounds that alternate between the engines, or one engine after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.peers.process import WorkerError

Say = Callable[[str], Any]


class Runs(Protocol):
    """The methods of a worker that the rounds use."""

    versions: dict[str, str]
    startup_seconds: float
    conversion_seconds: float
    peak_rss_mib: float

    def start(self) -> None: ...

    def run(self, cell: int, number: int) -> dict[str, Any]: ...

    def close(self, patience: float = ...) -> None: ...


@dataclass
class EngineRecord:
    """The record of an engine after the run.

    Attributes:
        failure: why it never ran, or None.
        answers: per cell, the answers of the counted rounds.
        failures: per cell that failed, the reason.
    """

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    startup_seconds: float = 0.0
    conversion_seconds: float = 0.0
    peak_rss_mib: float = 0.0
    failure: str | None = None
    answers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


class Contestant:
    """An engine over the whole run: its worker, started when needed, and its record.

    A worker that failed in a cell is ended, and a new one is started for the next cell.

    Args:
        name: name of the engine.
        make: returns a worker that is not started yet.
        say: called with lines of progress.
    """

    def __init__(self, name: str, make: Callable[[], Runs], say: Say = print):
        self.record = EngineRecord(name)
        self._make, self._say = make, say
        self._worker: Runs | None = None

    def load(self) -> None:
        """Start the worker unless it runs or is known not to start."""
        if self._worker is not None or self.record.failure is not None:
            return
        self._worker = worker = self._make()  # from here on `unload` ends it
        try:
            worker.start()
        except WorkerError as error:
            self._worker = None
            self._fail(str(error))
            return
        record = self.record
        record.versions = worker.versions
        # the first start is the one that counts: a restart finds warm caches
        record.startup_seconds = record.startup_seconds or worker.startup_seconds
        record.conversion_seconds += worker.conversion_seconds
        self._say(f"{record.name}: ready after {worker.startup_seconds:.1f} s")

    def run(self, cell: int, number: int) -> None:
        """Round `number` of one cell, of which 0 is not counted; nothing once it has failed."""
        if cell in self.record.failures:
            return
        self.load()
        if self._worker is None:
            return
        try:
            answer = self._worker.run(cell, number)
        except WorkerError as error:
            self.record.failures[cell] = str(error)
            self.record.answers.pop(cell, None)
            self._say(f"{self.record.name}: {error}")
            self.unload()
            return
        if number:
            self.record.answers.setdefault(cell, []).append(answer)

    def unload(self, patience: float = 20.0) -> None:
        """End the worker, by force if it has not ended by itself after so many seconds."""
        if self._worker is not None:
            peak = self._worker.peak_rss_mib
            self.record.peak_rss_mib = max(self.record.peak_rss_mib, peak)
            self._worker.close(patience)
            self._worker = None

    def _fail(self, reason: str) -> None:
        self._say(f"{self.record.name}: {reason}")
        started_before = bool(self.record.versions)
        self.record.failure = f"did not start again: {reason}" if started_before else reason


def alternate(
    contestants: list[Contestant], num_cells: int, repeats: int, say: Say = print
) -> list[EngineRecord]:
    """All engines loaded; in each round every engine runs the cell once, another one first."""
    with all_ended(contestants):
        for contestant in contestants:
            contestant.load()
        for cell in range(num_cells):
            for number in range(repeats + 1):
                turn = number % len(contestants)
                for contestant in contestants[turn:] + contestants[:turn]:
                    contestant.run(cell, number)
            say(f"cell {cell + 1} of {num_cells} done")
    return [contestant.record for contestant in contestants]


@contextmanager
def all_ended(contestants: list[Contestant]) -> Iterator[None]:
    """No worker outlives this block; where an error or a signal ends it, none is waited for."""
    try:
        yield
    except BaseException:
        for contestant in contestants:
            contestant.unload(patience=0.0)
        raise
    for contestant in contestants:
        contestant.unload()


def one_at_a_time(
    contestants: list[Contestant], num_cells: int, repeats: int, say: Say = print
) -> list[EngineRecord]:
    """An engine runs all its rounds before the next is loaded."""
    for contestant in contestants:
        with all_ended([contestant]):
            for cell in range(num_cells):
                for number in range(repeats + 1):
                    contestant.run(cell, number)
        say(f"{contestant.record.name}: done")
    return [contestant.record for contestant in contestants]
