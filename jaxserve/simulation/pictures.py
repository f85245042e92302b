"""Pictures of simulations: the engine over time, and latency against the offered rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.observability.figures import new_figure
from jaxserve.simulation.served import Served

MOST_POINTS = 2000
NEAR = 0.3  # share of the pages in use, from which on the picture shows all


def plot_engine(served: Served, num_pages: int, title: str, path: Path) -> None:
    """A PNG: requests that wait, pages in use and what a step computes, over simulated time.

    Args:
        served: of a simulation.
        num_pages: that there are.
        title: of the picture.
        path: of the file.
    """
    figure = new_figure(9, 6.5)
    every = max(1, served.num_steps // MOST_POINTS)
    times = np.asarray(served.step_time)[::every]
    queue, pages, batch = figure.subplots(3, 1, sharex=True)
    for name, values in (("waiting", served.waiting), ("running", served.running)):
        queue.step(times, np.asarray(values)[::every], where="post", label=name)
    queue.set(ylabel="sequences", ylim=(0, None))
    pages.step(times, np.asarray(served.pages)[::every], where="post", label="in use")
    if max(served.pages, default=0) > NEAR * num_pages:
        pages.axhline(num_pages, color="#888888", linestyle=":", label="there are")
    pages.set(ylabel=f"KV pages of {num_pages:,}", ylim=(0, None))
    for name, values in (("decode", served.decode_tokens), ("prefill", served.prefill_tokens)):
        batch.step(times, np.asarray(values)[::every], where="post", label=name)
    batch.set(ylabel="tokens a step", xlabel="simulated s", yscale="symlog", ylim=(0, None))
    for axis in (queue, pages, batch):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper right", ncols=2)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)


def knee(rates: Sequence[float], latencies: Sequence[float]) -> int | None:
    """The place of the knee of a rising curve: where it lies furthest below its chord.

    Satopaa, Albrecht, Irwin and Raghavan, "Finding a 'kneedle' in a haystack" (2011), for a convex
    curve. None: fewer than three points, or it does not rise.
    """
    if len(rates) < 3 or latencies[-1] <= latencies[0] or rates[-1] <= rates[0]:
        return None
    x = (np.array(rates) - rates[0]) / (rates[-1] - rates[0])
    y = (np.array(latencies) - latencies[0]) / (latencies[-1] - latencies[0])
    return int(np.argmax(x - y))


def plot_rates(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """A PNG: p99 and median of TTFT and of the time per token by offered rate, the knee marked.

    Args:
        rows: reports with `request_rate`, by it.
        title: of the picture.
        path: of the file.
    """
    figure = new_figure(10, 3.8)
    rates = [row["request_rate"] for row in rows]
    place = knee(rates, [row["p99_ttft_ms"] for row in rows])
    for axis, metric in zip(figure.subplots(1, 2), ("ttft", "tpot")):
        for head in ("median", "p99"):
            axis.plot(rates, [row[f"{head}_{metric}_ms"] for row in rows], "o-", label=head)
        if place is not None:
            axis.axvline(
                rates[place], color="#e6550d", linestyle="--", label=f"knee: {rates[place]:.3g}/s"
            )
        axis.set(xlabel="offered requests/s", ylabel=f"{metric}, ms", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
