"""The command; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.quantization.schemes import (
    UNCALIBRATED,
    calibration_text,
    policies,
    write_random,
)
from benchmarks.quantization.worker import BATCHES, Job, Measured
from checkpoints import bundled_model_path
from jaxserve.bench.measure import describe
from jaxserve.jobs.quantize import Calibration, quantize
from jaxserve.models.known_shapes import SHAPES

BUNDLED = "bundled"
GROUPS = {BUNDLED: 32}  # inputs that share a 4-bit scale, as a small model needs it
GROUP = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint: of which model, by which scheme ("none": the model itself), what it is."""

    model: str
    scheme: str
    measured: Measured


def rows_of(model: str, schemes: list[str] | None, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one model, its own first."""
    known = policies()
    usable = list(known) if model == BUNDLED else list(UNCALIBRATED)
    wanted = [name for name in schemes or usable if name in usable]
    quick, is_bundled = options.quick, model == BUNDLED
    calibration = Calibration(calibration_text(200), 32 if quick else 128, 256)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        source = bundled_model_path() if is_bundled else write_random(model, scratch)
        for scheme in ("none", *wanted):
            with tempfile.TemporaryDirectory() as folder:
                made = source
                if scheme != "none":
                    made = Path(folder) / "out"
                    group = GROUPS.get(model, GROUP)
                    quantize(str(source), made, known[scheme], calibration=calibration, group=group)
                job = Job(
                    folder=str(made),
                    tasks=(8 if quick else 100) if is_bundled else 0,
                    characters=6000 if quick else None,
                    input_len=32,
                    output_len=33 if is_bundled else 17,
                    repeats=3 if options.speed else 0,
                )
                yield Row(model, scheme, in_process(job))


def in_process(job: Job) -> Measured:
    """Measure in a new process."""
    command = [sys.executable, "-m", "benchmarks.quantization.worker", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def bytes_table(rows: list[Row]) -> str:
    """Bytes and quality as Markdown."""
    own = {row.model: row.measured for row in rows if row.scheme == "none"}
    lines = [
        "| model | scheme | layers, MB | of its own | file, MB | weights loaded, MB "
        "| process, MB | perplexity | ratio | tasks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, base = row.measured, own[row.model]
        share = found.stored_layer_bytes / base.stored_layer_bytes
        quality = "– | – | –"
        if found.perplexity is not None and base.perplexity is not None:
            ratio = found.perplexity / base.perplexity
            quality = f"{found.perplexity:.3f} | {ratio:.4f} | {found.exact_match:.1%}"
        lines.append(
            f"| {row.model} | {row.scheme} | {found.stored_layer_bytes / 1e6:.2f} | {share:.1%} "
            f"| {found.stored_bytes / 1e6:.2f} | {found.weight_bytes / 1e6:.2f} "
            f"| {found.process_bytes / 1e6:.0f} | {quality} |"
        )
    return "\n".join(lines)


def speed_table(rows: list[Row]) -> str:
    """Times as Markdown."""
    heads = " | ".join(f"TTFT at batch {batch}, ms | tok/s" for batch in BATCHES)
    lines = [f"| model | scheme | {heads} |", "|---|---|" + "---|---|" * len(BATCHES)]
    for row in rows:
        found = row.measured
        figures = " | ".join(
            f"{1e3 * found.first_token_s[str(batch)]:.1f} | {found.tokens_per_s[str(batch)]:.1f}"
            for batch in BATCHES
        )
        lines.append(f"| {row.model} | {row.scheme} | {figures} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Make the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="short texts and few questions")
    add("--output", type=Path, metavar="FILE", help="JSON beside the tables")
    add("--no-speed", dest="speed", action="store_false", help="bytes and quality alone")
    add(
        "--models",
        nargs="+",
        choices=[BUNDLED, *SHAPES],
        default=[BUNDLED, "llama-1b"],
        help="the bundled one, or a shape with random weights (default: bundled llama-1b)",
    )
    add("--schemes", nargs="+", choices=list(policies()), metavar="NAME", help="(default: all)")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for model in options.models:
        for row in rows_of(model, options.schemes, options):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    print(f"{describe(rows[0].measured.environment)}\n")
    print(bytes_table(rows))
    if options.speed:
        print(f"\n{speed_table(rows)}")
    if options.output is not None:
        values = {"quick": options.quick, "rows": [asdict(row) for row in rows]}
        options.output.write_text(json.dumps(values, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
