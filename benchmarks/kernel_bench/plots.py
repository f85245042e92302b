"""Bars of what was measured next to its ceiling, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernel_bench.report import TITLES
from benchmarks.kernel_bench.rows import Row

MOST_CASES = 24  # in one picture
INCHES_A_CASE = 0.45


def kernels(
    rows: Sequence[Row], device: dict[str, Any], folder: Path, name: str = "kernels"
) -> list[Path]:
    """NAME.png: the share of the ceiling of every candidate, one panel an operation."""
    operations = [
        operation
        for operation in TITLES
        if any(row.case["operation"] == operation and row.percent is not None for row in rows)
    ]
    if not operations:
        return []
    from matplotlib.figure import Figure  # costs most of a second, and only a report needs it

    chosen = [_first_cases(rows, operation) for operation in operations]
    heights = [1 + INCHES_A_CASE * len(labels) for labels in chosen]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    panels = figure.subplots(len(operations), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, operation, labels in zip(panels, operations, chosen):
        shown = [r for r in rows if r.case["operation"] == operation and r.percent is not None]
        candidates = list(dict.fromkeys(row.candidate for row in shown))
        thick = 0.8 / len(candidates)
        for index, candidate in enumerate(candidates):
            places = {row.label: row.percent for row in shown if row.candidate == candidate}
            at = [place + index * thick for place, label in enumerate(labels) if label in places]
            panel.barh(at, [places[v] for v in labels if v in places], thick, label=candidate)
        panel.set_yticks([place + 0.4 for place in range(len(labels))], labels, fontsize=7)
        panel.invert_yaxis()
        panel.axvline(100, color="black", linewidth=0.8)
        panel.set_xlabel("% of the ceiling that was measured in the same run")
        panel.set_title(f"{TITLES[operation]}, {device['device_kind']}")
        panel.legend(fontsize=7)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110)
    return [path]


def _first_cases(rows: Sequence[Row], operation: str) -> list[str]:
    found = (
        row.label for row in rows if row.case["operation"] == operation and row.percent is not None
    )
    return list(dict.fromkeys(found))[:MOST_CASES]
