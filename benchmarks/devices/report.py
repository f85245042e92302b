"""The report of several devices: one table of the engine, one of kernels, figures; two formats."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kernel_bench.report import number, table
from jaxserve.simulation.devices import DEVICES

Results = Mapping[str, Any]
TITLE = "The same workloads on different devices"
FIGURES = {"devices.png": "The engine on each device", "kernels.png": "Kernels on each device"}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem}"
    "div{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}"
    "td,th{border-bottom:1px solid #ccc;padding:.2rem .6rem;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#eee}img{background:#fff}}"
)
ENGINE_COLUMNS = (
    "device", "type", "requests", "tokens/s", "ms to the first", "ms a token", "% of the roofline",
    "J a token", "a million tokens",
)  # fmt: skip


class Report(NamedTuple):
    """What is reported.

    Attributes:
        devices: results of each, see `compare`.
        absent: platforms that are not here, and why.
        prices: of an hour of a device, by keys of `DEVICES`.
        currency: of the prices.
        price_source: where they come from, in words.
    """

    devices: Sequence[Results]
    absent: Mapping[str, str]
    prices: Mapping[str, float]
    currency: str = "USD"
    price_source: str = ""


def kind_of(device: Results) -> str | None:
    """The key of a device in `DEVICES`; None: it has none."""
    if device["platform"] == "cpu":
        return "cpu"
    name = device.get("device_kind", device["name"])
    return next((kind for kind, one in DEVICES.items() if one.name == name), None)


def price_of_a_million(report: Report, device: Results, entry: Results) -> float | None:
    """Of output tokens, the device being busy with this batch alone."""
    per_hour = report.prices.get(kind_of(device) or "")
    return None if per_hour is None else per_hour / (3600 * entry["tok_s"]) * 1e6


def engine_rows(report: Report) -> list[list[str]]:
    """A row a device and batch; estimates have a tilde, what is not known a dash."""
    rows = []
    for device in report.devices:
        mark = "~" if device.get("estimated") else ""
        for entry in device.get("engine", ()):
            if entry["tok_s"] is None:
                rows.append([device["name"], "-", str(entry["batch"]), *["-"] * 6])
                continue
            values = (
                entry["tok_s"],
                entry["ttft_ms"],
                entry["tpot_ms"],
                entry["roofline"],
                entry["joules_per_token"],
                price_of_a_million(report, device, entry),
            )
            cells = ["-" if v is None else f"{mark}{number(v)}" for v in values]
            if cells[-1] != "-":
                cells[-1] += f" {report.currency}"
            rows.append([device["name"], entry["dtype"], str(entry["batch"]), *cells])
    return rows


def kernel_rows(devices: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a row a kernel, a column a device that has one."""
    having = [device for device in devices if device["workloads"]]
    found: dict[tuple[str, str], dict[int, Results]] = {}
    for index, device in enumerate(having):
        for entry in device["workloads"]:
            found.setdefault((entry["workload"], entry["unit"]), {})[index] = entry
    rows = []
    for (workload, unit), by_device in found.items():
        cells = [workload, unit]
        for index in range(len(having)):
            entry = by_device.get(index)
            value = entry["value"] if entry else None
            mark = "~" if entry and entry["estimated"] and value is not None else ""
            cells.append("-" if value is None else f"{mark}{number(value, 4)}")
        rows.append(cells)
    return ["kernel", "unit", *(device["name"] for device in having)], rows


def notes(report: Report) -> list[str]:
    """What each device is, what the figures mean, and what is missing."""
    lines = []
    for device in report.devices:
        told = [f"{device['name']}: {device.get('machine', '')}".rstrip(": ")]
        told += list(dict.fromkeys(e["limits"] for e in device.get("engine", ()) if e["tok_s"]))
        lines.append(", ".join(told))
    lines += [f"{platform}: not here ({reason})" for platform, reason in report.absent.items()]
    lines.append(
        "Roofline: the share of the time that the least bytes, or the operations, would have taken "
        "at the rates above; where other work shares the machine, rates and runs differ by chance."
    )
    if any(device.get("estimated") for device in report.devices):
        lines.append("~: an estimate, not measured.")
    if report.prices:
        given = ", ".join(f"{kind} {price:g}" for kind, price in report.prices.items())
        lines.append(f"Prices in {report.currency} an hour ({report.price_source}): {given}.")
    if not any(e.get("joules_per_token") for d in report.devices for e in d.get("engine", ())):
        lines.append("Energy: no driver here tells it.")
    for device in report.devices:
        failed = [(f"{e['batch']} requests", e) for e in device.get("engine", ()) if not e["tok_s"]]
        failed += [(e["workload"], e) for e in device["workloads"] if e["value"] is None]
        lines += [f"{device['name']}, {what}: {entry['remark']}" for what, entry in failed]
    return lines


def parts(report: Report) -> list[tuple[str, str, Sequence[str], list[list[str]]]]:
    """Heading, figure, columns and rows of each table that has rows."""
    described = [d for d in report.devices if d.get("engine")]
    found = []
    if described:
        one = described[0]
        heading = f"Engine: {one['shape']}, random weights, {one['length']} tokens in and out"
        found.append((heading, "devices.png", ENGINE_COLUMNS, engine_rows(report)))
    columns, rows = kernel_rows(report.devices)
    if rows:
        found.append(("Kernels", "kernels.png", columns, rows))
    return found


def markdown(report: Report) -> str:
    """For a repository or a page."""
    lines = [f"# {TITLE}", ""]
    for heading, figure, columns, rows in parts(report):
        lines += [f"## {heading}", "", *table(columns, rows), ""]
        lines += [f"![{FIGURES[figure]}]({figure})", ""]
    return "\n".join([*lines, "## Notes", "", *(f"- {line}" for line in notes(report))]) + "\n"


def page(report: Report) -> str:
    """The same as HTML; the figures lie beside it."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(v)}</{tag}>" for v in values) + "</tr>"

    body = [f"<h1>{TITLE}</h1>"]
    for heading, figure, columns, rows in parts(report):
        body.append(f"<h2>{html.escape(heading)}</h2>")
        body.append(f"<div><table>{cells('th', columns)}")
        body += [cells("td", row) for row in rows]
        body.append(f'</table></div><p><img src="{figure}" alt="{FIGURES[figure]}"></p>')
    body += ["<h2>Notes</h2><ul>", *(f"<li>{html.escape(n)}</li>" for n in notes(report)), "</ul>"]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        head,
        f"<title>{TITLE}</title><style>{STYLE}</style>",
        *body,
    ]
    return "\n".join([*lines, "</html>"]) + "\n"


def write(report: Report, folder: Path) -> list[Path]:
    """devices.md, devices.html and the figures."""
    from benchmarks.devices.figures import engine_figure, kernel_figure

    written = [folder / "devices.md", folder / "devices.html"]
    written[0].write_text(markdown(report))
    written[1].write_text(page(report))
    for _, name, _, _ in parts(report):
        figure = engine_figure(report) if name == "devices.png" else kernel_figure(report.devices)
        figure.savefig(folder / name, dpi=110)
        written.append(folder / name)
    return written
