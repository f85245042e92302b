"""The cases one after the other, the most telling first, until they or the time are over."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.device_run import ROOT, START_LIMIT_S, Answering, Turns, device_process
from benchmarks.isolated import WorkerError, importing_from
from benchmarks.kernel_bench.bench import JAX_ALONE, JAX_SHARE
from benchmarks.kernel_bench.cases import Case, MatmulCase, as_request
from benchmarks.kernel_bench.rows import OURS, Row, missing
from benchmarks.kernel_bench.worker import Answers

CASE_LIMIT_S = 90  # most take a few seconds; the first one also starts torch
GRACE_S = 10  # of a case that was begun in time
BUILD_LIMIT_S = 240


class Build:
    """FlashInfer's compiler at work in the background; it has no kernels before they are needed."""

    def __init__(self) -> None:
        """Starts it where FlashInfer is installed."""
        self._begin = time.monotonic()
        self._process = None
        if importlib.util.find_spec("flashinfer") is not None:
            command = [sys.executable, "-m", "benchmarks.kernel_bench.torch_peer", "--build"]
            self._process = subprocess.Popen(
                command, env=os.environ | importing_from(ROOT), stdout=sys.stderr
            )

    @property
    def running(self) -> bool:
        """True while it has neither ended nor run out of time, in which case it is ended."""
        if self._process is None or self._process.poll() is not None:
            return False
        if time.monotonic() - self._begin > BUILD_LIMIT_S:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def next_case(waiting: list[Case], build: Build | None) -> Case:
    """Takes the first case; while FlashInfer is being compiled, the first that can do without.

    Waits for the compiler when there is none.
    """
    while build is not None and build.running:
        for case in waiting:
            if isinstance(case, MatmulCase):
                waiting.remove(case)
                return case
        time.sleep(1)
    return waiting.pop(0)


def kernel_process(*, with_torch: bool, dry_run: bool = False) -> Answering:
    """The worker that owns the device for the kernel benchmark."""
    share = {"XLA_CLIENT_MEM_FRACTION": str(JAX_SHARE if with_torch else JAX_ALONE)}
    return device_process("benchmarks.kernel_bench.worker", Answers, dry_run, share)


def run_cases(
    worker: Answering,
    cases: Sequence[Case],
    options: dict[str, Any],
    *,
    deadline: float,
    progress: Callable[[list[Row], dict[str, Any], list[str]], None],
    build: Build | None = None,
    limit_s: float = CASE_LIMIT_S,
) -> tuple[list[Row], dict[str, Any], list[str]]:
    """Rows, the device, and notes about what is missing.

    Args:
        worker: answers `device` and `case`.
        cases: in the order in which they are run.
        options: of every request: dry_run, torch, rounds.
        deadline: time.monotonic() after which no case is begun.
        progress: called after every case with everything so far.
        build: FlashInfer's compiler, if it was started.
        limit_s: of a case, after which it is taken for hung.
    """
    device = worker.call({"do": "device", **options}, START_LIMIT_S)
    options = options | {"ceilings": device["ceilings"]}
    rows: list[Row] = []
    turns: Turns[Case] = Turns(
        cases,
        lambda: deadline - time.monotonic(),
        lambda case: case.operation,
        lambda waiting: next_case(waiting, build),
    )
    for case in turns:
        begin = time.monotonic()
        try:
            request = {"do": "case", "case": as_request(case), **options}
            left = max(0.0, deadline - begin)
            answer = worker.call(request, min(limit_s, left + GRACE_S))
            rows += [Row(**row | {"verdicts": tuple(row["verdicts"])}) for row in answer]
            turns.passed(case)
        except WorkerError as error:
            rows.append(missing(case, OURS, f"FAILED: {error}"))
            turns.failed(case, error.lost)
        seconds = time.monotonic() - begin
        print(f"{case.operation} {case.label}: {seconds:.1f} s", file=sys.stderr, flush=True)
        progress(rows, device, turns.notes)
    progress(rows, device, turns.notes)
    return rows, device, turns.notes


def failures_of(rows: Sequence[Row]) -> list[str]:
    """Cases in which our kernel did not run, or a comparison found another result."""
    return [
        f"{row.case['operation']} {row.label}: {row.candidate}: {row.reason}"
        for row in rows
        if row.reason.startswith(("FAILED", "ITS RESULT DIFFERS"))
    ]
