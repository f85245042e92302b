"""Draws the figures of the docs that show how something works: python -m docs.figures.draw

Paging and scheduling are drawn from what the real scheduler does with a few requests; nothing is
computed, so no device is needed. A kernel's figure shows its parts and what moves between them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from docs.figures.kernels import KERNELS, Kernel
from docs.figures.runs import PAGES, SLOTS, Run, paging_run, scheduling_run

FOLDER = Path(__file__).parent
COLOURS = ("#1f78b4", "#33a02c", "#e6550d", "#6a3d9a", "#b15928", "#e31a1c")
SHARED, FREE, DARK = "#fdbf6f", "#f2f2f2", "#333333"
PITCH = 1.16  # of boxes, which are 0.86 wide
PLACES = {"memory": "#dce9f5", "chip": "#e5f2df", "compute": "#fde6d5"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the figures")
    output = parser.parse_args().output
    # the same bytes each time, and text that can be read and searched
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jaxserve"})
    save(paging(paging_run()), output / "paging.svg")
    save(scheduler(scheduling_run()), output / "scheduler.svg")
    for kernel in KERNELS:
        save(flow(kernel), output / f"kernel-{kernel.name}.svg")


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    print(path)


def blank(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.set_axis_off()
    return figure, axis


def cell(axis: Any, x: float, y: float, text: str, colour: str, width: float = 1.0) -> None:
    axis.add_patch(Rectangle((x, y), width, 1, facecolor=colour, edgecolor="white"))
    axis.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=7, color=DARK)


def paging(run: Run) -> Figure:
    """Three sequences, the page table of each, and the pool that their pages lie in."""
    figure, axis = blank(9, 3.4)
    requests = run.scheduler.running
    owners: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        for page in request.pages:
            owners.setdefault(page, []).append(row)
    for row, request in enumerate(requests):
        y = 5.4 - 1.5 * row
        axis.text(
            -0.3, y + 0.5, f"{request.num_computed} tokens", ha="right", va="center", fontsize=8
        )
        for index, page in enumerate(request.pages):
            mine = SHARED if len(owners[page]) > 1 else pale(COLOURS[row])
            cell(axis, index, y, f"page {page}", mine)
            tokens = min(run.page_size, request.num_computed - index * run.page_size)
            axis.add_patch(Rectangle((index, y), tokens / run.page_size, 0.1, color=COLOURS[row]))
    axis.text(0, 7.0, "page tables: token t lies in entry t // 16", fontsize=9)
    axis.text(0, 1.45, "the pool: pages anywhere, given out one by one", fontsize=9)
    for page in range(1, PAGES):
        rows = owners.get(page, [])
        colour = SHARED if len(rows) > 1 else pale(COLOURS[rows[0]]) if rows else FREE
        cell(axis, 0.75 * (page - 1), 0, str(page), colour, 0.75)
    axis.text(0, -0.6, "orange: the prefix that two share. grey: free", fontsize=8, color=DARK)
    axis.set(xlim=(-2, 0.75 * (PAGES - 1) + 0.2), ylim=(-1, 7.6))
    return figure


def scheduler(run: Run) -> Figure:
    """What each slot computes in each step: chunks of prompts, then a token a step."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axis = figure.subplots()
    names = sorted({row.name for step in run.steps for row in step})
    for number, step in enumerate(run.steps):
        for row in step:
            colour = COLOURS[names.index(row.name) % len(COLOURS)]
            axis.add_patch(
                Rectangle(
                    (number, row.slot - 0.45),
                    0.94,
                    0.9,
                    facecolor=colour if row.is_prefill else pale(colour),
                )
            )
            text = f"{row.name}\n+{row.length}" if row.is_prefill else row.name
            axis.text(
                number + 0.47,
                row.slot,
                text,
                ha="center",
                va="center",
                fontsize=6.5,
                color="white" if row.is_prefill else DARK,
            )
    axis.set(
        xlim=(0, len(run.steps)),
        ylim=(SLOTS - 0.4, -0.6),
        yticks=range(SLOTS),
        xlabel="step",
        ylabel="slot",
        title="dark: a chunk of a prompt and its tokens. light: one token",
    )
    axis.title.set_size(9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure


def flow(kernel: Kernel) -> Figure:
    """Boxes in rows, from memory to memory; arrows are what moves."""
    columns = PITCH * max(len(row) for row in kernel.rows) - (PITCH - 1)
    figure, axis = blank(9, 0.55 + 0.95 * len(kernel.rows))
    places: dict[str, tuple[float, float]] = {}
    width, height = 0.86, 0.62
    for number, row in enumerate(kernel.rows):
        for column, box in enumerate(row):
            if box is None:
                continue
            x, y = PITCH * column, -float(number)
            places[box.name] = x, y
            axis.add_patch(
                FancyBboxPatch(
                    (x, y),
                    width,
                    height,
                    boxstyle="round,pad=0.01,rounding_size=0.05",
                    facecolor=PLACES[box.place],
                    edgecolor="#999999",
                    linewidth=0.8,
                )
            )
            axis.text(x + width / 2, y + height / 2, box.text, ha="center", va="center", fontsize=7)
    for source, target, text in kernel.arrows:
        (x, y), (to_x, to_y) = places[source], places[target]
        if y == to_y:
            begin, end = (x + width + 0.01, y + height / 2), (to_x - 0.01, y + height / 2)
            if to_x < x:
                begin, end = (x - 0.01, y + height / 2), (to_x + width + 0.01, y + height / 2)
        else:
            begin = x + width / 2, y - 0.01 if to_y < y else y + height + 0.01
            end = to_x + width / 2, to_y + height + 0.01 if to_y < y else to_y - 0.01
        axis.add_patch(
            FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=9, color="#555555", lw=1)
        )
        middle = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
        axis.text(
            middle[0] + (0.03 if y != to_y else 0),
            middle[1] + (0 if y != to_y else 0.09),
            text,
            fontsize=6,
            ha="left" if y != to_y else "center",
            va="center",
            color=DARK,
        )
    axis.set(xlim=(-0.05, columns - 0.05), ylim=(-len(kernel.rows) + 0.85, 0.98))
    axis.text(0, 0.82, kernel.title, fontsize=9, weight="bold")
    at = columns - 0.14
    for name, colour in reversed(PLACES.items()):
        axis.text(
            at, 0.84, name, fontsize=7, ha="right", bbox={"facecolor": colour, "lw": 0, "pad": 2}
        )
        at -= 0.42
    return figure


def pale(colour: str) -> str:
    """A light form of a colour."""
    parts: Sequence[int] = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{255 - (255 - part) * 35 // 100:02x}" for part in parts)


if __name__ == "__main__":
    main()
