"""Steps, requests and pages as a file for https://ui.perfetto.dev (Chrome's trace format)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.boundary.step_history import StepRecord
from jaxserve.observability.request_lives import RequestLife

ENGINE, REQUESTS = 1, 2  # processes, as Perfetto calls groups of tracks
HOST, DEVICE = 1, 2  # tracks of the engine
Event = dict[str, Any]


def write_trace(path: Path, steps: Sequence[StepRecord], lives: Sequence[RequestLife]) -> None:
    """Write steps (host phases and device), counters, and a track a request.

    Args:
        path: the file, which is replaced.
        steps: in their order.
        lives: requests; those without a first step have waited only.
    """
    events = [*_names(lives), *_steps(steps), *_requests(lives)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(lives: Sequence[RequestLife]) -> Iterator[Event]:
    yield _meta("process_name", "engine", ENGINE)
    yield _meta("thread_name", "host", ENGINE, HOST)
    yield _meta("thread_name", "device", ENGINE, DEVICE)
    yield _meta("process_name", "requests", REQUESTS)
    for track, life in enumerate(lives, start=1):
        yield _meta("thread_name", f"request {life.request_id}", REQUESTS, track)


def _steps(steps: Sequence[StepRecord]) -> Iterator[Event]:
    for step in steps:
        facts = {name: value for name, value in step._asdict().items() if name.startswith("num")}
        begin = step.begin
        for phase in ("plan", "pack", "dispatch", "wait", "commit"):
            seconds = getattr(step, phase)
            if phase == "wait":
                begin = step.fetched - seconds  # behind the steps between; `commit` follows it
            yield _slice(phase, begin, seconds, ENGINE, HOST, {"step": step.number})
            begin += seconds
        busy = max(0.0, step.device_busy)
        yield _slice(f"step {step.number}", step.fetched - busy, busy, ENGINE, DEVICE, facts)
        yield _counter("pages in use", step.dispatched, {"pages": step.num_pages})
        tokens = {"decode": step.num_decode_tokens, "prefill": step.num_prefill_tokens}
        yield _counter("tokens", step.dispatched, tokens)
        yield _counter(
            "sequences", step.dispatched, {"running": step.num_running, "waiting": step.num_waiting}
        )


def _requests(lives: Sequence[RequestLife]) -> Iterator[Event]:
    for track, life in enumerate(lives, start=1):
        facts = {"prompt tokens": life.num_prompt, "cached": life.num_cached}
        moments = (life.arrival, life.first_step, life.first_token, life.last_token)
        for name, begin, end in zip(("queue", "prefill", "decode"), moments, moments[1:]):
            if begin is not None and end is not None:
                yield _slice(name, begin, end - begin, REQUESTS, track, facts)
        for one in life.sequences.values():
            for preemption in one.preemptions:
                yield {
                    "name": "preempted",
                    "ph": "i",
                    "s": "t",
                    "ts": 1e6 * preemption.time,
                    "pid": REQUESTS,
                    "tid": track,
                }


def _slice(
    name: str, begin: float, seconds: float, process: int, track: int, facts: dict[str, Any]
) -> Event:
    return {
        "name": name,
        "ph": "X",
        "ts": 1e6 * begin,
        "dur": 1e6 * seconds,
        "pid": process,
        "tid": track,
        "args": facts,
    }


def _counter(name: str, time: float, values: Mapping[str, float]) -> Event:
    return {"name": name, "ph": "C", "ts": 1e6 * time, "pid": ENGINE, "args": values}


def _meta(kind: str, name: str, process: int, track: int = 0) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
