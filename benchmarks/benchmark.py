#!/usr/bin/env python3
"""Queries a second, P99 latency, peak memory and utilisation for several batch sizes.

    python benchmarks/benchmark.py --batch_size 16 32 64 128 --warmup 10 --iterations 50
    python benchmarks/benchmark.py --output_json benchmarks/results/batch-sizes-cpu.json

The second writes what a test reads: queries a second and memory must rise with the batch size.

A query is one request of a batch; a batch is queued at once and its latency ends with its last
token. The processor's utilisation is of all its cores; the GPU's is what nvidia-smi samples.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from checkpoints import bundled_model_path
from jaxserve import LLM
from jaxserve.bench.measure import describe, environment, run_workload, write_report
from jaxserve.bench.mistakes import in_a_line
from jaxserve.bench.percentiles import percentile
from jaxserve.bench.workloads import fixed
from jaxserve.config.engine_config import QUANTIZATIONS
from jaxserve.errors import ValidationError

LEAST = {"batch_size": 1, "warmup": 0, "iterations": 1, "input_len": 1, "output_len": 1}
COLUMNS = (
    "batch size",
    "QPS",
    "output tok/s",
    "P50 latency, ms",
    "P99 latency, ms",
    "peak memory, MiB",
    "peak device memory, MiB",
    "CPU, %",
    "GPU, %",
)


RISING = ("QPS", "peak memory, MiB")  # with the batch size


class GpuSampler:
    """Samples the first GPU's utilisation in a thread; no samples where there is no nvidia-smi."""

    def __init__(self, seconds: float = 0.2):
        self._seconds = seconds
        self._stop = threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> GpuSampler:
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self._samples) if self._samples else None

    def _run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._stop.wait(self._seconds):
            done = subprocess.run(query, capture_output=True, text=True, check=True)
            self._samples.append(float(done.stdout.splitlines()[0]))


def measure(llm: LLM, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: the figures of `options.iterations` batches."""
    vocab = llm.model_config.vocab_size
    sizes = batch, options.input_len, options.output_len, vocab
    # a batch has prompts of its own: what was served before may be cached
    batches = [
        fixed(*sizes, f"{options.seed} {number}")
        for number in range(options.warmup + options.iterations)
    ]
    for items in batches[: options.warmup]:
        run_workload(llm, items)
    with GpuSampler() as gpu:
        begin, processor = time.perf_counter(), time.process_time()
        counted = batches[options.warmup :]
        latencies = [run_workload(llm, items).elapsed_time for items in counted]
        wall, processor = time.perf_counter() - begin, time.process_time() - processor
    device = jax.devices()[0].memory_stats() or {}
    peak = device.get("peak_bytes_in_use")
    values = (
        batch,
        batch * options.iterations / wall,
        batch * options.output_len * options.iterations / wall,
        1e3 * percentile(latencies, 50),
        1e3 * percentile(latencies, 99),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        None if peak is None else peak / 2**20,
        100 * processor / wall / len(os.sched_getaffinity(0)),
        gpu.mean,
    )
    return dict(zip(COLUMNS, values))


def batch_size(text: str) -> int:
    """A size of the list; what looks like a list of another language is told how to be given."""
    try:
        return int(text)
    except ValueError:
        sizes = " ".join(re.findall(r"\d+", text)) or "16 32 64 128"
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number: sizes are given one after the other, without brackets "
            f"or commas: --batch_size {sizes}"
        ) from None


def falling(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each figure that is less in a larger batch: queries a second, and memory.

    Args:
        rows: as `measure` makes them, in any order.
    """
    ordered = sorted(rows, key=lambda row: row["batch size"])
    return [
        f"{name}: {after[name]:.4g} at {after['batch size']}, {before[name]:.4g} at "
        f"{before['batch size']}"
        for name in RISING
        for before, after in pairwise(ordered)
        if after[name] < before[name]
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="model folder; the bundled model when left out")
    parser.add_argument(
        "--batch_size",
        "--batch-size",
        type=batch_size,
        nargs="+",
        default=[16, 32, 64, 128],
        help="sizes, separated by spaces",
    )
    parser.add_argument("--warmup", type=int, default=10, help="batches not counted")
    parser.add_argument("--iterations", type=int, default=50, help="batches counted")
    parser.add_argument("--input_len", "--input-len", type=int, default=32)
    parser.add_argument("--output_len", "--output-len", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load_format", "--load-format", default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--compile_ahead", "--compile-ahead", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_json", "--output-json", type=Path)
    options = parser.parse_args(arguments)
    return in_a_line("benchmark.py", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measure and print the batch sizes.

    Raises:
        ValidationError: a number that is too small, or a model that cannot be served.
    """
    for name, least in LEAST.items():
        values = getattr(options, name)
        if any(value < least for value in (values if isinstance(values, list) else [values])):
            raise ValidationError(name, values, f"{least} or more")
    if options.output_json is not None:
        options.output_json.open("a").close()
    length = options.input_len + options.output_len
    rows = []
    print(f"{describe(environment())}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for batch in options.batch_size:
        llm = LLM(
            options.model or str(bundled_model_path()),
            skip_tokenizer_init=True,
            dtype=options.dtype,
            load_format=options.load_format,
            quantization=options.quantization,
            max_num_seqs=batch,
            max_model_len=length,
            compile_in_background=False,
            compile_ahead=options.compile_ahead,
            enable_prefix_caching=False,
        )
        rows.append(measure(llm, batch, options))
        llm.close()
        cells = ["-" if value is None else f"{value:.1f}" for value in rows[-1].values()]
        print(f"| {batch} | {' | '.join(cells[1:])} |", flush=True)
    for line in falling(rows):
        print(f"not rising with the batch size: {line}", file=sys.stderr)
    write_report(options.output_json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
