"""The process of one engine: reads commands as JSON lines, answers with JSON lines.

    python -m benchmarks.peers.worker ENGINE --job JOB_JSON --workload FILE

Started by `process.py`. Events: `converted` (seconds), `ready` (versions, peak memory) or
`unavailable` (reason); then for `{"run": 2, "round": 1}` either the cell's figures or `error`.
Whatever the engine itself prints goes to standard error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peers.adapters import ENGINES, Engine, Job, Unavailable
from benchmarks.peers.cores import use_cores
from benchmarks.peers.workload import Cell, read_rounds


def take_stdout() -> TextIO:
    """The pipe to the parent; file descriptor 1 itself leads to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def tree_peak_mib() -> float:
    """Peak resident memory of this process and its descendants, MiB: the sum of their peaks."""
    peaks, parents = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since the listing
        peak = re.search(r"^VmHWM:\s+(\d+) kB", text, flags=re.MULTILINE)
        parent = re.search(r"^PPid:\s+(\d+)", text, flags=re.MULTILINE)
        if parent:
            pid = int(status.parent.name)
            parents[pid] = int(parent[1])
            peaks[pid] = int(peak[1]) if peak else 0
    mine = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= grown
    return sum(peaks.get(pid, 0) for pid in mine) / 1024


def run_cell(engine: Engine, cell: Cell) -> dict[str, Any]:
    """Time one cell.

    Raises:
        RuntimeError: a request gave another number of tokens than it was asked for.
    """
    begin = time.perf_counter()
    ran = engine.run(cell)
    seconds = time.perf_counter() - begin
    for number, (tokens, asked) in enumerate(zip(ran.tokens, cell.output_lens, strict=True)):
        if len(tokens) != asked:
            raise RuntimeError(f"request {number} gave {len(tokens)} of {asked} tokens")
    return {
        "seconds": seconds,
        "tokens": cell.output_tokens,
        "first_tokens": [tokens[0] for tokens in ran.tokens],
        "peak_rss_mib": tree_peak_mib(),
        "figures": ran.figures,
    }


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


def load(name: str, job: Job, cells: list[Cell], say: Any) -> Engine | None:
    """The engine after its first token; None after an `unavailable` event."""
    module_name, settings = ENGINES[name]
    job = Job(**{**vars(job), "settings": settings | job.settings})
    try:
        module = importlib.import_module(f"benchmarks.peers.adapters.{module_name}")
        if hasattr(module, "convert"):
            begin = time.perf_counter()
            module.convert(job)
            say({"event": "converted", "seconds": time.perf_counter() - begin})
        engine: Engine = module.load(job)
        engine.run(Cell("first token", 1, cells[0].prompts[:1], [1]))
    except ImportError as error:
        traceback.print_exc()
        say({"event": "unavailable", "reason": f"not installed: {error}"})
    except Unavailable as error:
        say({"event": "unavailable", "reason": str(error)})
    except Exception as error:
        traceback.print_exc()
        say({"event": "unavailable", "reason": f"does not start: {reason(error)}"})
    else:
        return engine
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--job", type=json.loads, required=True)
    parser.add_argument("--workload", type=Path, required=True)
    options = parser.parse_args()
    answers = take_stdout()

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    rounds = read_rounds(options.workload)
    paths = {key: Path(options.job[key]) for key in ("model", "converted")}
    job = Job(**options.job | paths)
    use_cores(job.threads)  # before an engine counts them
    engine = load(options.engine, job, rounds[0], say)
    if engine is None:
        return 1
    say({"event": "ready", "versions": engine.versions, "peak_rss_mib": tree_peak_mib()})
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            say(run_cell(engine, rounds[asked["round"]][asked["run"]]))
        except Exception as error:
            # the parent ends this process: an engine that failed is in no known state
            traceback.print_exc()
            say({"error": reason(error)})
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
