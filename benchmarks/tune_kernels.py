#!/usr/bin/env python3
"""Measures the static choices of the kernels on this device: the table of pallas_kernels/tuning.py.

    python benchmarks/tune_kernels.py --budget-seconds 540

For each operation it starts from the chip's row of the table and tries every choice that differs
in up to three fields, and what the kernel chooses by itself. A choice is timed only after its
result agreed with plain XLA's; one that does not compile, hangs or is wrong is listed with the
reason. tuning.json has everything; the line for the table is printed last.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device_run import (
    EXIT_FAILED,
    Answering,
    command_line,
    deadline,
    results_folder,
    told,
    write_files,
)
from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench import search
from benchmarks.kernel_bench.report import number, table
from benchmarks.kernel_bench.run import kernel_process
from benchmarks.kernel_bench.tuning import KINDS, table_row

KERNELS_OWN = "left to the kernel"
SHOWN = 10  # entries of a case in the Markdown; the JSON has all of them


def markdown(found: dict[str, Any]) -> str:
    """The best entries of every case, and what failed."""
    lines = [f"# Tuning of the kernels on {found['device']['device_kind']}"]
    for operation, entry in found["operations"].items():
        lines += ["", f"## {operation}, {entry['backend']}"]
        if not entry["cases"]:
            lines += ["", "Plain XLA has nothing to tune."]
        for label, entries in entry["cases"].items():
            timed = [e for e in entries if e["us"] is not None]
            failed = [e for e in entries if e["us"] is None]
            lines += ["", f"### {label}: {len(timed)} ran, {len(failed)} did not", ""]
            shown = [*timed[:SHOWN], *failed[:SHOWN]]
            cells = [
                (
                    ", ".join(f"{k}={v}" for k, v in e["tuning"].items()) or KERNELS_OWN,
                    number(e["us"], 4),
                    e["reason"].replace("|", "/"),
                )
                for e in shown
            ]
            lines += table(("choice", "us", "remark"), cells)
    best = {name: entry["best"] for name, entry in found["operations"].items()}
    lines += ["", "```", table_row(found["device"]["device_kind"], best), "```"]
    return "\n".join(lines) + "\n"


def measure(
    worker: Answering,
    operations: list[str],
    folder: Path,
    *,
    dry_run: bool,
    rounds: int,
    deadline: float,
    progress: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """The search; tuning.json and tuning.md are written after every case.

    Args:
        worker: the process that owns the device.
        operations: some of KINDS.
        folder: the folder of both files.
        dry_run: tiny shapes: finds errors only.
        rounds: turns of each choice.
        deadline: time.monotonic() after which no choice is begun.
        progress: called after every case as well.

    Raises:
        WorkerError: the device could not be used.
    """

    def write(found: dict[str, Any]) -> None:
        texts = {"tuning.json": json.dumps(found, indent=1), "tuning.md": markdown(found)}
        write_files(folder, texts)
        progress(found)

    options = {"dry_run": dry_run, "torch": False, "rounds": rounds}
    return search.search(worker, operations, options, deadline=deadline, progress=write)


def main(arguments: list[str] | None = None) -> int:
    """0 when the search ended, 1 when the device could not be used."""
    parser = command_line(__doc__, KINDS, 540)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each choice")
    options = parser.parse_args(arguments)
    folder = results_folder(options.output, "tuning")
    worker = kernel_process(with_torch=False, dry_run=options.dry_run)
    try:
        found = measure(
            worker,
            options.only or list(KINDS),
            folder,
            dry_run=options.dry_run,
            rounds=options.rounds,
            deadline=deadline(options.budget_seconds),
        )
    except WorkerError as error:
        print(f"the search ended early: {error}; written to {folder}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        worker.close()
    return told(markdown(found), folder, [])


if __name__ == "__main__":
    sys.exit(main())
