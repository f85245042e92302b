"""Figures of several devices: bars, of which those of estimates are hatched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.devices.report import Report, Results, price_of_a_million
from jaxserve.observability.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HATCH = "///"
COLUMNS = 3
Value = Callable[[Results, Results], float | None]


def engine_figure(report: Report) -> Figure:
    """A panel a metric: groups of bars by the number of requests, a colour a device."""
    panels: list[tuple[str, bool, Value]] = [
        ("output tokens a second", True, lambda device, entry: entry["tok_s"]),
        ("ms to the first token", True, lambda device, entry: entry["ttft_ms"]),
        ("ms a token", True, lambda device, entry: entry["tpot_ms"]),
        ("% of the roofline", False, lambda device, entry: entry["roofline"]),
    ]
    if report.prices:
        title = f"{report.currency} a million output tokens"
        panels.append((title, True, lambda *of: price_of_a_million(report, *of)))
    devices = [device for device in report.devices if device.get("engine")]
    batches = sorted({entry["batch"] for device in devices for entry in device["engine"]})
    lines = -(-len(panels) // COLUMNS)
    figure = new_figure(4.2 * COLUMNS, 2.9 * lines + 0.6)
    axes = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    width = 0.8 / len(devices)
    for axis, (title, is_wide, value) in zip(axes, panels):
        for place, device in enumerate(devices):
            hatch = HATCH if device.get("estimated") else None
            for entry in device["engine"]:
                height = None if entry["tok_s"] is None else value(device, entry)
                if height is not None:
                    x = batches.index(entry["batch"]) + (place - len(devices) / 2 + 0.5) * width
                    axis.bar(x, height, width, color=f"C{place}", hatch=hatch, edgecolor="white")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set_xlabel("requests at once", fontsize=8)
        axis.grid(axis="y", alpha=0.3)
        if is_wide:
            axis.set_yscale("log")
    handles = [_patch(place, device) for place, device in enumerate(devices)]
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def kernel_figure(devices: Sequence[Results]) -> Figure:
    """A panel a kernel, a bar a device."""
    having = [device for device in devices if device["workloads"]]
    kernels = list(dict.fromkeys(e["workload"] for device in having for e in device["workloads"]))
    lines = -(-len(kernels) // COLUMNS)
    figure = new_figure(4.5 * COLUMNS, 1.6 * lines + 1)
    axes = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    for axis in axes[len(kernels) :]:
        axis.set_axis_off()
    for axis, name in zip(axes, kernels):
        axis.set_title(f"{name}, us", fontsize=7)
        for place, device in enumerate(having):
            for entry in device["workloads"]:
                if entry["workload"] == name and entry["value"] is not None:
                    hatch = HATCH if entry["estimated"] else None
                    axis.barh(place, entry["value"], color=f"C{place}", hatch=hatch)
        axis.set_yticks(range(len(having)), [device["name"] for device in having], fontsize=6)
        axis.tick_params(axis="x", labelsize=6)
        axis.invert_yaxis()
    return figure


def _patch(place: int, device: Results) -> object:
    from matplotlib.patches import Patch  # a report alone needs it

    hatch = HATCH if device.get("estimated") else None
    return Patch(facecolor=f"C{place}", hatch=hatch, edgecolor="white", label=device["name"])
