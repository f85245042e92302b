"""`jaxserve bench sweep`: a load test for each of several loads, and their frontier."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from jaxserve.bench import serve
from jaxserve.bench.serving_report import parse_goodput, serving_report
from jaxserve.errors import ValidationError

SHOWN = (
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_itl_ms",
    "failed",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench serve`, with lists for the loads."""
    serve.add_options(parser)
    parser.add_argument(
        "--request-rates", type=float, nargs="+", default=[], help="a run for each rate"
    )
    parser.add_argument(
        "--concurrencies", type=int, nargs="+", default=[], help="a run for each --max-concurrency"
    )


def run_sweep(options: argparse.Namespace) -> int:
    """Run the loads one after the other and print a line for each; 1 when a request failed.

    Raises:
        ValidationError: no load, or loads of both kinds.
    """
    if bool(options.request_rates) == bool(options.concurrencies):
        raise ValidationError(
            "request_rates", options.request_rates, "loads as --request-rates or --concurrencies"
        )
    name = "request_rate" if options.request_rates else "max_concurrency"
    goodput = parse_goodput(options.goodput)
    rows: list[dict[str, Any]] = []
    print(f"| {name} | {' | '.join(SHOWN)} |\n|{'---|' * (len(SHOWN) + 1)}")
    for load in options.request_rates or options.concurrencies:
        run = copy(options)
        setattr(run, name, load)
        test = asyncio.run(serve.measure(run))
        report = serving_report(test.times, test.duration, goodput=goodput)
        rows.append({name: load, **report})
        print(f"| {load} | {' | '.join(f'{report[key]:.2f}' for key in SHOWN)} |", flush=True)
    if options.save_result:
        _save(options, name, rows)
    return 1 if any(row["failed"] for row in rows) else 0


def _save(options: argparse.Namespace, name: str, rows: Sequence[dict[str, Any]]) -> None:
    options.result_dir.mkdir(parents=True, exist_ok=True)
    path = options.result_dir / (options.result_filename or "sweep.json")
    path.write_text(json.dumps(list(rows), indent=2) + "\n")
    frontier(name, rows, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png').name}")


def frontier(name: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG: what each load gave in throughput and cost in latency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    throughput = [row["output_throughput"] for row in rows]
    for axis, metric in zip(axes, ("ttft", "itl")):
        for head in ("median", "p99"):
            axis.plot(throughput, [row[f"{head}_{metric}_ms"] for row in rows], "o-", label=head)
        for row, x in zip(rows, throughput):
            axis.annotate(f"{row[name]:g}", (x, row[f"p99_{metric}_ms"]))
        axis.set(xlabel="output tok/s", ylabel=f"{metric}, ms", ylim=(0, None))
        axis.set_title(f"{metric} against throughput, by {name}")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
