"""Rows as JSON, as Markdown tables and as a summary of the targets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.device_run import write_files
from benchmarks.kernel_bench.rows import Row, count_verdicts

COLUMNS = ("case", "candidate", "us", "rate", "% of ceiling", "differs by", "targets", "remark")
TITLES = {"decode": "Decode attention", "prefill": "Prefill attention", "matmul": "Matrix products"}


def number(value: float | None, digits: int = 3) -> str:
    """So many significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:.0f}"


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    return (
        row.label,
        row.candidate,
        number(row.us, 4),
        f"{number(row.rate)} {row.unit}".strip(),
        number(row.percent),
        "" if row.difference is None else f"{row.difference:.1e}",
        "; ".join(row.verdicts),
        row.reason.replace("|", "/"),
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]


def markdown(rows: Sequence[Row], device: dict[str, Any], notes: Sequence[str]) -> str:
    """The report of a run, finished or not."""
    ceilings = device["ceilings"]
    met, total = count_verdicts(rows)
    lines = [
        f"# Kernels on {device['device_kind']}",
        "",
        f"jax {device['jax']}; {device['backends']}.",
        f"Measured here: copy {ceilings['copy_gb_s']:.0f} GB/s (bytes read and written), "
        f"dense bf16 matrix product {ceilings['matmul_tflop_s']:.4g} TFLOP/s.",
        f"Targets met: {met} of {total}.",
        *notes,
    ]
    by_operation = itertools.groupby(
        sorted(rows, key=lambda row: list(TITLES).index(row.case["operation"])),
        key=lambda row: row.case["operation"],
    )
    for operation, group in by_operation:
        lines += ["", f"## {TITLES[operation]}", ""]
        lines += table(COLUMNS, [cells(row) for row in group])
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Row], device: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """The same for programs."""
    return {"device": device, "notes": list(notes), "rows": [asdict(row) for row in rows]}


def rows_from(results: dict[str, Any]) -> list[Row]:
    """The rows of a JSON report."""
    return [Row(**row | {"verdicts": tuple(row["verdicts"])}) for row in results["rows"]]


def write(
    folder: Path, name: str, rows: Sequence[Row], device: dict[str, Any], notes: Sequence[str]
) -> None:
    """NAME.json and NAME.md; a reader never sees half a file."""
    texts = {
        f"{name}.json": json.dumps(as_json(rows, device, notes), indent=1),
        f"{name}.md": markdown(rows, device, notes),
    }
    write_files(folder, texts)
