#!/usr/bin/env python3
"""Tokens a second and memory by batch size, beside transformers' `generate`: random weights.

Each batch size is a comparison of `benchmarks.peers` of its own, under its rules, with engines
made for that batch alone: the most that a process holds is then the memory of that batch. jaxserve
gets as many KV pages as the batch can fill, so that it reserves no more than it was asked for.

    python -m benchmarks.batch_sizes --output-json batch-sizes.json
    python -m benchmarks.batch_sizes --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.extras import require
from benchmarks.model_shapes import write_config
from benchmarks.peers import __main__ as peers
from checkpoints import bundled_model_path
from jaxserve.models.known_shapes import SHAPES

PAGE_SIZE = 16
DUMMY = {"load_format": "dummy"}
COLUMNS = ("shape", "batch", "engine", "output tok/s", "times batch 16", "memory, MiB", "ratio")
QUICK = {"batch_sizes": [2], "input_len": 4, "output_len": 3, "repeats": 1}


def comparison(
    model: Path, batch: int, options: argparse.Namespace, settings: dict[str, Any]
) -> dict[str, Any]:
    """The report of one batch size.

    Args:
        model: folder with a config.json, and with weights unless `settings` say otherwise.
        batch: requests at once.
        options: parsed options of the command.
        settings: extra settings of both engines.
    """
    pages = batch * -(
        -max(peers.SHORTEST_CONTEXT, options.input_len + options.output_len) // PAGE_SIZE
    )
    own = settings | {"block_size": PAGE_SIZE, "num_pages": pages + 1}
    own |= {"compile_ahead": 2} if options.quick else {}
    words = ["--model", str(model), "--peers", "transformers", "--batch-sizes", str(batch)]
    words += ["--mixed", "0", "--prefill", "0", "--long", "0", "--one-at-a-time"]
    for name in (
        "input_len",
        "output_len",
        "repeats",
        "dtype",
        "threads",
        "step_tokens",
        "timeout",
    ):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    words += ["--settings", f"jaxserve={json.dumps(own)}"]
    words += ["--settings", f"transformers={json.dumps(settings)}"]
    with tempfile.TemporaryDirectory() as scratch:
        return peers.run(peers.build_parser().parse_args(words), Path(scratch))


def rows_of(shape: str, reports: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a batch size and engine.

    Args:
        shape: name of the model's shape.
        reports: batch size -> report of `comparison`.
    """
    rows = []
    for batch, report in reports.items():
        for name, engine in report["engines"].items():
            result = report["cells"][0]["engines"][name]
            base = reports.get(16, {"cells": [{"engines": {}}]})["cells"][0]["engines"].get(
                name, {}
            )
            row: dict[str, Any] = dict.fromkeys(COLUMNS)
            row |= {"shape": shape, "batch": batch, "engine": name}
            if "failure" in result:
                row["output tok/s"] = f"failed: {result['failure']}"
            else:
                speed = result["output_tokens_per_second"]
                row |= {"output tok/s": speed, "memory, MiB": memory_of(engine, result)}
                row["ratio"] = result.get("ratio")
                if "output_tokens_per_second" in base:
                    row["times batch 16"] = speed / base["output_tokens_per_second"]
            rows.append(row)
    return rows


def memory_of(engine: dict[str, Any], result: dict[str, Any]) -> float:
    """MiB at most: of the device where it has memory of its own, else of the processes."""
    return float(result.get("device_peak_mib") or engine["peak_rss_mib"])


def markdown(row: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [
        f"{v:.4g}" if isinstance(v, float) else "-" if v is None else str(v) for v in row.values()
    ]
    return f"| {' | '.join(cells)} |"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_sizes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plain = peers.build_parser().parse_args(["--model", "."])
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["llama-125m", "llama-1b"])
    add("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    add("--input-len", type=int, default=plain.input_len)
    add("--output-len", type=int, default=plain.output_len)
    add("--dtype", default=plain.dtype, choices=["bfloat16", "float32"])
    add("--repeats", type=int, default=plain.repeats, help="counted rounds; one more comes first")
    add("--threads", type=int, default=plain.threads)
    add("--step-tokens", type=int, default=plain.step_tokens)
    add("--timeout", type=float, default=plain.timeout)
    add("--quick", action="store_true", help="the bundled model and a tiny batch")
    add("--output-json", type=Path, help="also writes the Markdown beside it")
    return parser


def main(words: list[str] | None = None) -> int:
    """1 where an engine failed or a figure is beyond the machine."""
    parser = build_parser()
    options = parser.parse_args(words)
    require(parser, "test", "torch")
    if options.quick:
        vars(options).update(QUICK)
    if min(*options.batch_sizes, options.input_len, options.output_len, options.repeats) < 1:
        parser.error("--batch-sizes, --input-len, --output-len and --repeats are numbers above 0")
    if options.output_json:
        options.output_json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    impossible: list[str] = []
    rules: dict[str, str] = {}
    environment: dict[str, Any] = {}
    with peers.ended_by_signals(), tempfile.TemporaryDirectory() as name:
        for shape in ["bundled"] if options.quick else options.shapes:
            made = Path(name) / shape
            model = bundled_model_path() if options.quick else write_config(shape, made)
            settings: dict[str, Any] = {} if options.quick else DUMMY
            reports = {}
            for batch in options.batch_sizes:
                reports[batch] = report = comparison(model, batch, options, settings)
                impossible += [f"{shape}: {line}" for line in report["impossible"]]
                rules, environment = report["rules"], report["environment"]
            rows += rows_of(shape, reports)
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *map(markdown, rows)]
    lines += [
        "",
        "ratio: how many times as fast jaxserve is. Rules of both (the last batch's):",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in {**rules, **environment}.items()]
    text = "\n".join([*lines, *(f"- IMPOSSIBLE: {line}" for line in impossible)])
    print(text)
    if options.output_json:
        held = {"rows": rows, "rules": rules, "environment": environment, "impossible": impossible}
        options.output_json.write_text(json.dumps(held, indent=1) + "\n")
        options.output_json.with_suffix(".md").write_text(text + "\n")
    failed = any(isinstance(row["output tok/s"], str) for row in rows)
    return 1 if failed or impossible else 0


if __name__ == "__main__":
    sys.exit(main())
