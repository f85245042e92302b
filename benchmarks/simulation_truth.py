#!/usr/bin/env python3
"""The simulator against a live server on this machine's CPU.

    python -m benchmarks.simulation_truth --output truth.json

A server of a model with random weights records its load. The model has 41 million parameters, so
that steps take longer than HTTP does. Each round sends the workloads that are compared, and before
each of them a part of one of two mixed ones, of which alone the steps calibrate the simulator: what
slows the machine for a while slows both. One of the two has long prompts in bursts, so that steps
of many rows and keys are seen, the other short ones, for few. Throughput and medians are to be
within 15 % of the median of the live runs, p99 within their range or 25 %. Exit status 1 says that
one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.model_shapes import write_config
from checkpoints import bundled_model_path
from jaxserve.bench import serve, serve_options
from jaxserve.bench.measure import describe, environment
from jaxserve.bench.percentiles import percentile
from jaxserve.config.engine_config import EngineConfig
from jaxserve.observability.load_trace import (
    LoadTrace,
    TracedRequest,
    read_trace,
    write_requests,
)
from jaxserve.processes.network import get_open_port
from jaxserve.simulation.calibration import Fitted
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.setting import Setting, find_model, settle
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.workload import Workload

SEEDS = 25  # of deviations of the simulated steps, whose medians are compared
LAYERS = 6  # the engine has one core of two
SLOTS, BUDGET, PAGES, CONTEXT = 16, 256, 2049, 2048
MIXED, WARM = "mixed", "warm-up"
PARTS = 3  # a part of a mixed workload has so many times fewer requests than what it precedes
CALIBRATING = (
    Workload(request_rate=2.0, burstiness=0.2, input_len=220, output_len=28, range_ratio=0.95),
    Workload(request_rate=3.5, burstiness=0.6, input_len=90, output_len=40, range_ratio=0.9),
)
SHORT = {"input_len": 48, "output_len": 32, "range_ratio": 0.5}
# rates at which the simulator's own figures move least with the time of its steps: at one long
# prompt a second, steps that are 4 % longer make the median wait 83 % longer
WORKLOADS = {
    "steady": Workload(request_rate=2.4, burstiness=4.0, seed=2, **SHORT),
    "bursty": Workload(request_rate=3.0, burstiness=0.25, seed=3, **SHORT),
    "long prompts": Workload(
        request_rate=0.4, input_len=500, output_len=24, range_ratio=0.4, seed=4
    ),
    "shared prefixes": Workload(request_rate=4.0, prefix_len=256, num_prefixes=4, seed=5, **SHORT),
    "priorities": Workload(request_rate=4.0, burstiness=0.25, num_priorities=3, seed=6, **SHORT),
}
METRICS = {  # name -> whether it is a p99
    "requests/s": False,
    "output tok/s": False,
    "ttft p50, ms": False,
    "tpot p50, ms": False,
    "queue p50, ms": False,
    "ttft p99, ms": True,
    "tpot p99, ms": True,
    "queue p99, ms": True,
}
MEDIAN_SHARE, TAIL_SHARE = 0.15, 0.25
LEAST_MS = 1.0  # two times that differ by less are the same to a clock that others disturb


class Sent(NamedTuple):
    """One load test: what its client saw."""

    workload: str
    count: int  # of its requests
    figures: dict[str, float]
    ttfts: list[float]  # seconds to the first tokens


class Run(NamedTuple):
    """A test with its place in the recording."""

    workload: str
    begin: float  # by the clock of the trace
    end: float
    figures: dict[str, float]
    edges: list[float]  # seconds that the client has the first token of each behind the server


def random_model(folder: Path) -> str:
    """A folder with a config.json alone; the vocabulary is the bundled model's."""
    config = json.loads((bundled_model_path() / "config.json").read_text())
    return str(
        write_config(
            "llama-125m", folder, vocab_size=config["vocab_size"], num_hidden_layers=LAYERS
        )
    )


def flags(policy: str) -> dict[str, Any]:
    """The settings of server and simulator."""
    return {
        "load_format": "dummy",
        "tokenizer": str(bundled_model_path()),
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": BUDGET,
        "num_pages": PAGES,
        "max_model_len": CONTEXT,
        "scheduling_policy": policy,
        "compile_ahead": 1000,
    }


