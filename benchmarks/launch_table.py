"""The launches of compiled steps, as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.memory_table import StepProof
from benchmarks.verify.prove import Counts, device_name

COLUMNS = (
    "program",
    "device",
    "kernels a layer",
    "of them",
    "in all",
    "loops",
    "copies",
    "float32 results rounded elsewhere",
    "products in parts",
    "graphs (outside)",
    "blob B",
)
LEGEND = """\
Counted in compiled programs, not measured. *of them*: kernels of one layer by class: products of
matrices, this package's kernels by name, XLA's fusions. *loops*: `while` instructions. *float32
results rounded elsewhere*: products of 16-bit numbers whose float32 result another kernel only
rounds; *products in parts* leave float32 parts that the next kernel adds, because K was divided.
*graphs*: CUDA graphs of a step, and how many launches are in none. Every product of a GPU is one
that XLA generates: autotuning, which may choose cuBLAS, needs the device. A dash: not known.
"""


def _row(step: StepProof) -> str:
    found = step.proof.counts
    cells: list[object] = [f"{step.shape}, {step.step}", device_name(step.proof.device)]
    cells += _cells(found) if found else [None] * (len(COLUMNS) - 3)
    cells.append(step.blob)
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def _cells(found: Counts) -> list[object]:
    by_class = ", ".join(f"{name} {n}" for name, n in sorted(found.a_layer.items()))
    return [
        sum(found.a_layer.values()) or None,
        by_class or None,
        sum(found.kernels.values()),
        found.loops,
        found.copies,
        found.rounded_elsewhere,
        found.in_parts,
        None if found.graphs is None else f"{found.graphs} ({found.outside})",
    ]


def launch_table(steps: Sequence[StepProof]) -> str:
    """The legend and a line a program."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([LEGEND, *lines, *map(_row, steps)]) + "\n"
