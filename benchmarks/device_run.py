"""The common parts of commands that measure a device: options, the process that owns the device,
the cases in turn until the time is over, and the files of the results."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.cuda_toolkit import toolkit_environment
from benchmarks.isolated import Inline, Worker, importing_from

ROOT = Path(__file__).parents[1]
EXIT_FAILED = 1
START_LIMIT_S = 120
MOST_FAILURES = 2  # of a group in a row that cost the process: then it is not the cases

Item = TypeVar("Item")


class Answering(Protocol):
    """A Worker or an Inline."""

    def call(self, request: Any, limit_s: float) -> Any: ...

    def close(self) -> None: ...


def command_line(
    description: str | None, only: Sequence[str], budget_s: float, **kinds: Any
) -> argparse.ArgumentParser:
    """The options that all have; `only` are the names of what can be chosen."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **kinds
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="tiny shapes on the CPU: finds errors only")
    add(
        "--only",
        action="append",
        choices=list(only),
        default=[],
        metavar="NAME",
        help=f"run this alone (repeatable): {'; '.join(only)}",
    )
    add("--budget-seconds", type=float, default=budget_s, help="what is not begun by then is left")
    add("--output", type=Path, help="folder for the results")
    return parser


def device_process(
    module: str, answers: Callable[[], Any], dry_run: bool, environment: dict[str, str]
) -> Answering:
    """The device's worker: `python -m MODULE`, in a dry run `answers()` in this process."""
    if dry_run:
        return Inline(answers())
    environment = importing_from(ROOT) | toolkit_environment() | environment
    return Worker([sys.executable, "-m", module], environment)


class Turns(Generic[Item]):
    """Cases one after the other, until they or the time are over.

    A group is left out once its cases have cost the process MOST_FAILURES times in a row.

    Args:
        cases: in their order.
        left: seconds until no case is begun any more.
        group: case -> name of its group.
        take: removes one waiting case from the list and returns it; by default the first.
    """

    def __init__(
        self,
        cases: Sequence[Item],
        left: Callable[[], float],
        group: Callable[[Item], str],
        take: Callable[[list[Item]], Item] = lambda waiting: waiting.pop(0),
    ):
        self.notes: list[str] = []  # what was not run, and why
        self._waiting, self._count = list(cases), len(cases)
        self._left, self._group, self._take = left, group, take
        self._failures: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Item]:
        while self._waiting:
            if self._left() <= 0:
                self.stop("time is up")
                return
            yield self._take(self._waiting)

    def passed(self, case: Item) -> None:
        """Tells that a case was answered."""
        self._failures[self._group(case)] = 0

    def failed(self, case: Item, lost: bool) -> None:
        """Tells that one was not, and whether it cost the process."""
        group = self._group(case)
        self._failures[group] += lost
        if self._failures[group] == MOST_FAILURES:
            kept = [other for other in self._waiting if self._group(other) != group]
            if count := len(self._waiting) - len(kept):
                why = f"{MOST_FAILURES} in a row failed"
                self.notes.append(f"Not run: {count} cases of {group} ({why}).")
            self._waiting = kept

    def stop(self, why: str) -> None:
        """Runs none of those that wait."""
        if self._waiting:
            self.notes.append(f"Not run: {len(self._waiting)} of {self._count} cases ({why}).")
        self._waiting = []


def results_folder(output: Path | None, name: str) -> Path:
    """The folder of results: the one given, or a temporary one."""
    return output or Path(tempfile.mkdtemp(prefix=f"{name}-"))


def write_files(folder: Path, texts: dict[str, str]) -> None:
    """Files by name; a reader never sees half of one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        partial = folder / f".{name}.partial"
        partial.write_text(text)
        partial.replace(folder / name)


def told(report: str, folder: Path, failures: Sequence[str]) -> int:
    """Prints the end of a run; its exit status."""
    print(f"{report}\nwritten to {folder}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return EXIT_FAILED if failures else 0


def deadline(budget_s: float) -> float:
    """The time.monotonic() at which a budget is over that begins now."""
    return time.monotonic() + budget_s
