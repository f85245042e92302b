"""The search over the static choices of the kernels, in a process that may crash."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.device_run import START_LIMIT_S, Answering
from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench.cases import as_request
from benchmarks.kernel_bench.tuning import CASES, DRY_CASES, alike, best_of

BATCH = 8  # choices that are compiled at the same time and timed in turns
BATCH_LIMIT_S = 90
ONE_LIMIT_S = 30
GRACE_S = 15  # of a batch that was begun in time
FINALISTS = 6  # choices of a case that are timed in turns once more

Found = dict[str, Any]


def entries_of(
    worker: Answering, request: dict[str, Any], choices: list[dict[str, Any]], end: float
) -> list[Found]:
    """One entry a choice; when a batch fails as a whole, its choices are tried one by one.

    Nothing outlasts `end`, a time.monotonic(), by more than GRACE_S.
    """

    def limit(most: float) -> float:
        return min(most, max(0.0, end - time.monotonic()) + GRACE_S)

    try:
        return worker.call(request | {"choices": choices}, limit(BATCH_LIMIT_S))
    except WorkerError as error:
        failure = str(error)
        if len(choices) == 1:
            return [{"tuning": choices[0], "us": None, "reason": f"FAILED: {failure}"}]
    found: list[Found] = []
    for choice in choices:
        if time.monotonic() > end:
            found.append({"tuning": choice, "us": None, "reason": f"FAILED: {failure}"})
            continue
        try:
            found += worker.call(request | {"choices": [choice]}, limit(ONE_LIMIT_S))
        except WorkerError as error:
            found.append({"tuning": choice, "us": None, "reason": f"FAILED: {error}"})
    return found


def search_case(
    worker: Answering,
    request: dict[str, Any],
    choices: list[dict[str, Any]],
    deadline: float,
    end: float,
) -> list[Found]:
    """The entries of one case, fastest first; what was not reached is not among them.

    Begins no choice after `deadline`, the case's own; `end` is that of the whole search.
    """
    found: list[Found] = []
    for first in range(0, len(choices), BATCH):
        if time.monotonic() > deadline:
            break
        found += entries_of(worker, request, choices[first : first + BATCH], end)
    timed = sorted((e for e in found if e["us"] is not None), key=lambda e: e["us"])
    again = [entry["tuning"] for entry in timed[:FINALISTS]]
    if len(again) > 1:
        # batches ran at different times: the best of each meet in one
        final = {key(e): e for e in entries_of(worker, request, again, end) if e["us"] is not None}
        found = [final.get(key(entry), entry) for entry in found]
    return sorted(found, key=lambda e: (e["us"] is None, e["us"] or 0.0))


def key(entry: Found) -> str:
    """A choice as something that can be compared."""
    return json.dumps(entry["tuning"], sort_keys=True)


def search(
    worker: Answering,
    operations: list[str],
    options: dict[str, Any],
    *,
    deadline: float,
    progress: Callable[[Found], None],
) -> Found:
    """For each operation: the backend, every case's entries and the best choice over the cases.

    The time that is left is divided evenly among the cases that are left.
    """
    device = worker.call({"do": "device", **options}, START_LIMIT_S)
    options = options | {"ceilings": device["ceilings"]}
    found: Found = {"device": device, "operations": {}}
    cases = DRY_CASES if options["dry_run"] else CASES
    left = sum(len(cases[operation]) for operation in operations)
    for operation in operations:
        ask = {"do": "choices", "operation": operation, **options}
        offered = worker.call(ask, START_LIMIT_S)
        entry: Found = {"backend": offered["backend"], "cases": {}, "best": None}
        found["operations"][operation] = entry
        for case in cases[operation]:
            now = time.monotonic()
            until = now + (deadline - now) / left
            left -= 1
            if offered["choices"]:
                request = {"do": "tune", "case": as_request(case), **options}
                groups = alike(offered["backend"], case, offered["choices"])
                first = [group[0] for group in groups]
                results = search_case(worker, request, first, until, deadline)
                same = {key({"tuning": group[0]}): group for group in groups}
                entry["cases"][case.label] = [
                    result | {"tuning": choice}
                    for result in results
                    for choice in same[key(result)]
                ]
                entry["best"] = best_of(entry["cases"])
                seconds = time.monotonic() - now
                print(f"{operation} {case.label}: {seconds:.0f} s", file=sys.stderr, flush=True)
            progress(found)
    return found
