#!/usr/bin/env python3
"""In how much of the time the device executes a step while requests are waiting.

More requests than slots, prompts and outputs of mixed lengths, for some seconds as they are served
and for as many under JAX's profiler. On a CPU busy is the union of the intervals in which the
device runs in the trace, over the time from the first to the last of them. A GPU is not in its
serving mode while it is traced: XLA then launches kernel by kernel, where it serves with CUDA
graphs. There busy is what the host's clock says at least while nothing is traced, and the trace
gives shares only.
Prints a line for each number of slots, with overlap and without.

    python benchmarks/device_busy.py --rows 16 64
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device_trace import serves_traced, traced
from checkpoints import bundled_model_path
from jaxserve import LLM
from jaxserve.bench.measure import write_report
from jaxserve.bench.percentiles import percentile
from jaxserve.bench.workloads import WorkItem, uniform

BUSY_TARGET = 0.95
LEAST_STEPS = 3  # of a measurement: two pauses
FILLED_STEPS = 20  # before anything is measured: the slots fill, the first prompts are behind
COLUMNS = (
    "rows", "overlap", "step, ms", "step traced, ms", "device busy, %", "pause, us (median)",
    "pause, us (p99)", "busy, % (host's bound)", "busy, % (traced)",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Busy:
    """The device under a backlog.

    Attributes:
        traced: share of the traced time in which the device ran, 0 to 1.
        bound: what the host's own clock says of it at least, while nothing is traced.
        serves_traced: whether the device works under the profiler as it does without.
        step_ms: of a step that is not traced; traced_ms: of one that is.
        pauses_us: of the device in the trace, between two runs; a step of one executable has one at
            most where it serves traced.
    """

    traced: float
    bound: float
    serves_traced: bool
    step_ms: float
    traced_ms: float
    pauses_us: list[float]

    @property
    def busy(self) -> float:
        """Share of the time in which the device runs, in the mode that serves."""
        return self.traced if self.serves_traced else self.bound


class Backlog:
    """Keeps twice as many requests in the engine as it has slots.

    Args:
        llm: the engine, idle.
        items: requests, repeated for ever.
        slots: number of the engine's slots.
    """

    def __init__(self, llm: LLM, items: list[WorkItem], slots: int):
        self._client = llm.client
        self._items: Iterator[tuple[int, WorkItem]] = enumerate(itertools.cycle(items))
        self._most = 2 * slots
        self._live: set[str] = set()
        for _ in range(FILLED_STEPS):
            self._step()

    def run(self, seconds: float) -> tuple[float, float]:
        """Steps for so long; milliseconds of a step, and least share of it that was busy."""
        before = self._client.stats()
        begin = time.perf_counter()
        done = 0
        while done < LEAST_STEPS or time.perf_counter() < begin + seconds:
            self._step()
            done += 1
        elapsed = time.perf_counter() - begin
        after = self._client.stats()
        idle = after.times.device_idle - before.times.device_idle
        return 1e3 * elapsed / (after.num_steps - before.num_steps), 1.0 - idle / elapsed

    def drop(self) -> None:
        """Ends what is left."""
        for request_id in self._live:
            self._client.abort(request_id)
        while self._client.has_work:
            self._client.outputs()

    def _step(self) -> None:
        while len(self._live) < self._most:
            number, item = next(self._items)
            name = f"b{number}"
            self._client.add(self._client.prepare(item.prompt_token_ids, item.params(), name))
            self._live.add(name)
        self._live.difference_update(output.request_id for output in self._client.outputs())


def measure_busy(llm: LLM, items: list[WorkItem], slots: int, seconds: float) -> Busy:
    """The device under a backlog: some seconds as they are, then as many under the profiler.

    Raises:
        NoTraceError: the profiler saw nothing on the device.
    """
    backlog = Backlog(llm, items, slots)
    samples: list[tuple[float, float]] = []
    try:
        step_ms, bound = backlog.run(seconds)
        found = traced(lambda: samples.append(backlog.run(seconds)))
    finally:
        backlog.drop()
    pauses = [1e6 * pause for pause in found.pauses]
    return Busy(
        traced=found.busy / found.span,
        bound=bound,
        serves_traced=serves_traced(),
        step_ms=step_ms,
        traced_ms=samples[0][0],
        pauses_us=pauses,
    )


def row_of(slots: int, overlap: bool, busy: Busy) -> dict[str, Any]:
    """The line of a table."""
    pauses = busy.pauses_us
    values = (
        slots,
        "on" if overlap else "off",
        round(busy.step_ms, 3),
        round(busy.traced_ms, 3),
        round(100 * busy.busy, 2),
        round(percentile(pauses, 50), 1),
        round(percentile(pauses, 99), 1),
        round(100 * busy.bound, 2),
        round(100 * busy.traced, 2),
    )
    return dict(zip(COLUMNS, values, strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model folder; the bundled model when left out")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64], help="slots")
    parser.add_argument("--overlap", choices=("on", "off"), nargs="+", default=["on", "off"])
    parser.add_argument("--seconds", type=float, default=3.0, help="traced, and as many untraced")
    parser.add_argument("--shortest", type=int, default=8, help="tokens of a prompt or output")
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--compile-ahead", type=int, default=1000)
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for slots, overlap in itertools.product(options.rows, options.overlap):
        llm = LLM(
            options.model or str(bundled_model_path()),
            skip_tokenizer_init=True,
            dtype=options.dtype,
            load_format=options.load_format,
            max_num_seqs=slots,
            max_model_len=2 * options.longest,
            overlap=overlap == "on",
            compile_in_background=False,
            compile_ahead=options.compile_ahead,
            enable_prefix_caching=False,  # the backlog begins again with the same prompts
        )
        vocab = llm.model_config.vocab_size
        items = uniform(8 * slots, options.shortest, options.longest, vocab, seed=1234)
        busy = measure_busy(llm, items, slots, options.seconds)
        llm.close()
        rows.append(row_of(slots, overlap == "on", busy) | {"pauses_us": busy.pauses_us})
        print(f"| {' | '.join(str(rows[-1][column]) for column in COLUMNS)} |", flush=True)
    write_report(options.output_json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
