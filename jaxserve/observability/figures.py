"""Pictures of what an engine did, drawn with matplotlib (the extra `bench`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.boundary.step_history import StepRecord
from jaxserve.errors import JaxServeError
from jaxserve.memory.page_pool import PageState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_STATES = ("free", "cached", "in use", "shared")  # by `PageState`
_COLOURS = ("#eeeeee", "#a6cee3", "#1f78b4", "#e6550d")
_QUEUE, _PREFILL, _DECODE = "#bbbbbb", "#e6550d", "#1f78b4"
MOST_BARS = 60  # requests of a timeline


class Span(NamedTuple):
    """When a request waited, read its prompt and wrote, in seconds of one clock.

    Attributes:
        arrival: it came.
        first_step: it was in a step; None where that is not known.
        first_token, last_token: when it got them.
    """

    arrival: float
    first_step: float | None
    first_token: float
    last_token: float


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, which no window shows.

    Raises:
        JaxServeError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise JaxServeError(
            f"pictures need matplotlib: pip install '.[bench]' in a clone ({error})"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def pages_figure(states: np.ndarray, steps: Sequence[StepRecord]) -> Figure:
    """The pages as a map, and how many were in use at each step.

    Args:
        states: a `PageState` of each page but the trash page, see `PagePool.states`.
        steps: in their order.
    """
    figure = new_figure(9, 3.6)
    from matplotlib.colors import ListedColormap

    left, right = figure.subplots(1, 2)
    columns = max(1, math.ceil(math.sqrt(2 * len(states))))
    cells = np.full(columns * math.ceil(len(states) / columns), np.nan)
    cells[: len(states)] = states
    colours = ListedColormap(_COLOURS)
    left.imshow(
        cells.reshape(-1, columns), cmap=colours, vmin=-0.5, vmax=3.5, interpolation="nearest"
    )
    counts = np.bincount(states, minlength=len(PAGE_STATES))
    for name, colour, count in zip(PAGE_STATES, _COLOURS, counts):
        left.plot([], [], "s", color=colour, markeredgecolor="#888888", label=f"{name}: {count}")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4, fontsize=8, frameon=False)
    left.set(title=f"{len(states)} pages now", xticks=[], yticks=[])
    times = [step.dispatched - steps[0].dispatched for step in steps]
    right.step(
        times, [step.num_pages for step in steps], where="post", color=_COLOURS[PageState.USED]
    )
    right.axhline(len(states), color="#888888", linewidth=0.8, linestyle=":")
    right.set(title="pages in use", xlabel="s", ylim=(0, None))
    right.grid(alpha=0.3)
    return figure


def timeline_figure(steps: Sequence[StepRecord], spans: Sequence[Span]) -> Figure:
    """Requests as bars, and below them what each step computed and how busy the device was.

    Args:
        steps: in their order; none: requests alone are drawn.
        spans: one a request; the last MOST_BARS are drawn.
    """
    spans = sorted(spans)[-MOST_BARS:]
    heights = [max(1.6, 0.09 * len(spans)), *([1.6, 1.0] if steps else [])]
    figure = new_figure(9, sum(heights) + 0.6)
    axes: Any = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    begins = [step.begin for step in steps[:1]] + [span.arrival for span in spans[:1]]
    start = min(begins, default=0.0)
    _draw_spans(axes[0, 0], spans, start)
    if steps:
        _draw_steps(axes[1, 0], axes[2, 0], steps, start)
    axes[-1, 0].set(xlabel="s")
    return figure


def latency_figure(samples: Mapping[str, Sequence[float]]) -> Figure:
    """The distribution of each kind of latency: the share of requests that took at most so long.

    Args:
        samples: seconds by what they are.
    """
    figure = new_figure(3 * max(1, len(samples)), 3)
    axes: Any = figure.subplots(1, max(1, len(samples)), squeeze=False)
    for axis, (name, values) in zip(axes[0], samples.items()):
        milliseconds = 1e3 * np.sort(np.asarray(values, dtype=np.float64))
        axis.set(title=name, xlabel="ms", ylim=(0, 1.02), ylabel="share")
        axis.grid(alpha=0.3)
        if not len(milliseconds):
            axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center")
            continue
        axis.step(milliseconds, np.arange(1, len(values) + 1) / len(values), where="post")
        for percent, style in ((50, ":"), (99, "--")):
            value = float(np.percentile(milliseconds, percent))
            axis.axvline(value, color="#e6550d", linewidth=1, linestyle=style)
            axis.plot([], [], style, color="#e6550d", label=f"p{percent} {_shown(value)}")
        axis.legend(fontsize=8, loc="lower right")
        axis.set(xlim=(0, None))
    return figure


def _draw_spans(axis: Any, spans: Sequence[Span], start: float) -> None:
    for row, (arrival, first_step, first_token, last_token) in enumerate(spans):
        begun = arrival if first_step is None else first_step
        for begin, end, colour in (
            (arrival, begun, _QUEUE),
            (begun, first_token, _PREFILL),
            (first_token, last_token, _DECODE),
        ):
            axis.barh(row, end - begin, left=begin - start, height=0.8, color=colour)
    for name, colour in (("queue", _QUEUE), ("prefill", _PREFILL), ("decode", _DECODE)):
        axis.barh(0, 0, color=colour, label=name)
    axis.set(ylabel="request", ylim=(len(spans) - 0.4, -0.6))
    axis.legend(fontsize=8, loc="upper right", ncols=3)


def _draw_steps(above: Any, below: Any, steps: Sequence[StepRecord], start: float) -> None:
    left = [step.dispatched - start for step in steps]
    widths = [max(step.fetched - step.dispatched, 1e-6) for step in steps]
    decode = [step.num_decode_tokens for step in steps]
    prefill = [step.num_prefill_tokens for step in steps]
    above.bar(left, decode, widths, align="edge", color=_DECODE, label="decode")
    above.bar(left, prefill, widths, decode, align="edge", color=_PREFILL, label="prefill")
    above.set(ylabel="tokens a step")
    above.legend(fontsize=8, loc="upper right", ncols=2)
    edges = np.array([steps[0].begin, *(step.fetched for step in steps)])
    busy = np.cumsum([0.0, *(step.device_busy for step in steps)])
    at = np.linspace(edges[0], edges[-1], min(len(steps), 100) + 1)
    shares = np.diff(np.interp(at, edges, busy)) / np.maximum(np.diff(at), 1e-9)
    below.stairs(np.clip(shares, 0, 1), at - start, color=_DECODE, fill=True, alpha=0.4)
    below.set(ylabel="device busy", ylim=(0, 1.02))


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
