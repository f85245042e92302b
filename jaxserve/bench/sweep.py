"""`jaxserve bench sweep`: a load test for each of several loads, and their frontier."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from jaxserve.bench import serve, serve_options
from jaxserve.bench.serve_options import parse_metrics, parse_percentiles
from jaxserve.bench.serving_report import details, parse_goodput, serving_report
from jaxserve.errors import ValidationError

SHOWN = ("request_throughput", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")


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
    runs = [copy(options) for _ in options.request_rates or options.concurrencies]
    for number, load in enumerate(options.request_rates or options.concurrencies):
        run = runs[number]
        setattr(run, name, load)
        run.seed = options.seed + number  # the server may still hold the prompts of the load before
        serve_options.check(run)
    # the frontier shows the 99th of all metrics
    percentiles = sorted({99.0, *parse_percentiles(options.metric_percentiles)})
    metrics = parse_metrics(options.percentile_metrics)
    goodput = parse_goodput(options.goodput)
    shown = [*SHOWN, *(f"p{p:g}_{metric}_ms" for metric in metrics for p in percentiles)]
    shown += ["request_goodput"] if goodput else []
    shown = list(dict.fromkeys([*shown, "failed"]))
    rows: list[dict[str, Any]] = []
    lines = [f"| {name} | {' | '.join(shown)} |", f"|{'---|' * (len(shown) + 1)}"]
    print("\n".join(lines))
    for run in runs:
        test = asyncio.run(serve.measure(run))
        report = serving_report(test.times, test.duration, percentiles=percentiles, goodput=goodput)
        row = serve.head(run, test) | report
        if options.save_detailed:
            row |= details(test.times)
        rows.append(row)
        cells = [f"{report[key]:g}" if key == "failed" else f"{report[key]:.2f}" for key in shown]
        lines.append(f"| {getattr(run, name):g} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        serve.show_errors(test.times)
    if options.save_result or options.save_detailed:
        heading = f"# {rows[0]['model_id']}: {name} against latency, {rows[0]['date']}\n\n"
        _save(options, name, rows, heading + "\n".join(lines))
    return 1 if any(row["failed"] for row in rows) else 0


def _save(
    options: argparse.Namespace, name: str, rows: Sequence[dict[str, Any]], text: str
) -> None:
    path = options.result_dir / (options.result_filename or "sweep.json")
    path.write_text(json.dumps(list(rows), indent=2) + "\n")
    path.with_suffix(".md").write_text(text + "\n")
    frontier(name, rows, path.with_suffix(".png"))
    print(f"\nwritten: {path}, {path.with_suffix('.md').name}, {path.with_suffix('.png').name}")


def frontier(name: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG: what each load gave in throughput and cost in latency."""
    from jaxserve.observability.figures import new_figure

    figure = new_figure(9, 3.6)
    throughput = [row["output_throughput"] for row in rows]
    for axis, metric in zip(figure.subplots(1, 2), ("ttft", "itl")):
        for head in ("median", "p99"):
            axis.plot(throughput, [row[f"{head}_{metric}_ms"] for row in rows], "o-", label=head)
        for row, x in zip(rows, throughput):
            axis.annotate(str(row[name]), (x, row[f"p99_{metric}_ms"]))
        axis.set(xlabel="output tok/s", ylabel=f"{metric}, ms", ylim=(0, None))
        axis.set_title(f"{metric} against throughput, by {name}")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