@contextmanager
def server(model: str, trace: Path) -> Iterator[str]:
    """A server that records its load; its address.

    Its engine has all cores but one, on which the server and its clients run: neither is simulated.
    """
    port = get_open_port()
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("one core: the engine needs another one than its clients")
    words = [sys.executable, "-m", "server", model, "--port", str(port)]
    for name, value in flags("priority").items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--no-compile-in-background", "--record-trace", str(trace)]
    words += ["--uvicorn-log-level", "warning"]
    os.sched_setaffinity(0, others)  # which the server's engine has from it
    process = subprocess.Popen(words, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            time.sleep(0.2)
        for pid in (process.pid, os.getpid()):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {first})
        yield url
    finally:
        os.sched_setaffinity(0, {first, *others})
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def send(url: str, file: Path, count: int, seed: int) -> serve.LoadTest:
    """One load test with the requests of a file."""
    parser = argparse.ArgumentParser()
    serve_options.add_options(parser)
    words = ["--base-url", url, "--dataset-name", "trace", "--dataset-path", str(file)]
    words += ["--num-prompts", str(count), "--seed", str(seed), "--ignore-eos"]
    words += ["--temperature", "0", "--disable-tqdm", "--ready-check-timeout-sec", "600"]
    test = asyncio.run(serve.measure(parser.parse_args(words)))
    failed = [one.error for one in test.times if one.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return test


def client_figures(test: serve.LoadTest) -> dict[str, float]:
    """What the client saw, by METRICS, the queue left out."""
    times = test.times
    span = max(t.chunks[-1] for t in times) - min(t.sent for t in times)
    ttft = [1e3 * t.ttft for t in times]
    tpot = [1e3 * t.tpot for t in times if t.tpot is not None]
    return {
        "requests/s": len(times) / span,
        "output tok/s": sum(t.output_tokens for t in times) / span,
        "ttft p50, ms": percentile(ttft, 50),
        "ttft p99, ms": percentile(ttft, 99),
        "tpot p50, ms": percentile(tpot, 50),
        "tpot p99, ms": percentile(tpot, 99),
    }


def live_runs(url: str, folder: Path, options: argparse.Namespace) -> list[Sent]:
    """The load tests of all rounds, in their order."""
    found: list[Sent] = []

    def run(name: str, workload: Workload, count: int) -> None:
        file = folder / f"{len(found)}.jsonl"
        write_requests(file, requests_of(workload, count))
        test = send(url, file, count, len(found))
        figures = client_figures(test)
        print(f"{name}: {_line(figures)}", file=sys.stderr, flush=True)
        found.append(Sent(name, count, figures, [t.ttft for t in test.times]))
        time.sleep(1)

    run(WARM, CALIBRATING[0], 20)
    mixed = itertools.cycle(CALIBRATING)  # an odd number of workloads: each is before each of them
    for _ in range(options.rounds):
        for name, workload in WORKLOADS.items():
            part = replace(next(mixed), seed=len(found))
            run(MIXED, part, -(-options.num_prompts // PARTS))
            run(name, workload, options.num_prompts)
    return found


def requests_of(workload: Workload, count: int) -> list[TracedRequest]:
    """The requests of a workload."""
    return [*replace(workload, num_prompts=count).requests()]


def as_runs(trace: LoadTrace, tests: list[Sent]) -> list[Run]:
    """The load tests with what the server recorded of them, which follow one another."""
    runs, first = [], 0
    for name, count, figures, ttfts in tests:
        requests = trace.requests[first : first + count]
        first += count
        queue = [1e3 * one.queue for one in requests if one.queue is not None]
        figures = figures | {
            "queue p50, ms": percentile(queue, 50),
            "queue p99, ms": percentile(queue, 99),
        }
        last = max(one.arrival + (one.last or 0.0) for one in requests)
        edges = [there - (one.ttft or 0.0) for there, one in zip(ttfts, requests)]
        runs.append(Run(name, requests[0].arrival, last, figures, edges))
    return runs


def simulated(
    setting: Setting,
    trace: LoadTrace,
    workload: Workload,
    count: int,
    edge: float,
    seed: int,
) -> dict[str, float]:
    """The same requests on the simulated clock, by METRICS; `edge`: seconds that HTTP takes."""
    simulation = Simulation(setting, Fitted(setting, trace, seed))
    served = simulation.run(requests_of(workload, count))
    ms = {name: 1e3 * values for name, values in served.samples().items()}
    ttft = [value + 1e3 * edge for value in ms["ttft"]]
    duration = served.duration + edge
    return {
        "requests/s": count / duration,
        "output tok/s": sum(served.output_tokens) / duration,
        "ttft p50, ms": percentile(ttft, 50),
        "ttft p99, ms": percentile(ttft, 99),
        "tpot p50, ms": percentile(ms["tpot"], 50),
        "tpot p99, ms": percentile(ms["tpot"], 99),
        "queue p50, ms": percentile(ms["queue"], 50),
        "queue p99, ms": percentile(ms["queue"], 99),
    }


def calibrating(trace: LoadTrace, runs: list[Run], path: Path) -> LoadTrace:
    """The part of the trace in which the mixed workloads ran."""
    spans = [(one.begin, one.end) for one in runs if one.workload == MIXED]

    def is_within(moment: float) -> bool:
        return any(begin <= moment <= end for begin, end in spans)

    return LoadTrace(
        path,
        trace.about,
        [one for one in trace.requests if is_within(one.arrival)],
        [one for one in trace.steps if is_within(one.begin)],
    )


def judged(name: str, value: float, live: list[float]) -> tuple[float, bool]:
    """The deviation from the median of the live runs, and whether it is allowed."""
    middle = statistics.median(live)
    share = value / middle - 1 if middle else 0.0
    allowed = TAIL_SHARE if METRICS[name] else MEDIAN_SHARE
    is_near = abs(share) <= allowed or (name.endswith("ms") and abs(value - middle) <= LEAST_MS)
    in_range = METRICS[name] and min(live) <= value <= max(live)
    return share, is_near or in_range


def compare(runs: list[Run], found: dict[str, dict[str, float]]) -> tuple[list[str], int]:
    """A Markdown table a workload, and how many figures are too far off."""
    lines: list[str] = []
    wrong = 0
    for workload, figures in found.items():
        lines += [f"\n## {workload}\n", "| | live, median | least | largest | simulated | off | |"]
        lines.append("|---|---:|---:|---:|---:|---:|---|")
        for name in METRICS:
            live = [run.figures[name] for run in runs if run.workload == workload]
            share, good = judged(name, figures[name], live)
            wrong += not good
            cells = [statistics.median(live), min(live), max(live), figures[name]]
            shown = " | ".join(f"{cell:.3g}" for cell in cells)
            lines.append(f"| {name} | {shown} | {share:+.0%} | {'' if good else 'too far'} |")
    return lines, wrong


def main(arguments: list[str] | None = None) -> int:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="live runs of each workload")
    parser.add_argument("--num-prompts", type=int, default=100, help="requests of a run")
    parser.add_argument("--output", type=Path, help="JSON of all figures")
    parser.add_argument("--keep", type=Path, help="folder for what was recorded")
    parser.add_argument("--recorded", type=Path, help="such a folder: nothing is run again")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = options.recorded or options.keep or Path(name)
        file, live = folder / "recorded.jsonl", folder / "live.json"
        model = random_model(folder / "model")
        if options.recorded is None:
            folder.mkdir(parents=True, exist_ok=True)
            load, facts = os.getloadavg(), environment()
            with server(model, file) as url:
                tests = live_runs(url, folder, options)
            live.write_text(json.dumps({"environment": facts, "load": load, "tests": tests}))
        try:
            known = json.loads(live.read_text())
            load, facts = known["load"], known["environment"]
            tests = [Sent(*one) for one in known["tests"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--recorded {folder}: want what --keep of this version wrote: {error!r}")
        trace = read_trace(file)
        asked = EngineConfig(model=model, **flags("priority"))
        setting = settle(asked, find_model(asked)[0], DEVICES["cpu"])
    runs = as_runs(trace, tests)
    part = calibrating(trace, runs, file)
    # the median: a token without whole text is told with the next one, which costs HTTP nothing
    edge = statistics.median(one for run in runs if run.workload == MIXED for one in run.edges)
    found: dict[str, dict[str, float]] = {}
    for workload, made in WORKLOADS.items():
        seeds = [
            simulated(setting, part, made, options.num_prompts, edge, seed) for seed in range(SEEDS)
        ]
        found[workload] = {n: statistics.median(one[n] for one in seeds) for n in METRICS}
    lines, wrong = compare(runs, found)
    print(f"{describe(facts)}; load of the machine before: {load[0]:.1f}, {load[1]:.1f}")
    steps = len(part.steps)
    print(f"calibrated by {steps} steps of the {MIXED} workloads; HTTP {1e3 * edge:.1f} ms")
    print("\n".join(lines))
    print(f"\n{wrong} of {len(found) * len(METRICS)} figures are too far off")
    if options.output is not None:
        seen = [run._asdict() for run in runs]
        written = {"environment": facts, "load": load, "live": seen, "simulated": found}
        options.output.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if wrong else 0


def _line(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
